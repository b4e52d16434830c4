"""Caption shards: WebDataset tars in img2dataset's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from vqclip.data.chunks.reader import ChunkReader
from vqclip.data.chunks.tars import ChunkedTars
from vqclip.data.remote import RemoteConfig, display_url, is_tar
from vqclip.data.shard import Shard
from vqclip.data.sources.base import FolderContent, OpensSource, RawSample, SourceConfigBase
from vqclip.data.sources.captions import CaptionFiles
from vqclip.data.sources.class_folder import CLASSNAMES
from vqclip.data.sources.paths import find_shards
from vqclip.data.sources.reader import ShardReader
from vqclip.errors import DataError

__all__ = ["CaptionShards", "CaptionShardsConfig"]


class CaptionShardsConfig(SourceConfigBase):
    """Tars whose samples are an image (jpg, jpeg, png, webp) with a caption (txt or json) of the same name."""

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {"shards": (".tar", ".tar.gz", ".tgz")}

    kind: Literal["shards"] = "shards"
    """Caption shards."""
    path: str | tuple[str, ...]
    """A folder of tars, a tar, a pattern such as train/{00000..00041}.tar or train/*.tar, or a list of these. URLs
    (file, s3, gs, az, hf, http, https) work the same way; with http and https every shard must be named, or written
    with braces."""
    captions: Literal["txt", "txt_lines", "json"] = "txt"
    """txt: the whole .txt is the caption. txt_lines: every line is one. json: values of `json_keys` in the .json."""
    json_keys: tuple[str, ...] = ("caption",)
    """Keys of the .json with a caption or a list of captions."""
    remote: RemoteConfig = RemoteConfig()
    """Download and caching of shards at URLs."""

    @model_validator(mode="after")
    def _has_something_to_read(self) -> CaptionShardsConfig:
        if not self.path:
            raise ValueError("path: got nothing; expected a folder, a tar or a pattern")
        if self.captions == "json" and not self.json_keys:
            raise ValueError("json_keys: got an empty list; expected keys of the .json that hold captions")
        return self

    @property
    def has_classes(self) -> bool:
        """Return whether images have classes."""
        return False

    @classmethod
    def matches_folder(cls, content: FolderContent) -> bool:
        """Return whether there are tars without a file of class names."""
        return CLASSNAMES not in content.files and any(map(is_tar, content.files))

    def shards(self) -> Sequence[Shard]:
        """Return the tars, for `vqclip.data.prepare_sources`.

        Raises:
            DataError: there are none, or one is missing.
        """
        return find_shards([self.path] if isinstance(self.path, str) else self.path, self.remote)

    def in_chunks(self, chunk: int) -> OpensSource:
        """See `SourceConfigBase.in_chunks`."""
        return ChunkedTars(self, chunk, partial(CaptionShards, self))

    def build(self, cache: Path | None = None) -> CaptionShards:
        """Open the shards, after indexing those without an index."""
        return CaptionShards(self, ShardReader(self.shards(), cache))

    def build_part(self, shards: Sequence[Shard]) -> CaptionShards:
        """Open some of the shards, for processes that share a data set; none of their samples may be usable."""
        return CaptionShards(self, ShardReader(shards), is_part=True)


class TarSource:
    """Base of sources that read tars: their names, keys and shards come from `_reader`."""

    _reader: ShardReader | ChunkReader
    notes: tuple[str, ...] = ()

    @property
    def chunks(self) -> ChunkReader | None:
        """Reader of the chunks, if the source is read in chunks."""
        return self._reader if isinstance(self._reader, ChunkReader) else None

    def __len__(self) -> int:
        return len(self._reader)

    def name(self, index: int) -> str:
        """Return shard and sample, for messages."""
        return self._reader.name(index)

    def key(self, index: int) -> str:
        """Return the sample's name in its shard; see `ShardedSource.key`."""
        return self._reader.key(index)

    def place(self, index: int) -> str:
        """Return shard and sample; see `vqclip.data.images.ImageSource.place`."""
        return self._reader.place(index)

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """See `ShardedSource.shards`."""
        return self._reader.shards


class CaptionShards(TarSource):
    """A `Source` of images with captions.

    Args:
        config: the place of the captions.
        reader: reads the shards.
        is_part: whether these are some of the shards, which need no usable sample.

    Raises:
        DataError: no sample with an image and a caption.
    """

    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    def __init__(self, config: CaptionShardsConfig, reader: ShardReader | ChunkReader, is_part: bool = False):
        self.config = config
        self._reader = reader
        self._captions = CaptionFiles(config.captions, config.json_keys)
        where = ", ".join(map(display_url, [config.path] if isinstance(config.path, str) else config.path))
        if not is_part:
            require_members(self._reader, "image", self._captions.kind, where)

    def read(self, index: int) -> RawSample:
        """Return image and captions of one sample; see `Source.read`."""
        text = self._reader.text(index, self._captions.kind)
        return RawSample(self._reader.read(index, "image"), self._captions.parse(text, self.name(index)))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        settings = self._captions.fingerprint
        return {"kind": "shards", "samples": len(self), "sha256": self._reader.sha256, **settings}


def require_members(reader: ShardReader | ChunkReader, first: str, second: str, path: object) -> None:
    """Raise DataError if no sample has these members: then the layout is wrong, not a single sample."""
    if not len(reader):
        raise DataError(f"{path}: every tar is empty; expected samples, such as 000000000.jpg and 000000000.txt")
    for kind in (first, second):
        if not reader.count(kind):
            what = "image (.jpg, .png, .webp, ...)" if kind == "image" else f".{kind}"
            hint = " Captions in the .json? Set captions: json and json_keys." if kind == "txt" else ""
            if kind == "txt" and reader.count("cls"):
                hint = " The samples have a .cls: is it a source of kind: classes?"
            raise DataError(f"{path}: none of the {len(reader)} samples has a member {what}.{hint}")
