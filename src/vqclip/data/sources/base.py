"""The contract of sources of samples."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = ["RawSample", "ShardedSource", "Source"]


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
    """Zero-shot prompts with ``{c}`` for the class name; empty without labels."""

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
