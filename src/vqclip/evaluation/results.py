"""Results of an evaluation; as JSON, as CSV, and with their details in a run's folder."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field

from vqclip.data import mask_credentials
from vqclip.errors import CheckpointError, encodable
from vqclip.evaluation.details import Count, Details, Interval, Part
from vqclip.evaluation.encode import MODES, CodeUsage, Encoded, Mode
from vqclip.io.atomic import write_file, write_text
from vqclip.io.json_files import MAX_PLAIN_BYTES, read_plain

FOLDER = "report"
"""Name of their folder in a run's folder."""


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
class PixelRow:
    """One way to store an image, and what comes back; figures over all images of the set."""

    method: str
    """Name, such as ``codes`` or ``WebP``."""
    bits_per_image: float | None
    """Mean size of a stored image; None where no code is stored."""
    within: float | None
    """Share of the files that are not larger than the codes; None for what is not a file."""
    figures: dict[str, float]
    """``psnr`` and ``psnr_of_mse`` in dB, ``ssim``, ``ms_ssim``, ``mae``; see `vqclip.pixels.metrics`."""
    intervals: dict[str, tuple[float, float]]
    """Figure → 95 % interval, a bootstrap over images."""


@dataclasses.dataclass(frozen=True)
class PixelResult:
    """Everything that pixel figures depend on beside the model, and the rows."""

    reference: str
    """The set of originals."""
    image_size: int
    """Height and width of originals and reconstructions, in pixels."""
    preprocessing: str
    """Crop and resampling of the originals."""
    rows: list[PixelRow]
    """All ids, fewer of them, none, and other methods at as many bytes."""
    distances: dict[str, float] = dataclasses.field(default_factory=dict)
    """Distances of the set of reconstructions from that of originals; the name of each says in which features."""


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
    samples: Count
    """Number of images."""
    classes: Count | None
    """Number of classes; None for retrieval."""
    captions: Count
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


class StoredEvaluation(Part):
    """Content of a file: the result of one task."""

    step: int = Field(ge=0, lt=2**53)
    """Steps of training that the evaluated weights have."""
    result: Result
    """The result, with its details."""


def stored_files(run: Path) -> list[Path]:
    """Return the files of a run's folder in the order of the tasks, for `read_evaluation`."""
    return sorted((run / FOLDER).glob("[0-9]*.json"))


def read_evaluation(path: Path) -> StoredEvaluation:
    """Read a file that `write_evaluations` wrote.

    Raises:
        CheckpointError: it cannot be read, is too large, or contains unknown keys or values.
    """
    return read_plain(path, StoredEvaluation)


def write_evaluations(run: Path, step: int, results: Sequence[Result]) -> list[Path]:
    """Write results into a run's folder, and remove those of former evaluations. Each file is written atomically.

    Args:
        run: the folder.
        step: steps of training of the evaluated weights.
        results: one for each task.

    Returns:
        The files, as `stored_files` does.

    Raises:
        CheckpointError: a file would be too large to be read, or a figure is NaN.
        OSError: a file cannot be written.
    """
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    paths = []
    for number, result in enumerate(results):
        notes = [encodable(mask_credentials(note)) for note in result.notes]
        result = dataclasses.replace(result, name=encodable(result.name), notes=notes)
        content = StoredEvaluation(step=step, result=result).model_dump_json().encode()
        path = run / FOLDER / f"{number:02d}-{result.kind}.json"
        if len(content) > MAX_PLAIN_BYTES:
            raise CheckpointError(f"{path}: would have {len(content)} bytes; at most {MAX_PLAIN_BYTES} are read back")
        write_file(path, content)
        paths.append(path)
    for former in set(stored_files(run)) - set(paths):
        former.unlink(missing_ok=True)
    return paths


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
