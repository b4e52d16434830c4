"""The kinds of data that can be evaluated on: a config a kind, each of which builds a `vqclip.data.Source`.

They are those of training without a weight, and with the splits that evaluation has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

from vqclip.config import Config
from vqclip.data import CaptionShardsData, ClassShardsData, HasShards, ScenesData, Source
from vqclip.evaluation.image_folder import ImageFolder


class EvaluationData(HasShards, Protocol):
    """What each kind offers."""

    def build(self) -> Source:
        """Open the data; raises DataError naming what is missing or damaged."""
        ...


class ClassesData(ClassShardsData):
    """clip_benchmark's layout: `classnames.txt`, `zeroshot_classification_templates.txt` and `<split>/*.tar`."""

    split: str = "test"
    """Folder of the split in it; "" if the tars lie beside `classnames.txt`."""


class ImageFolderData(Config):
    """A folder with one subfolder of images (jpg, jpeg, png, webp) for each class."""

    kind: Literal["folder"] = "folder"
    path: Path
    """The folder. A `zeroshot_classification_templates.txt` in it is read."""

    def shards(self) -> list[Path]:
        """None: nothing is indexed."""
        return []

    def build(self) -> ImageFolder:
        """List the images; raises DataError for a folder that is missing or has another layout."""
        return ImageFolder(self.path.expanduser())


class ScenesClassesData(ScenesData):
    """Labelled pictures of the drawn data set, made on first use in the cache folder."""

    split: Literal["test", "heldout"] = "test"
    """test: unseen pictures of trained combinations. heldout: of combinations that training never shows."""


class CaptionsData(CaptionShardsData):
    """Caption shards: WebDataset tars in img2dataset's layout."""


class ScenesCaptionsData(ScenesData):
    """Captioned pictures of the drawn data set: every caption is true of its own picture alone."""

    split: Literal["val"] = "val"
    """val: combinations of colour and shape that training never shows."""


LabelledData = Annotated[ClassesData | ImageFolderData | ScenesClassesData, Field(discriminator="kind")]
"""Any kind of labelled images."""
CaptionedData = Annotated[CaptionsData | ScenesCaptionsData, Field(discriminator="kind")]
"""Any kind of captioned images."""
