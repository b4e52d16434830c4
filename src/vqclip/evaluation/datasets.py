"""Kinds of evaluation data: one configuration each, which builds a `vqclip.data.Source`.

They are the kinds of training data without a weight, and with the splits of evaluation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

from vqclip.config import Config
from vqclip.data import CaptionShardsData, ClassShardsData, HasShards, ScenesData, Source
from vqclip.evaluation.image_folder import ImageFolder


class EvaluationData(HasShards, Protocol):
    """Protocol of a kind of data."""

    def build(self) -> Source:
        """Open the data; raise DataError for missing or damaged files."""
        ...


class ClassesData(ClassShardsData):
    """clip_benchmark's layout: `classnames.txt`, `zeroshot_classification_templates.txt` and `<split>/*.tar`."""

    split: str = "test"
    """Folder of the split in it; "" if the tars are beside `classnames.txt`."""


class ImageFolderData(Config):
    """A folder with one subfolder of images (jpg, jpeg, png, webp) for each class."""

    kind: Literal["folder"] = "folder"
    path: Path
    """The folder. A `zeroshot_classification_templates.txt` in it is read."""

    def shards(self) -> list[Path]:
        """Return an empty list: there is nothing to index."""
        return []

    def build(self) -> ImageFolder:
        """List the images; raise DataError for a missing folder or another layout."""
        return ImageFolder(self.path.expanduser())


class ScenesClassesData(ScenesData):
    """Labelled images of the drawn data set, which is made on first use in the cache folder."""

    split: Literal["test", "heldout"] = "test"
    """test: unseen images of trained combinations. heldout: images of combinations that training never shows."""


class CaptionsData(CaptionShardsData):
    """Caption shards: WebDataset tars in img2dataset's layout."""


class ScenesCaptionsData(ScenesData):
    """Captioned images of the drawn data set: every caption is true of its own image only."""

    split: Literal["val"] = "val"
    """val: combinations of colour and shape that training never shows."""


LabelledData = Annotated[ClassesData | ImageFolderData | ScenesClassesData, Field(discriminator="kind")]
"""Any kind of labelled images."""
CaptionedData = Annotated[CaptionsData | ScenesCaptionsData, Field(discriminator="kind")]
"""Any kind of captioned images."""
