"""Model and data of a run in words, from its configuration."""

from __future__ import annotations

import math
from typing import Any

from tqdm import tqdm

from vqclip.data import mask_credentials
from vqclip.errors import count_noun
from vqclip.report.run_files import RunFiles, list_at, number_at, text_at, value_at


def codebook_size(quantizer: Any) -> int | None:
    """Return K of a quantizer's configuration; None if it has no codebook or is unknown."""
    kind = text_at(quantizer, "kind")
    if kind in ("product", "residual"):
        return codebook_size(value_at(quantizer, "layer"))
    if kind == "fsq":
        levels = [each for each in list_at(quantizer, "levels") if type(each) is int and 2 <= each < 2**20]
        return min(math.prod(levels[:64]), 2**64) if levels else None
    if kind in ("lfq", "bsq"):
        return int(2 ** min(bits, 64)) if (bits := number_at(quantizer, "bits")) and bits > 0 else None
    size = number_at(quantizer, "codebook_size")
    return int(size) if size and size > 0 else None


def describe_quantizer(quantizer: Any) -> str:
    """Return a quantizer's configuration in words: ``16 codebooks of FSQ 8×8×8×8 (4,096 codes)``."""
    kind = text_at(quantizer, "kind")
    if kind in ("product", "residual"):
        count = int(number_at(quantizer, "codebooks" if kind == "product" else "depth") or 0)
        inner = describe_quantizer(value_at(quantizer, "layer"))
        return f"{count:,} {'codebooks' if kind == 'product' else 'residual stages'} of {inner}"
    if kind == "identity":
        return "no quantizer (continuous)"
    size = codebook_size(quantizer)
    shape = "×".join(str(each)[:10] for each in list_at(quantizer, "levels")[:16])
    codes = f" ({size:,} codes)" if size is not None else ""
    return f"{kind[:40].upper() or 'an unknown quantizer'}{f' {shape}' if shape else ''}{codes}"


def describe_model(run: RunFiles) -> str:
    """Return towers, quantizers and the cost in bits, in one line; of a pixel task the decoder and its tokenizer."""
    if text_at(run.config, "task") == "pixels":
        kind, tokenizer = (text_at(run.config, each) for each in ("decoder.kind", "tokenizer"))
        return f"{kind[:40] or 'unknown'} pixel decoder for the ids of {mask_credentials(tokenizer[:200])}"
    return " · ".join(_describe_tower(run, modality) for modality in ("image", "text") if value_at(run.config, "model"))


def _describe_tower(run: RunFiles, modality: str) -> str:
    part = f"model.{modality}"
    kind = text_at(run.config, f"{part}.tower.kind") or "unknown"
    name = text_at(run.config, f"{part}.tower.name") or text_at(run.config, f"{part}.tower.model")
    tower = f"{modality}: {kind[:40]} tower{f' {name[:80]}' if name else ''}"
    tokens, bits = (number_at(run.summary, f"{each}.{modality}") for each in ("tokens", "bits_per_sample"))
    weights = number_at(run.summary, f"parameters.{modality}")
    text = f"{tower}{f' ({weights / 1e6:.2f} M trained weights)' if weights else ''}"
    text += f" → {count_noun(tokens, 'token')}" if tokens else ""
    text += f" {'×' if tokens else 'with'} {describe_quantizer(value_at(run.config, f'{part}.quantizer'))}"
    return text + (f" = {bits:,.0f} bits {'an image' if modality == 'image' else 'a full caption'}" if bits else "")


def describe_data(run: RunFiles) -> str:
    """Return the sources, and how many samples were shown."""
    sources = [_describe_source(each) for each in list_at(run.config, "data.sources")]
    named = ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
    coverage = text_at(run.summary, "coverage")[:200]
    shown = coverage or f"{run.done * run.batch_size:,} samples shown"
    return f"{named or 'unknown data'} · {shown} · batches of {run.batch_size:,}"


def _describe_source(source: Any) -> str:
    where = text_at(source, "path") or text_at(source, "name") or text_at(source, "dataset")
    split = text_at(source, "split")
    return " ".join(part[-80:] for part in (text_at(source, "kind") or "unknown", where, split) if part)


def describe_progress(run: RunFiles) -> str:
    """Return steps, processes, speed and state."""
    parts = [f"step {run.done:,}{f' of {run.steps:,}' if run.steps else ''}"]
    # Each process but the first has a log file of its own.
    logs = sum(1 for _, _ in zip(run.folder.glob("train.rank*.log"), range(100_000), strict=False))
    processes = number_at(run.summary, "processes") or 1 + logs
    parts.append(f"{processes:,.0f} process{'es' if processes != 1 else ''}")
    speeds = [each for each in run.curves.get("images_per_second")[1] if math.isfinite(each) and each > 0]
    speed = number_at(run.summary, "speed.images_per_second") or (sum(speeds) / len(speeds) if speeds else None)
    if speed:
        parts.append(f"{speed:,.0f} images/s")
        seconds = min(run.done * run.batch_size / speed, 1e12)
        parts.append(f"about {tqdm.format_interval(seconds)} of training")
    return " · ".join(parts)


def describe_state(run: RunFiles) -> str:
    """Return whether the run is finished, stopped or in progress."""
    if run.stopped:
        reason = text_at(run.stopped, "reason")[:200]
        at = f"stopped at step {number_at(run.stopped, 'step') or 0:,.0f}"
        return f"{at}{f' ({reason})' if reason else ''}; the same command resumes it"
    if run.is_finished:
        return "finished"
    return "not finished: still running, or ended by an error (see train.log)"
