"""The contract of sources of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

from pydantic import BeforeValidator, Field

from vqclip.config import Config
from vqclip.data.shard import Part
from vqclip.errors import ConfigError

__all__ = [
    "FolderContent",
    "NumberedSource",
    "OpensSource",
    "Place",
    "RawSample",
    "ShardedSource",
    "Source",
    "SourceConfigBase",
]


def _to_place(path: object) -> object:
    if path == "":  # `Field(min_length=1)` would refuse names that are not UTF-8
        raise ValueError("expected a path or URL")
    return str(path) if isinstance(path, Path) else path


Place = Annotated[str, BeforeValidator(_to_place)]
"""A path or URL."""


class RawSample(NamedTuple):
    """One sample as it is stored, not decoded."""

    image: bytes
    """The image file."""
    captions: tuple[str, ...]
    """At least one; among several a draw keyed by (seed, epoch, sample id) chooses."""
    label: int = -1
    """Class number; -1 without one."""


class Source(Protocol):
    """Samples that can be read in any order, from any process."""

    classnames: tuple[str, ...]
    """Names of the classes that labels refer to; empty without labels."""
    templates: tuple[str, ...]
    """Prompts with ``{c}`` for the class name, which are the captions; empty if images have captions of their own."""
    notes: tuple[str, ...]
    """Short sentences on what is left out, grouped or ambiguous; `vqclip.data.open_source` logs them."""

    def __len__(self) -> int:
        """Return the number of samples, unusable ones included."""
        ...

    def read(self, index: int) -> RawSample:
        """Read one sample.

        Raises:
            DataError: it has no image or no caption, or cannot be read; the message names shard and sample.
        """
        ...

    def name(self, index: int) -> str:
        """Return shard and sample, for messages: ``/data/train/00003.tar: sample 000031415``."""
        ...

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON-able description of the content; equal exactly if sources have the same samples in the same order."""
        ...


class ShardedSource(Source, Protocol):
    """A source whose samples are stored in shards and ordered by shard."""

    def key(self, index: int) -> str:
        """Return the sample's name in its shard, as in WebDataset."""
        ...

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """Every shard in order: file ``name``, ``bytes``, ``samples`` and ``sha256``."""
        ...


class OpensSource(Protocol):
    """Prepares and opens a source."""

    def shards(self) -> Sequence[Part]:
        """Return what is indexed before the first sample is read; see `SourceConfigBase.shards`."""
        ...

    def build(self, cache: Path | None = None) -> Source:
        """Open the data; see `SourceConfigBase.build`."""
        ...


class NumberedSource:
    """Base of sources whose samples have no names but their numbers; a subclass sets `shards`."""

    shards: list[dict[str, str | int]]
    """See `ShardedSource.shards`."""
    notes: tuple[str, ...] = ()
    """See `Source.notes`."""

    def key(self, index: int) -> str:
        """Return the number of the sample; see `ShardedSource.key`."""
        return f"{index:09d}"

    def place(self, index: int) -> str:
        """Return the number of the sample; see `vqclip.data.prepare.ImageSource.place`."""
        return self.key(index)

    @property
    def sha256(self) -> str:
        """SHA-256 of those of all shards."""
        return hashlib.sha256("".join(str(shard["sha256"]) for shard in self.shards).encode()).hexdigest()


class FolderContent(NamedTuple):
    """Names in a folder, without hidden ones."""

    path: Path
    """The folder."""
    files: frozenset[str]
    folders: frozenset[str]


class SourceConfigBase(Config):
    """Configuration of a source; the base class of all kinds, those of other packages included.

    A kind is a subclass with a literal ``kind``, `build`, and `shards` if there is something to prepare.
    """

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Kind → endings of names of files, such as ``.tar``, that are plainly of this kind."""

    kind: str
    """Kind of the source."""
    weight: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Number of times that each sample appears in an epoch; fractions allowed. null: 1. For `data.sources` only."""

    def require_no_weight(self, where: str) -> None:
        """Raise ConfigError if a weight is set in a place that has none."""
        if self.weight is not None:
            raise ConfigError(f"weight: got {self.weight:g} in {where}; it applies to data.sources only: leave it out")

    @property
    def has_classes(self) -> bool | None:
        """True if images have classes, False if they have captions of their own, None if the data decide."""
        return None

    @classmethod
    def matches_folder(cls, content: FolderContent) -> bool:
        """Return whether a folder is plainly of this kind; only kinds of this package are asked."""
        return False

    def shards(self) -> Sequence[Part]:
        """Return what is indexed before the first sample is read, for `vqclip.data.prepare_sources`; by default none.

        Raises:
            DataError: data are missing.
        """
        return ()

    def in_chunks(self, chunk: int) -> OpensSource:
        """Return what prepares and opens the data for an order of chunks; by default this configuration itself.

        Args:
            chunk: consecutive samples that stay together.
        """
        return self

    def build(self, cache: Path | None = None) -> Source:
        """Open the data, after indexing what has no index.

        Args:
            cache: folder of the indexes; default `vqclip.io.files.cache_folder()`.

        Raises:
            DataError: the data are missing or damaged.
        """
        raise NotImplementedError
