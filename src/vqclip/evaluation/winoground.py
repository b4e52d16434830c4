"""Winoground: two images and two captions of the same words in another order (Thrush et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from vqclip.data.decode import IMAGE_ENDINGS
from vqclip.data.lookup import name_errors
from vqclip.data.sources.json_table import read_json_lines
from vqclip.data.sources.parquet import ParquetFile
from vqclip.data.sources.reader import MAX_IMAGE_BYTES
from vqclip.errors import DataError
from vqclip.evaluation.choices import (
    Choice,
    Choices,
    ChoicesConfig,
    ChoicesData,
    FileChoices,
    all_before,
    clean_caption,
)
from vqclip.evaluation.details import Interval
from vqclip.evaluation.intervals import wilson
from vqclip.io.json_files import validation_problems

_IMAGES, _CAPTIONS = ("image_0", "image_1"), ("caption_0", "caption_1")
_EXPECTED = f"expected {', '.join((*_IMAGES, *_CAPTIONS))}"


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    image_0: str
    image_1: str
    caption_0: str
    caption_1: str


class WinogroundData(ChoicesData):
    """Winoground's files: a Parquet file with images, or lines of JSON with their names and a folder of images."""

    kind: Literal["winoground"] = "winoground"
    """Winoground's layout."""
    path: Path
    """The .parquet or .jsonl file. Each row has image_0, image_1, caption_0 and caption_1."""
    images: Path | None = None
    """Folder of the images of a .jsonl; null: `images` beside the file. A name may lack its ending."""

    def shards(self) -> Sequence[ParquetFile]:
        """Return the Parquet file, for `vqclip.data.prepare_sources`."""
        return [ParquetFile(self._file())] if self._is_parquet() else []

    def build(self, cache: Path | None = None) -> Choices:
        """Read the file; raise DataError if it is missing or has another layout."""
        file = self._file()
        if self._is_parquet():
            if self.images is not None:
                raise DataError(f"{file}: contains its images; got images: {self.images}, expected null")
            return ParquetChoices(file)
        lines = _read_lines(file)
        folder = file.parent / "images" if self.images is None else self.images.expanduser()
        names = [getattr(line, image) for line in lines for image in _IMAGES]
        pairs = _pairs([(line.caption_0, line.caption_1, f"{file}:{n}") for n, line in enumerate(lines, 1)])
        return FileChoices(folder, names, pairs, file, IMAGE_ENDINGS)

    def _file(self) -> Path:
        return self.path.expanduser()

    def _is_parquet(self) -> bool:
        return self.path.suffix == ".parquet"


class ParquetChoices(Choices):
    """Choices between the images in the rows of a Parquet file, which are kept in memory: there are 400.

    Args:
        file: the file.

    Raises:
        DataError: it is missing or damaged, or has other columns.
    """

    def __init__(self, file: Path):
        self._file = file
        with ParquetFile(file).open() as (opened, _), name_errors(f"{file}: is damaged"):
            have = opened.schema_arrow.names
            if not {*_IMAGES, *_CAPTIONS} <= {*have}:
                raise DataError(f"{file}: got the columns {', '.join(have) or 'none'}; {_EXPECTED}")
            self._rows = opened.read(columns=[*_IMAGES, *_CAPTIONS], use_threads=False).to_pylist()
        self.choices = _pairs(
            [(row["caption_0"], row["caption_1"], f"{file}: row {n}") for n, row in enumerate(self._rows)]
        )

    def __len__(self) -> int:
        return 2 * len(self._rows)

    def name(self, index: int) -> str:
        """See `Choices.name`."""
        return f"{self._file}: row {index // 2}: {_IMAGES[index % 2]}"

    def image(self, index: int) -> bytes:
        """See `Choices.image`."""
        value: Any = self._rows[index // 2][_IMAGES[index % 2]]
        found = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(found, bytes) or len(found) > MAX_IMAGE_BYTES:
            raise DataError(
                f"{self.name(index)}: expected the bytes of an image, at most {MAX_IMAGE_BYTES}", "missing member"
            )
        return found


class WinogroundConfig(ChoicesConfig):
    """Text, image and group score of Winoground.

    text: both images choose their caption; image: both captions choose their image; group: both.
    """

    figures: ClassVar[tuple[str, ...]] = ("text_score", "image_score", "group_score")

    kind: Literal["winoground"] = "winoground"
    name: str = "Winoground"
    """Title of the results."""
    data: WinogroundData
    """The set."""

    def rates(self, scores: Tensor, choices: Sequence[Choice]) -> dict[str, tuple[float, Interval]]:
        """See `ChoicesConfig.rates`."""
        return {name: (rate, wilson(rate, len(scores))) for name, rate in winoground_scores(scores).items()}

    def chance(self, categories: Sequence[str]) -> dict[str, float]:
        """See `ChoicesConfig.chance`."""
        return dict(zip(self.figures, (1 / 4, 1 / 4, 1 / 6), strict=True))


def winoground_scores(scores: Tensor) -> dict[str, float]:
    """Return the three scores of similarities ``(n, 2, 2)`` of images and captions; ties are in random order."""
    right, wrong = scores.diagonal(dim1=1, dim2=2), scores.flip(2).diagonal(dim1=1, dim2=2)
    text = all_before(right[:, :1], wrong[:, :1]) * all_before(right[:, 1:], wrong[:, 1:])
    image = all_before(right[:, :1], wrong[:, 1:]) * all_before(right[:, 1:], wrong[:, :1])
    rates = [float(each.mean()) for each in (text, image, all_before(right, wrong))]
    return dict(zip(WinogroundConfig.figures, rates, strict=True))


def _pairs(rows: Sequence[tuple[object, object, str]]) -> list[Choice]:
    """Return the choices of rows of two captions and a name for messages."""
    captions = [(clean_caption(first, name), clean_caption(second, name)) for first, second, name in rows]
    return [Choice((2 * row, 2 * row + 1), pair) for row, pair in enumerate(captions)]


def _read_lines(file: Path) -> list[_Line]:
    lines = []
    for number, row, problem in read_json_lines(file):
        if problem:
            raise DataError(f"{file}:{number}: {problem}; {_EXPECTED}")
        try:
            lines.append(_Line.model_validate(row))
        except ValidationError as error:
            raise DataError(f"{file}:{number}: {validation_problems(error)[0]}; {_EXPECTED}") from None
    if not lines:
        raise DataError(f"{file}: is empty; expected a line of JSON for each pair")
    return lines
