"""Data of evaluations: sources of any kind, without a weight and with the splits of evaluation."""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from vqclip.data import ScenesSourceConfig, Source, SourceConfig, SourceConfigBase, mask_credentials
from vqclip.errors import DataError, printable
from vqclip.evaluation.partition import RankPartition

__all__ = ["AnyData", "CaptionedData", "LabelledData", "TrainingData", "open_captioned", "open_labelled"]


def _prepare(data: SourceConfigBase, labelled: bool, split: str = "test") -> SourceConfigBase:
    data.require_no_weight("evaluation")
    if getattr(data, "split", "") is None:
        split = "val" if isinstance(data, ScenesSourceConfig) and not labelled else split
        data = data.model_copy(update={"split": split})
    if data.has_classes is (not labelled) or (getattr(data, "split", "") == "train" and data.kind == "scenes"):
        raise ValueError(printable(_problem(data, labelled)))  # pydantic refuses bytes that are not UTF-8
    return data


def _problem(data: SourceConfigBase, labelled: bool) -> str:
    split = getattr(data, "split", None)
    where = f"{mask_credentials(str(path))}: " if (path := getattr(data, "path", None)) is not None else ""
    what = f"{where}kind {data.kind}" + (f" with split {split}" if split else "")
    if labelled:
        return f"{what} has captions, not classes; expected labelled images (or the task retrieval)"
    return f"{what} has classes, not captions of its own; expected captioned images (or the task zero-shot)"


LabelledData: TypeAlias = Annotated[SourceConfig, AfterValidator(partial(_prepare, labelled=True))]
"""Any kind of labelled images."""
TrainingData: TypeAlias = Annotated[SourceConfig, AfterValidator(partial(_prepare, labelled=True, split="train"))]
"""Any kind of labelled images to fit a probe to: the split train where none is named."""
CaptionedData: TypeAlias = Annotated[SourceConfig, AfterValidator(partial(_prepare, labelled=False))]
"""Any kind of captioned images."""


def _test_images(data: SourceConfigBase) -> SourceConfigBase:
    data.require_no_weight("evaluation")
    return data.model_copy(update={"split": "test"}) if getattr(data, "split", "") is None else data


AnyData: TypeAlias = Annotated[SourceConfig, AfterValidator(_test_images)]
"""Any kind of images, labelled or captioned: the split test where none is named."""


def open_labelled(data: SourceConfigBase, partition: RankPartition, key: str = "data") -> Source:
    """Open labelled images on every rank of a partition.

    Raises:
        DataError: the data cannot be used, or have no classes.
    """
    source = partition.open(data, key)
    if not source.classnames:
        raise DataError(f"{key}: {_problem(data, labelled=True)}")
    return source


def open_captioned(data: SourceConfigBase, partition: RankPartition) -> Source:
    """Open captioned images on every rank of a partition.

    Raises:
        DataError: the data cannot be used, or their captions are prompts with class names.
    """
    source = partition.open(data)
    if source.templates:
        raise DataError(f"data: {_problem(data, labelled=False)}")
    return source
