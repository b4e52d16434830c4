"""Metrics as people look at them: few scalars in groups, and histograms over codebooks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vqclip.config import Config
from vqclip.data import mask_credentials
from vqclip.errors import encodable
from vqclip.runlog.codebooks import MODALITIES, codebook_names

_CONSTANT = ("tokens", "usage_if_uniform")
"""Figures of the window over which codes are counted; they are in ``metrics.jsonl``."""
_DRAWN = ("usage", "bits_used", "oldest")
"""Figures of single codebooks that are drawn; the perplexity is that of the bits in use."""
_SPEED = (
    "images_per_second",
    "tokens_per_second",
    "data_wait",
    "exchange_wait",
    "tflops_per_second",
    "mfu",
    "memory_gib",
)
_CODEBOOK = re.compile(r"(image|text)/[0-9]+/")
_SECTIONS = ("model", "loss", "distillation", "optim", "train")
_ALWAYS = {"kind", "lr", "batch_size", "steps", "precision", "warmup_steps"}


class View(NamedTuple):
    """Metrics of a step by the names that trackers show."""

    scalars: dict[str, float]
    histograms: dict[str, list[float]]


def view(row: Mapping[str, Any]) -> View:
    """Return the metrics of a step, from their names in ``metrics.jsonl``.

    The groups are ``train/``, ``image codes/``, ``text codes/``, ``speed/``, ``data/`` and ``eval/``; other names stay.
    What each codebook has alone becomes a histogram; the lowest usage is a scalar, too. Rates of the mode *quantized*
    are left out where those of *codes only* are equal to them.
    """
    numbers = {name: float(value) for name, value in row.items() if type(value) in (int, float) and name != "step"}
    scalars = {_display_name(name): value for name, value in numbers.items() if _is_shown(name, numbers)}
    histograms: dict[str, list[float]] = {}
    for name in codebook_names(numbers):
        modality, _, number = name.partition("/")
        for figure in _DRAWN:
            if number and f"{name}/{figure}" in numbers:
                histograms.setdefault(f"{modality} codes/{figure} by codebook", []).append(numbers[f"{name}/{figure}"])
    for modality in MODALITIES:
        if usages := histograms.get(f"{modality} codes/usage by codebook"):
            scalars[f"{modality} codes/usage of the worst codebook"] = min(usages)
    histograms = {name: values for name, values in histograms.items() if all(map(math.isfinite, values))}
    return View(scalars, histograms)


def _is_shown(name: str, numbers: Mapping[str, float]) -> bool:
    equal = name.startswith("eval/") and name.replace("/quantized/", "/codes_only/")
    has_equal = equal and equal != name and numbers.get(equal) == numbers[name]
    return not (has_equal or _CODEBOOK.match(name) or name.split("/")[-1] in _CONSTANT)


def _display_name(name: str) -> str:
    modality, _, rest = name.partition("/")
    if modality in ("image", "text"):
        return f"{modality} codes/{rest}"
    if name in _SPEED:
        return f"speed/{name}"
    named = modality in ("loss", "temperature", "fp16", "bottleneck") or name in ("grad_norm", "lr")
    return f"train/{name}" if named else name


def hyperparameters(config: Config) -> dict[str, float | int | bool | str]:
    """Return the settings of a run that are not the defaults, its kinds and the most important others, by key."""
    found: dict[str, float | int | bool | str] = {"run.seed": config.run.seed}  # type: ignore[attr-defined]

    def visit(value: object, path: str, default: object = None) -> None:
        if isinstance(value, Config):
            for name, field in type(value).model_fields.items():
                visit(getattr(value, name), f"{path}.{name}", None if name in _ALWAYS else field.default)
        elif isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Config) for v in value):
            for number, each in enumerate(value):
                visit(each, f"{path}[{number}]")
        elif value not in (None, (), default):
            plain = value if isinstance(value, (bool, int, float)) else encodable(mask_credentials(str(value)))
            found[path] = plain if not isinstance(plain, str) else plain[:200]

    for section in _SECTIONS:
        visit(getattr(config, section, None), section)
    visit(config.data.sources, "data.sources")  # type: ignore[attr-defined]
    return found
