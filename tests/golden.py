"""Golden trajectories: what small runs see, lose and export, recorded once and compared after every change of code.

    python -m tests.golden compare             # all runs; or some: compare fsq pixels
    python -m tests.golden record              # write tests/golden.json again, where a change is meant

A run has 30 steps on images that are drawn here and stored as PNG. Recorded are, for every step, the bits of the loss,
a hash of the samples of the global batch (their ids and captions) and one of their pixels; and the ids that the
exported tokenizers give to fixed inputs.

The bits of a loss depend on the processor and on torch. `compare` demands all of them where both are those of the
record. Elsewhere it demands the samples of every step, the shapes of the ids, and losses within a tolerance.
"""

import argparse
import csv
import gzip
import hashlib
import itertools
import json
import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import vqclip
from tests.data.making import encode, write_tar
from tests.data.serving import FaultyServer
from tests.models import BUSY_RESIDUAL, BUSY_VQ, FSQ, LFQ, PRODUCT, SIMVQ, tiny_model
from tests.ranks import RankPool
from tests.training import before_steps, metrics, run_tree
from vqclip.scenes.splits import train_samples
from vqclip.train import run as train
from vqclip.train.step import TrainStep
from vqclip.train.tasks.kinds import load_task_config

RECORD = Path(__file__).with_suffix(".json")
STEPS, BATCH, SAMPLES, BAD = 30, 8, 46, 13
LIMIT_S = 280.0
TOLERANCE = {"fp64": 1e-3, "fp32": 2e-2, "bf16": 0.1}
"""Largest relative difference of a loss on another processor or with another torch, by precision.

Other kernels round resized pixels otherwise, so that losses in fp64 differ by some 1e-6.
"""

SIGMOID = {"model__temperature": {"init": 10.0, "bias": -10.0}, "loss": {"kind": "sigmoid"}}
ENTROPY = {"entropy_temperature": 0.1, "loss_weights": {"token_entropy": 0.1, "codebook_entropy_gap": 0.1}}
FP32 = {"train__precision": "fp32"}
WINDOWED = {"data__order": {"kind": "windowed", "chunk": 4, "window": 3}}
AUGMENTED = {"data__transform": {"scale": [0.4, 1.0], "flip": 0.5, "rotation": 20.0, "brightness": 0.2}}


class Golden(NamedTuple):
    """A run that is recorded."""

    quantizer: dict[str, Any]
    """Quantizer of both modalities."""
    sources: Sequence[Mapping[str, Any]]
    """`data.sources`."""
    changes: Mapping[str, Any]
    """Further settings, as `tests.training.run_tree` takes them."""
    ranks: int = 1


def golden_runs(data: Path, url: str) -> dict[str, Golden]:
    """Return the runs by name.

    Args:
        data: folder that `write_data` has filled.
        url: URL at which it is served.
    """
    names = "{00000..00002}.tar"
    tars = {"kind": "shards", "path": f"{data}/tars", "captions": "txt_lines"}
    served = tars | {"path": f"{url}/tars/{names}"}
    table = {"kind": "csv", "path": f"{data}/table.csv"}
    listed = {"kind": "coco", "path": f"{data}/captions.json", "images": f"{data}/images"}
    beside = {"kind": "folder", "path": f"{data}/beside", "captions": "txt_lines"}
    rows = {"kind": "parquet", "path": f"{data}/rows"}
    classes = {"kind": "classes", "path": f"{data}/classes", "split": "train"}
    packed = tars | {"path": f"{data}/packed"}

    pixels = tiny_model(FSQ, FSQ).model_dump(mode="json")
    decoder = {"kind": "transformer", "width": 8, "heads": 2, "depth": 1, "channels": 3}
    pixels["image"]["pixels"] = {"decoder": decoder, "losses": [{"kind": "l1"}, {"kind": "l2", "weight": 0.5}]}
    frozen = tiny_model(FSQ, FSQ).model_dump(mode="json")
    frozen["image"]["tower"]["train"] = frozen["text"]["tower"]["train"] = "none"
    cached = {"data__views": 2, "data__feature_cache": {}}

    return {
        "fsq": Golden(FSQ, [tars], AUGMENTED),
        "lfq": Golden(LFQ | ENTROPY, [rows], SIGMOID | {"data__workers": 2}),
        "bsq": Golden({"kind": "bsq", "bits": 6} | ENTROPY, [table], {"train__micro_batches": 3}),
        "vq": Golden(BUSY_VQ, [beside], {"data__workers": 2} | AUGMENTED),
        "residual": Golden(BUSY_RESIDUAL, [listed], SIGMOID | {"train__micro_batches": 2}),
        "product": Golden(PRODUCT, [served], WINDOWED | {"data__workers": 2}),
        "simvq": Golden(SIMVQ, [tars | {"path": f"file://{data}/tars/{names}"}], WINDOWED),
        "weights": Golden(
            FSQ,
            [tars | {"weight": 0.5}, table | {"weight": 1.7}, rows, classes | {"weight": 0.3}],
            {"train__ema": {"decay": 0.9}} | FP32,
        ),
        "windows": Golden(BUSY_VQ, [packed | {"weight": 1.5}, listed, served], WINDOWED | {"train__ema": {}}),
        "pixels": Golden(FSQ, [beside], {"model": pixels} | FP32),
        "features": Golden(BUSY_VQ, [tars, table], cached | {"model": frozen} | AUGMENTED),
        "bf16": Golden(LFQ | ENTROPY, [packed, rows], {"train__precision": "bf16"}),
        "ddp": Golden(BUSY_RESIDUAL, [served, table], WINDOWED | {"data__workers": 2, "train__batch_size": 9}, ranks=2),
        "fsdp": Golden(BUSY_VQ, [rows], {"train__parallel": "fsdp", "train__ema": {}} | FP32, ranks=2),
    }


# ---- data


def write_data(folder: Path) -> None:
    """Write the same drawn images with two captions each in the layouts that the runs read.

    In the folder with captions beside the images, image number `BAD` is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    drawn = list(train_samples(0, SAMPLES, 32))
    images = [encode(sample.pixels, "PNG") for sample in drawn]
    captions = [(sample.caption or "", f"image {number}") for number, sample in enumerate(drawn)]
    lines = ["\n".join(pair) for pair in captions]

    (folder / "packed").mkdir(parents=True)
    for shard, part in enumerate((range(20), range(20, 37), range(37, SAMPLES))):
        members = {
            f"{n:05d}.{end}": data for n in part for end, data in (("png", images[n]), ("txt", lines[n].encode()))
        }
        tar = write_tar(folder / "tars" / f"{shard:05d}.tar", members)
        (folder / "packed" / f"{shard:05d}.tar.gz").write_bytes(gzip.compress(tar.read_bytes(), mtime=0))

    (folder / "images").mkdir()
    (folder / "beside").mkdir()
    for number, image in enumerate(images):
        (folder / "images" / f"{number:05d}.png").write_bytes(image)
        (folder / "beside" / f"{number:05d}.png").write_bytes(image if number != BAD else b"no image")
        (folder / "beside" / f"{number:05d}.txt").write_text(lines[number])
    with (folder / "table.csv").open("w", newline="") as file:
        rows = ([f"images/{number:05d}.png", pair[0]] for number, pair in enumerate(captions))
        csv.writer(file).writerows([["filepath", "title"], *rows])
    listing = {
        "images": [{"id": 3 * number, "file_name": f"{number:05d}.png"} for number in range(SAMPLES)],
        "annotations": [{"image_id": 3 * n, "caption": text} for n, pair in enumerate(captions) for text in pair],
    }
    (folder / "captions.json").write_text(json.dumps(listing))

    columns = {"image": [{"bytes": each, "path": None} for each in images], "caption": list(map(list, captions))}
    (folder / "rows").mkdir()
    for number, first in enumerate((0, 25)):
        table = pa.table(columns).slice(first, 25)
        pq.write_table(table, folder / "rows" / f"{number}.parquet", row_group_size=6)

    labelled = [(n, pair) for n in range(20) for pair in (("png", images[n]), ("cls", b"%d" % (n % 3)))]
    write_tar(folder / "classes" / "train" / "0.tar", {f"{n:05d}.{end}": data for n, (end, data) in labelled})
    (folder / "classes" / "train" / "nshards.txt").write_text("1\n")
    (folder / "classes" / "classnames.txt").write_text("star\ncircle\nsquare\n")
    (folder / "classes" / "zeroshot_classification_templates.txt").write_text("a {c}\n")


# ---- running


def run_rank(tree: dict[str, Any], cache: str) -> list[list[tuple[int, str, str]]]:
    """Train as one rank; return place, hash of id and caption, and hash of pixels, of each sample of each step."""
    os.environ["VQCLIP_CACHE"] = cache
    seen: list[list[tuple[int, str, str]]] = []

    def record(step: TrainStep, batch: Any, number: int) -> None:
        stored = batch.features.get("image", batch.images)
        rows = zip(batch.places.tolist(), batch.sample_ids.tolist(), batch.texts, stored, strict=True)
        seen.append([(place, _digest(f"{key}", text), _digest(image)) for place, key, text, image in rows])

    with before_steps(record):
        train(load_task_config(tree))
    return seen


def run_golden(pool: RankPool, golden: Golden, folder: Path) -> dict[str, Any]:
    """Train a run in `folder`; return its entry of the record."""
    defaults = {
        "train__steps": STEPS,
        "train__batch_size": BATCH,
        "run__timeout_s": LIMIT_S,
        "report": None,
        "data__sources": golden.sources,
    }
    tree = run_tree(folder, folder, golden.quantizer, **(defaults | golden.changes))
    parts = pool(golden.ranks, run_rank, tree, str(folder / "cache"), init=False, timeout=LIMIT_S)
    steps = [sorted(itertools.chain(*step)) for step in zip(*parts, strict=True)]
    return {
        "precision": tree["train"]["precision"],
        "loss": [float(line["loss/total"]).hex() for line in metrics(folder)],
        "samples": [_digest(*(row[1] for row in step)) for step in steps],
        "pixels": [_digest(*(row[2] for row in step)) for step in steps],
        "exported": pool(1, exported_ids, str(folder / "tiny" / "tokenizer"), init=False)[0],
    }


def exported_ids(folder: str) -> dict[str, Any]:
    """Return shape and hash of the ids of fixed inputs by the tokenizers of a folder."""
    images = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    inputs = {"image": images, "text": ["a red star", "two small blue circles", "x", "image 7"]}
    ids = {name: vqclip.load_tokenizer(folder, name).encode(batch) for name, batch in inputs.items()}
    return {name: {"shape": list(each.shape), "sha256": _digest(each)} for name, each in ids.items()}


def _digest(*parts: str | torch.Tensor) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of texts and tensors."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.encode() if isinstance(part, str) else part.contiguous().numpy().tobytes())
    return sha.hexdigest()[:12]


@contextmanager
def prepared(folder: Path) -> Iterator[dict[str, Golden]]:
    """Write the data into a folder and serve them; the runs by name."""
    write_data(folder / "data")
    with closing(FaultyServer()) as server:
        yield golden_runs(folder / "data", server.add(folder / "data"))


# ---- comparing


def this_machine() -> dict[str, str]:
    """Return what the bits of a loss depend on beside the code."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)", info.read_text() if info.exists() else "", re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.processor(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def differences(expected: Mapping[str, Any], got: Mapping[str, Any], exact: bool) -> list[str]:
    """Return where an entry of the record and a new one differ, a line for each kind of difference.

    Args:
        expected: entry of the record.
        got: result of `run_golden`.
        exact: compare all bits; otherwise samples, shapes, and losses within a tolerance.
    """
    kinds = ("samples", "pixels", "loss") if exact else ("samples",)
    found = [_first_step(kind, expected[kind], got[kind]) for kind in kinds]
    if not exact:
        wanted, losses = ([float.fromhex(loss) for loss in entry["loss"]] for entry in (expected, got))
        tolerance = TOLERANCE[expected["precision"]]
        far = [
            f"loss of step {step}: expected {one:.8g} within {tolerance:g} of it, got {other:.8g}"
            for step, (one, other) in enumerate(zip(wanted, losses, strict=True))
            if not math.isclose(one, other, rel_tol=tolerance)
        ]
        found += far[:1]
    for name, ids in expected["exported"].items():
        wanted, other = (each if exact else each["shape"] for each in (ids, got["exported"][name]))
        if wanted != other:
            found.append(f"exported {name} tokenizer: expected ids {wanted}, got {other}")
    return [line for line in found if line]


def _first_step(kind: str, expected: list[str], got: list[str]) -> str:
    if expected == got:
        return ""
    step = next((n for n, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), -1)
    if step < 0:
        return f"{kind}: expected {len(expected)} steps, got {len(got)}"
    return f"{kind} of step {step}: expected {expected[step]}, got {got[step]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare, as the command line says; return 1 if something differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("runs", nargs="*", help="names of runs (default: all)")
    options = parser.parse_args(arguments)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"machine": this_machine(), "runs": {}}
    exact, differ = record["machine"] == this_machine(), False
    if options.action == "compare":
        print("comparing all bits" if exact else f"comparing samples, shapes and losses: not {record['machine']}")
    elif not exact and options.runs:
        parser.error("the record is of another machine: record all runs")
    else:
        record["machine"] = this_machine()
    with tempfile.TemporaryDirectory() as folder, prepared(Path(folder)) as runs, ExitStack() as stack:
        pool = RankPool()
        stack.callback(pool.kill)
        if unknown := set(options.runs) - runs.keys():
            parser.error(f"no runs {sorted(unknown)}; expected some of {', '.join(runs)}")
        for name in options.runs or runs:
            entry = run_golden(pool, runs[name], Path(folder) / name)
            if options.action == "record":
                record["runs"][name] = entry
                RECORD.write_text(_to_json(record))
                print(f"{name}: recorded", flush=True)
            else:
                lines = differences(record["runs"][name], entry, exact)
                differ |= bool(lines)
                print(f"{name}: " + ("\n    ".join(["differs", *lines]) if lines else "equal"), flush=True)
    return int(differ)


def _to_json(record: dict[str, Any]) -> str:
    """Return JSON with a line for each list and small mapping, for small diffs."""
    runs = (
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items())
        + "\n }"
        for name, entry in record["runs"].items()
    )
    return f'{{"machine": {json.dumps(record["machine"])},\n"runs": {{\n' + ",\n".join(runs) + "\n}}\n"


if __name__ == "__main__":
    from tests import golden  # ranks find its functions by this name, not as __main__

    sys.exit(golden.main())
