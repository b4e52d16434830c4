"""The kinds of data that can be evaluated on: a config a kind, each of which builds a `vqclip.data.Source`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from vqclip.config import Config
from vqclip.data import CaptionShards, CaptionShardsConfig, ClassShards, ClassShardsConfig, ScenesSourceConfig, Source
from vqclip.data.scenes import ScenesConfig
from vqclip.evaluation.image_folder import ImageFolder


class ClassesData(Config):
    """clip_benchmark's layout: `classnames.txt`, `zeroshot_classification_templates.txt` and `<split>/*.tar`."""

    kind: Literal["classes"] = "classes"
    path: Path
    """The folder."""
    split: str = "test"
    """Folder of the split in it; "" if the tars lie beside `classnames.txt`."""

    def build(self) -> ClassShards:
        """Open the shards; raises DataError naming what is missing or damaged."""
        return ClassShardsConfig(path=self.path, split=self.split).build()


class ImageFolderData(Config):
    """A folder with one subfolder of images (jpg, jpeg, png, webp) for each class."""

    kind: Literal["folder"] = "folder"
    path: Path
    """The folder. A `zeroshot_classification_templates.txt` in it is read."""

    def build(self) -> ImageFolder:
        """List the images; raises DataError for a folder that is missing or has another layout."""
        return ImageFolder(self.path.expanduser())


class ScenesClassesData(Config):
    """Labelled pictures of the drawn data set, made on first use in the cache folder."""

    kind: Literal["scenes"] = "scenes"
    split: Literal["test", "heldout"] = "test"
    """test: unseen pictures of trained combinations. heldout: of combinations that training never shows."""
    drawing: ScenesConfig = ScenesConfig()
    """What to draw; give what training was given."""

    def build(self) -> Source:
        """Open the shards, drawing them if that has not been done."""
        return ScenesSourceConfig(split=self.split, drawing=self.drawing).build()


class CaptionsData(Config):
    """Caption shards: WebDataset tars in img2dataset's layout."""

    kind: Literal["shards"] = "shards"
    path: str | tuple[str, ...]
    """A folder of tars, a tar, a pattern such as val/{00000..00041}.tar or val/*.tar, or a list of these."""
    captions: Literal["txt", "txt_lines", "json"] = "txt"
    """txt: the whole .txt is the caption. txt_lines: every line is one. json: values of `json_keys` in the .json."""
    json_keys: tuple[str, ...] = ("caption",)
    """Keys of the .json that hold a caption or a list of captions."""

    def build(self) -> CaptionShards:
        """Open the shards; raises DataError naming what is missing or damaged."""
        return CaptionShardsConfig(path=self.path, captions=self.captions, json_keys=self.json_keys).build()


class ScenesCaptionsData(Config):
    """Captioned pictures of the drawn data set: every caption is true of its own picture alone."""

    kind: Literal["scenes"] = "scenes"
    split: Literal["val"] = "val"
    """val: combinations of colour and shape that training never shows."""
    drawing: ScenesConfig = ScenesConfig()
    """What to draw; give what training was given."""

    def build(self) -> Source:
        """Open the shards, drawing them if that has not been done."""
        return ScenesSourceConfig(split=self.split, drawing=self.drawing).build()


LabelledData = Annotated[ClassesData | ImageFolderData | ScenesClassesData, Field(discriminator="kind")]
"""Any kind of labelled images."""
CaptionedData = Annotated[CaptionsData | ScenesCaptionsData, Field(discriminator="kind")]
"""Any kind of captioned images."""
