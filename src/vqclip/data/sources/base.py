"""What every source of samples offers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = ["RawSample", "ShardedSource", "Source"]


class RawSample(NamedTuple):
    """One sample as it lies in its shard: nothing decoded yet."""

    image: bytes
    """The image file."""
    captions: tuple[str, ...]
    """At least one; a draw keyed by (seed, epoch, sample id) chooses among several."""
    label: int = -1
    """Class number, or -1 where there is none."""


class Source(Protocol):
    """Samples that can be read in any order, from any process."""

    classnames: tuple[str, ...]
    """Names of the classes that labels refer to; empty without labels."""
    templates: tuple[str, ...]
    """Zero-shot prompts with ``{c}`` for the class name; empty without labels."""

    def __len__(self) -> int:
        """Number of samples, unusable ones included."""
        ...

    def read(self, index: int) -> RawSample:
        """Reads one sample.

        Raises:
            DataError: it has no image or no caption, or cannot be read; the message names shard and sample.
        """
        ...

    def name(self, index: int) -> str:
        """Shard and sample, for messages: ``/data/train/00003.tar: sample 000031415``."""
        ...

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the source contains, JSON-able: equal exactly if the same samples stand in the same order."""
        ...


class ShardedSource(Source, Protocol):
    """A source whose samples lie in shards, one shard after the other."""

    def key(self, index: int) -> str:
        """Name of the sample in its shard, as WebDataset has it."""
        ...

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """Every shard in order: its file's ``name``, its ``bytes``, its ``samples`` and its ``sha256``."""
        ...
