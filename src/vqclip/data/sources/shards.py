"""Caption shards: WebDataset tars in img2dataset's layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vqclip.config import Config
from vqclip.data.remote import RemoteConfig, display_url
from vqclip.data.shard import Shard
from vqclip.data.sources.base import RawSample
from vqclip.data.sources.captions import json_captions, txt_captions
from vqclip.data.sources.paths import find_shards
from vqclip.data.sources.reader import ShardReader
from vqclip.errors import DataError

__all__ = ["CaptionShards", "CaptionShardsConfig", "CaptionShardsData"]

Weight = Annotated[float, Field(gt=0, le=1e6)]


class CaptionShardsData(Config):
    """Tars whose samples are an image (jpg, jpeg, png, webp) with a caption (txt or json) of the same name."""

    kind: Literal["shards"] = "shards"
    """Caption shards."""
    path: str | tuple[str, ...]
    """A folder of tars, a tar, a pattern such as train/{00000..00041}.tar or train/*.tar, or a list of these. URLs are
    fine too: file, s3 and gs just so, http and https with every shard named or in braces."""
    captions: Literal["txt", "txt_lines", "json"] = "txt"
    """txt: the whole .txt is the caption. txt_lines: every line is one. json: values of `json_keys` in the .json."""
    json_keys: tuple[str, ...] = ("caption",)
    """Keys of the .json that hold a caption or a list of captions."""
    remote: RemoteConfig = RemoteConfig()
    """How shards at URLs are fetched and kept."""

    @model_validator(mode="after")
    def _has_something_to_read(self) -> CaptionShardsData:
        if not self.path:
            raise ValueError("path: got nothing; expected a folder, a tar or a pattern")
        if self.captions == "json" and not self.json_keys:
            raise ValueError("json_keys: got an empty list; expected keys of the .json that hold captions")
        return self

    def shards(self) -> Sequence[Shard]:
        """The tars, for `vqclip.data.prepare_sources`.

        Raises:
            DataError: there are none, or one is missing.
        """
        return find_shards([self.path] if isinstance(self.path, str) else self.path, self.remote)

    def build(self, cache: Path | None = None) -> CaptionShards:
        """Opens the shards, indexing those that are not indexed yet."""
        return CaptionShards(self, cache)


class CaptionShardsConfig(CaptionShardsData):
    """Caption shards to train on."""

    weight: Weight = 1.0
    """How often a sample of this source appears in an epoch; fractions allowed."""


class CaptionShards:
    """A `Source` of images with captions.

    Args:
        config: where the shards lie and where their captions are.
        cache: folder of the indexes; default `vqclip.io.cache.cache_folder()`.

    Raises:
        DataError: no shards, a damaged one, or no sample with an image and a caption.
    """

    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    def __init__(self, config: CaptionShardsData, cache: Path | None = None):
        self.config = config
        self._reader = ShardReader(config.shards(), cache)
        member = "json" if config.captions == "json" else "txt"
        where = ", ".join(map(display_url, [config.path] if isinstance(config.path, str) else config.path))
        require_members(self._reader, "image", member, where)

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, index: int) -> RawSample:
        """Image and captions of one sample; see `Source.read`."""
        if self.config.captions == "json":
            captions = json_captions(self._reader, index, self.config.json_keys)
        else:
            captions = txt_captions(self._reader, index, self.config.captions == "txt_lines")
        return RawSample(self._reader.read(index, "image"), captions)

    def name(self, index: int) -> str:
        """Shard and sample, for messages."""
        return self._reader.name(index)

    def key(self, index: int) -> str:
        """Name of the sample in its shard; see `ShardedSource.key`."""
        return self._reader.key(index)

    def place(self, index: int) -> str:
        """Shard and sample; see `vqclip.data.images.ImageSource.place`."""
        return self._reader.place(index)

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """See `ShardedSource.shards`."""
        return self._reader.shards

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        keys = list(self.config.json_keys) if self.config.captions == "json" else []
        return {
            "kind": "shards",
            "samples": len(self),
            "sha256": self._reader.sha256,
            "captions": self.config.captions,
            "json_keys": keys,
        }


def require_members(reader: ShardReader, first: str, second: str, path: object) -> None:
    """Raises DataError if no sample at all has these members: then it is the wrong layout, not a bad sample."""
    if not len(reader):
        raise DataError(f"{path}: every tar is empty; expected samples, such as 000000000.jpg and 000000000.txt")
    for kind in (first, second):
        if not reader.count(kind):
            what = "image (.jpg, .jpeg, .png, .webp)" if kind == "image" else f".{kind}"
            hint = " Captions in the .json? Set captions: json and json_keys." if kind == "txt" else ""
            if kind == "txt" and reader.count("cls"):
                hint = " The samples have a .cls: is it a source of kind: classes?"
            raise DataError(f"{path}: none of the {len(reader)} samples has a member {what}.{hint}")
