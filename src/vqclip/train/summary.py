"""Summary of a finished run: sizes, speed, metrics, folders; and the card of its tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vqclip
from vqclip import dist
from vqclip.config import to_yaml
from vqclip.data import mask_credentials
from vqclip.errors import count_noun, printable
from vqclip.evaluation import Result, format_figure, format_results
from vqclip.evaluation.pixels import describe_data
from vqclip.report import REPORT_FILE
from vqclip.report.run_files import About
from vqclip.tokenizer.saving import card
from vqclip.towers import CaptionLengths

if TYPE_CHECKING:
    from vqclip.runlog.health import HealthSettings
    from vqclip.train.callbacks import Training
    from vqclip.train.config import TaskConfig
    from vqclip.train.tasks.base import Task

_LOCAL = re.compile(r"(?:^|[{,])(?:/|~|file:)", re.IGNORECASE)
"""A path on this machine, also as one of several in braces."""


@dataclass(frozen=True)
class RunSummary:
    """Summary of a finished run. Paths are those of the run."""

    name: str
    coverage: str
    """Part of the data that was seen, in words."""
    samples: int
    """Number of different training samples."""
    replaced: int
    """Number of times a bad sample was replaced by another, over all ranks and the whole run."""
    parameters: dict[str, int]
    """Number of trained weights of each part."""
    tokens: dict[str, int]
    """N of each tokenizer."""
    codebook_sizes: dict[str, list[int]]
    """K of each codebook of each tokenizer."""
    bits_per_sample: dict[str, float]
    """Bits of each tokenizer; for text those of a caption that fills every position."""
    speed: dict[str, float]
    """``images_per_second`` over all ranks and ``data_wait`` (0..1) of the training; empty if unknown."""
    processes: int
    """W, the number of ranks that reached this speed."""
    results: list[Result]
    folder: str
    checkpoint: str
    tokenizer: str
    step: int = 0
    """Steps after which the model was evaluated and exported."""
    captions: dict[str, Any] | None = None
    """``shown``, ``cut``, ``context_length``, the lengths ``holds_95`` and ``holds_99`` that contain 95 and 99 % of the
    captions, and ``told`` in words; None without texts."""
    best: dict[str, Any] | None = None
    """``step``, ``figure`` and ``value`` of the best evaluation; None without `train.keep_best`."""
    ended_after: int | None = None
    """Steps after which `train.patience` ended the training; None if it had all steps."""
    health: dict[str, Any] = field(default_factory=dict)
    """State at the end of training: ``verdict``, ``codebooks`` and ``warnings``; empty without watches."""

    def to_json(self) -> str:
        """Return the summary as JSON."""
        body = asdict(replace(self, results=[])) | {"results": [result.to_json() for result in self.results]}
        return json.dumps(mask_credentials(body), indent=2, allow_nan=False) + "\n"


def summarise(
    training: Training,
    results: list[Result],
    exported: int,
    best: dict[str, Any] | None,
    speed: Mapping[str, float],
    processes: int,
) -> RunSummary:
    """Return the summary of a training at its end. A collective.

    Args:
        training: the training.
        results: evaluations of the exported model.
        exported: its step.
        best: the best step, as `Records.best` returns it.
        speed: see `RunSummary.speed`.
        processes: number of ranks that reached it.
    """
    task, records, folder = training.step.task, training.records, training.config.run.path
    parts, tokenizers = task.trained_parts, task.tokenizers
    return RunSummary(
        name=training.config.run.name,
        coverage=training.data.coverage(training.done),
        samples=len(training.data),
        replaced=records.bad.counts.total(),
        parameters={key: sum(p.numel() for p in part.parameters() if p.requires_grad) for key, part in parts.items()},
        tokens={key: part.num_tokens for key, part in tokenizers.items()},
        codebook_sizes={key: list(part.codebook_sizes) for key, part in tokenizers.items()},
        bits_per_sample={key: part.bits_per_sample for key, part in tokenizers.items()},
        speed=dict(speed),
        processes=processes,
        results=results,
        folder=str(folder),
        checkpoint=str(training.checkpointer.path(exported)),
        tokenizer=str(folder / "tokenizer"),
        step=exported,
        captions=_summarise_captions(records.bad.lengths, task.context_length),
        best=best,
        ended_after=training.done if training.ended else None,
        health=dist.broadcast_json(records.health.summary()),  # rank 0 has judged the reports
    )


def _summarise_captions(lengths: CaptionLengths, context_length: int | None) -> dict[str, Any] | None:
    if context_length is None:
        return None
    return {
        "shown": lengths.total(),
        "cut": lengths.count_cut(context_length),
        "context_length": context_length,
        "holds_95": lengths.length_for(95),
        "holds_99": lengths.length_for(99),
        "told": lengths.describe_cuts(context_length, "model.text.tower.context_length"),
    }


def render(summary: RunSummary) -> str:
    """Return the summary as text for a terminal."""
    lines = [
        f"run {summary.name}",
        describe(summary),
        "",
        f"  run         {summary.folder}   (config.yaml, train.log, metrics.jsonl, tensorboard/, summary.json, ...)",
        f"  checkpoint  {summary.checkpoint}",
        f"  tokenizer   {summary.tokenizer}   (for vqclip.load_tokenizer)",
    ]
    page = Path(summary.folder) / REPORT_FILE
    if page.is_file():
        lines.append(f"  report      {page}   (figures, curves and codes; open it in a browser)")
    return "\n".join(lines)


def describe(summary: RunSummary) -> str:
    """Return data, sizes, speed and metrics as text, without a path of this machine."""
    replaced = f"; {count_noun(summary.replaced, 'time')} a bad one was replaced" if summary.replaced else ""
    weights = ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in summary.parameters.items())
    lines = [
        f"  data        {summary.coverage}{replaced}",
        *([f"  captions    {summary.captions['told']}"] if summary.captions and summary.captions["told"] else []),
        f"  model       {weights} trained weights",
        f"  tokens      {_tokens(summary)}",
        f"  speed       {_describe_speed(summary)}",
        *([f"  health      {summary.health['verdict']}"] if summary.health else []),
    ]
    if summary.best:
        best = summary.best
        found = f"{best['figure']} was best after step {best['step']}: {format_figure(best['figure'], best['value'])}"
        lines.append(f"  best        {found}; exported and measured here: step {summary.step}")
    if summary.results:
        lines += ["", format_results(summary.results)]
    return "\n".join(lines)


def _tokens(summary: RunSummary) -> str:
    each = {
        name: _describe_tokens(number, summary.codebook_sizes[name], summary.bits_per_sample[name])
        for name, number in summary.tokens.items()
    }
    return f"\n{' ' * 14}".join(f"{name} {text}" for name, text in each.items())


def _describe_tokens(tokens: int, sizes: Sequence[int], bits: float) -> str:
    number = count_noun(tokens, "token")
    if not sizes:
        return f"{number}, continuous a sample"
    codes = f"{sizes[0]:,} codes" if len(sizes) == 1 else f"{len(sizes)} codebooks of {sizes[0]:,}"
    return f"{number} × {codes} = {bits:,.0f} bits a sample"


def describe_run(task: Task, config: TaskConfig, health: HealthSettings) -> About:
    """Return what the page of a run says of it, without credentials."""
    lines, parts = list[str](), task.trained_parts
    weights = {key: sum(p.numel() for p in part.parameters() if p.requires_grad) for key, part in parts.items()}
    for name, part in task.tokenizers.items():
        tower = part.config.tower
        called = getattr(tower, "name", None) or getattr(tower, "model", None) or ""
        trained = f", {weights[name] / 1e6:.2f} M trained weights" if name in weights else ""
        tokens = _describe_tokens(part.num_tokens, part.codebook_sizes, part.bits_per_sample)
        quantizer = _describe_quantizer(part.config.quantizer)
        lines.append(f"{name}: {f'{tower.kind} tower {called}'.rstrip()}{trained}; {quantizer}: {tokens}")
    if decoder := getattr(config, "decoder", None):  # of the task pixels
        lines.append(f"{decoder.kind} pixel decoder for the ids of {getattr(config, 'tokenizer', '')}")
    sources = [describe_data(source) for source in config.data.sources]
    return About(
        model=[mask_credentials(line) for line in lines], sources=sources, processes=dist.world_size(), health=health
    )


def _describe_quantizer(config: Any) -> str:
    """Return the kind of a quantizer in words, such as ``product of fsq 8×8``."""
    if (inner := getattr(config, "layer", None)) is not None:
        return f"{config.kind} of {_describe_quantizer(inner)}"
    levels = "×".join(map(str, getattr(config, "levels", None) or ()))
    return f"{config.kind} {levels}".rstrip()


def _describe_speed(summary: RunSummary) -> str:
    if not summary.speed:
        return "no step was left to train"
    speed, wait = summary.speed["images_per_second"], summary.speed["data_wait"]
    plural = "process" if summary.processes == 1 else "processes"
    return f"{speed:.0f} images/s on {summary.processes} {plural}, {wait:.0%} of the time waiting for data"


def model_card(summary: RunSummary, config: TaskConfig) -> str:
    """Return the card of the exported folder in Markdown: content, measurements, training, use."""
    figures = "No evaluation was configured, so nothing was measured."
    if summary.results:
        figures = (
            "Rates are in percent, beside those of a model that knows nothing. *Continuous* bypasses the quantizers, "
            "*quantized* is the training path, *codes only* stored the ids and embedded them again."
        )
    more = f"""## Measured

{figures}

{_indent(describe(summary))}

## How it was made

From the data of `data.sources` below, by vqclip {vqclip.__version__}, {summary.processes} process(es), seed
{config.run.seed}. With the configuration in a file `config.yaml` (of paths on the machine of the run only the last part
is given, and no credentials):

    torchrun --nproc-per-node {summary.processes} -m vqclip.train --config config.yaml

{_indent(to_yaml(config, _publishable))}
"""
    what = "A tokenizer with a joint embedding of images and texts, trained with vqclip."
    return card(printable(summary.name, one_line=True), what, more)


def _publishable(value: Any) -> Any:
    """Return plain data without credentials and without the folders of this machine."""
    if isinstance(value, Mapping):
        return {name: _publishable(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_publishable(each) for each in value]
    if isinstance(value, str) and _LOCAL.search(value):
        return value.rstrip("/").rpartition("/")[2] or "."
    return mask_credentials(value)


def _indent(text: str) -> str:
    """Return a Markdown block of code that its content cannot end."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
