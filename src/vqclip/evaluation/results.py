"""Results of an evaluation, which JSON can hold."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vqclip.data import mask_credentials
from vqclip.evaluation.codes import CodeUsage
from vqclip.evaluation.details import Details, Interval
from vqclip.evaluation.encode import MODES, Encoded, Mode
from vqclip.evaluation.pixel_results import PixelResult
from vqclip.io.atomic import write_text


@dataclasses.dataclass(frozen=True)
class PrefixResult:
    """Codes-only figures with the first stages and codebooks of the image's ids alone."""

    stages: int
    """Number of stages of the image's ids; see `vqclip.quantizers.Prefix`."""
    codebooks: int
    """Number of codebooks of each stage."""
    bits_per_image: float
    """Size of these ids of an image."""
    bits_per_text: float | None
    """Mean size of the ids of a text; None without texts."""
    figures: dict[str, float]
    """Figure → rate, as in `Result.figures`."""
    intervals: dict[str, Interval]
    """Figure → 95 % confidence interval; empty if the evaluation was not asked for details."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Figures of one task: rates in [0, 1]; of the quality of images also SSIM, and PSNR in dB."""

    name: str
    """Name of the task."""
    kind: str
    """Kind of the task, such as `zero_shot`."""
    figures: dict[str, dict[str, float] | None]
    """Mode (`continuous`, `quantized`, `codes_only`) → figure (`top1`, `i2t_r5`, ...) → rate; None: see `notes`."""
    chance: dict[str, float]
    """Figure → its expectation for random embeddings; the quality of images has none."""
    samples: int
    """Number of images."""
    classes: int | None
    """Number of classes; None for retrieval."""
    captions: int
    """Number of texts: captions, or class prompts."""
    usage: dict[str, CodeUsage | None]
    """Modality (`image`, `text`) → use of its codebooks over the whole set; None if it has no codes."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Remarks for the reader, such as why a mode is missing."""
    details: Details | None = None
    """Further findings for a report; None on ranks other than 0, and if the evaluation was not asked for it.
    They are in no table."""
    prefixes: list[PrefixResult] = dataclasses.field(default_factory=list)
    """Figures with prefixes of the ids, in the order of `Prefix.shorter`; see `vqclip.evaluation.Prefixes`."""
    pixels: PixelResult | None = None
    """Quality of reconstructed images against bits; None for other tasks."""

    def scalars(self) -> dict[str, float]:
        """Return every rate under a name such as ``pairs/codes_only/i2t_r1``, for a log of metrics."""
        return {
            f"{self.name}/{mode}/{figure}": rate
            for mode, figures in self.figures.items()
            for figure, rate in (figures or {}).items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers."""
        body = dataclasses.asdict(dataclasses.replace(self, details=None))
        del body["details"]
        return body


def write_json(path: Path, results: Sequence[Result], about: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write results as a JSON list; each with the keys of ``about``, such as the model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = mask_credentials([{**result.to_json(), **about} for result in results])
    write_text(path, json.dumps(rows, indent=2, allow_nan=False) + "\n")


def write_csv(path: Path, results: Sequence[Result], about: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write results as CSV: a row for each result, mode and figure, with the keys of ``about`` as further columns.

    Of reconstructed images there is also a row for each way to store an image, as the mode, and figure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    heads = ("name", "kind", "mode", "figure", "rate", "chance", "images", "classes", "captions", *about)
    rows = [
        (result.name, result.kind, mode, figure, rate, result.chance.get(figure, ""), result.samples)
        + ("" if result.classes is None else result.classes, result.captions, *about.values())
        for result in results
        for mode, figures in (*result.figures.items(), *_stored_images(result))
        for figure, rate in (figures or {}).items()
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *mask_credentials(rows)])
    write_text(path, text.getvalue())


def _stored_images(result: Result) -> list[tuple[str, dict[str, float]]]:
    rows = [] if result.pixels is None else result.pixels.rows
    bits = [{} if row.bits_per_image is None else {"bits_per_image": row.bits_per_image} for row in rows]
    return [(row.method, size | row.figures) for row, size in zip(rows, bits, strict=True)]


def common_modes(image: Encoded, text: Encoded | None = None) -> tuple[list[Mode], list[str]]:
    """Return the modes that the modalities have, and a note if one is missing."""
    sides = {"image": image} if text is None else {"image": image, "text": text}
    modes = [mode for mode in image.embeddings if all(mode in side.embeddings for side in sides.values())]
    lacking = [name for name, side in sides.items() if side.usage is None]
    if not lacking:
        return modes, []
    return modes, [f"no codes-only figures: the {' and the '.join(lacking)} quantizer has no codebook (Identity)"]


def fill_modes(found: Mapping[Mode, dict[str, float]]) -> dict[str, dict[str, float] | None]:
    """Return the figures of every mode, None for a missing one."""
    return {mode: found.get(mode) for mode in (*MODES, *found)}
