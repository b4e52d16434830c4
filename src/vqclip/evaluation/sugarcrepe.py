"""SugarCrepe: an image, its caption, and a caption that is wrong in one detail (Hsieh et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from vqclip.data.sources.json_table import read_json
from vqclip.errors import DataError, printable
from vqclip.evaluation.choices import (
    Choice,
    ChoicesConfig,
    ChoicesData,
    FileChoices,
    all_before,
    clean_caption,
)
from vqclip.evaluation.details import Interval
from vqclip.evaluation.intervals import class_mean_intervals, mean_intervals
from vqclip.io.json_files import validation_problems

_EXPECTED = "expected an object of objects with filename, caption and negative_caption"


class _Item(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    filename: str
    caption: str
    negative_caption: str


_ITEMS = TypeAdapter(dict[str, _Item])


class SugarCrepeData(ChoicesData):
    """JSON files in SugarCrepe's layout, one for each category, and a folder of images (COCO's val2017)."""

    kind: Literal["sugarcrepe"] = "sugarcrepe"
    """SugarCrepe's layout."""
    path: Path
    """Folder of JSON files, whose names are the categories, or one such file."""
    images: Path
    """Folder of the images."""

    def build(self, cache: Path | None = None) -> FileChoices:
        """Read the JSON files; raise DataError if one is missing or has another layout."""
        path = self.path.expanduser()
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise DataError(f"{path.absolute()}: no *.json in it; expected one for each category, such as add_att.json")
        numbers: dict[str, int] = {}
        choices = []
        for file in files:
            for key, item in _read(file).items():
                number = numbers.setdefault(item.filename, len(numbers))
                where = printable(f"{file}: {key}", one_line=True)
                right, wrong = (clean_caption(text, where) for text in (item.caption, item.negative_caption))
                choices.append(Choice((number,), (right, wrong), file.stem))
        return FileChoices(self.images.expanduser(), list(numbers), choices, path)


class SugarCrepeConfig(ChoicesConfig):
    """Share of images whose caption is nearer than its wrong variant: of each category, and the mean of these."""

    figures: ClassVar[tuple[str, ...]] = ("accuracy",)

    kind: Literal["sugarcrepe"] = "sugarcrepe"
    name: str = "SugarCrepe"
    """Title of the results."""
    data: SugarCrepeData
    """The set."""

    def rates(self, scores: Tensor, choices: Sequence[Choice]) -> dict[str, tuple[float, Interval]]:
        """See `ChoicesConfig.rates`. The choices of one image count together in the intervals."""
        hits, images = (
            all_before(scores[:, 0, :1], scores[:, 0, 1:]),
            torch.tensor([each.images[0] for each in choices]),
        )
        names = list(dict.fromkeys(each.category for each in choices))
        categories = torch.tensor([names.index(each.category) for each in choices])
        found: dict[str, tuple[float, Interval]] = {}
        for category, name in enumerate(names):
            some = categories == category
            (interval,) = mean_intervals(hits[some][None], images[some])
            found[name] = float(hits[some].mean()), interval
        (interval,) = class_mean_intervals(hits[None], categories, images)
        return {"accuracy": (sum(rate for rate, _ in found.values()) / len(found), interval)} | found

    def chance(self, categories: Sequence[str]) -> dict[str, float]:
        """See `ChoicesConfig.chance`."""
        return dict.fromkeys(("accuracy", *categories), 0.5)


def _read(file: Path) -> dict[str, _Item]:
    try:
        items = _ITEMS.validate_python(read_json(file))
    except ValidationError as error:
        raise DataError(f"{file}: {validation_problems(error)[0]}; {_EXPECTED}") from None
    if not items or file.stem == SugarCrepeConfig.figures[0]:
        raise DataError(f"{file}: got {len(items)} items of the category {file.stem!r}; expected some, of another name")
    return items
