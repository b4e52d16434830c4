"""Labelled shards in clip_benchmark's layout, whose captions are prompts with the class name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from vqclip.config import Config
from vqclip.data.remote import RemoteConfig
from vqclip.data.shard import Shard
from vqclip.data.sources.base import RawSample
from vqclip.data.sources.class_folder import CLASSNAMES, open_folder, read_lines, read_templates
from vqclip.data.sources.reader import ShardReader
from vqclip.data.sources.shards import Weight, require_members
from vqclip.errors import DataError

__all__ = ["ClassShards", "ClassShardsConfig", "ClassShardsData"]


class ClassShardsData(Config):
    """A folder with `classnames.txt`, `zeroshot_classification_templates.txt` and `<split>/*.tar` of images and .cls.

    This is what clip_benchmark's webdataset export writes. `{c}` in a template stands for the class name, and .cls
    holds a line number of classnames.txt, from 0.
    """

    kind: Literal["classes"] = "classes"
    """Labelled shards."""
    path: Annotated[str, BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path)]
    """The folder, or its URL. At http and https, `nshards.txt` beside the tars says how many there are."""
    split: str = "train"
    """Folder of the split in it; "" if the tars lie beside `classnames.txt`."""
    remote: RemoteConfig = RemoteConfig()
    """How shards at URLs are fetched and kept."""

    def shards(self) -> Sequence[Shard]:
        """The tars, for `vqclip.data.prepare_sources`.

        Raises:
            DataError: there are none.
        """
        return open_folder(self.path, self.remote).shards(self.split)

    def build(self, cache: Path | None = None) -> ClassShards:
        """Opens the shards, indexing those that are not indexed yet."""
        return ClassShards(self, cache)


class ClassShardsConfig(ClassShardsData):
    """Labelled shards to train on."""

    weight: Weight = 1.0
    """How often a sample of this source appears in an epoch; fractions allowed."""


class ClassShards:
    """A `Source` of labelled images; every prompt with the class name is a caption.

    Args:
        config: where the folder lies.
        cache: folder of the indexes; default `vqclip.io.cache.cache_folder()`.

    Raises:
        DataError: no shards, a damaged one, or class names or templates missing.
    """

    def __init__(self, config: ClassShardsData, cache: Path | None = None):
        self.config = config
        self._reader = ShardReader(config.shards(), cache)
        folder = open_folder(config.path, config.remote)
        require_members(self._reader, "image", "cls", folder.name(config.split))
        self.classnames = read_lines(folder, CLASSNAMES, "one class name a line")
        self.templates = read_templates(folder)
        self._prompts = tuple(tuple(t.replace("{c}", name) for t in self.templates) for name in self.classnames)

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, index: int) -> RawSample:
        """Image, prompts and label of one sample; see `Source.read`."""
        text = self._reader.text(index, "cls")
        label = int(text) if text.isascii() and text.isdigit() else -1
        if not 0 <= label < len(self.classnames):
            last = len(self.classnames) - 1
            raise DataError(
                f"{self.name(index)}: .cls holds {text[:20]!r}; expected a class number, 0 to {last}", "class number"
            )
        return RawSample(self._reader.read(index, "image"), self._prompts[label], label)

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
        prompts = "\n".join(prompt for prompts in self._prompts for prompt in prompts)
        return {
            "kind": "classes",
            "samples": len(self),
            "sha256": self._reader.sha256,
            "prompts_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
        }
