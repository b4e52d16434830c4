"""The contract of sources of samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias

from pydantic import BeforeValidator, Field, PrivateAttr
from typing_extensions import Self

from vqclip.config import Config
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import read_bounded

MAX_BYTES = {"image": 64 << 20, "txt": 1 << 20, "json": 4 << 20, "cls": 64}
"""Limits of the files of a sample; larger ones are refused before they are read."""


def _to_place(path: object) -> object:
    if path in ("", (), []):  # `Field(min_length=1)` would refuse names that are not UTF-8
        raise ValueError("expected a path or URL")
    return str(path) if isinstance(path, Path) else path


Place = Annotated[str, BeforeValidator(_to_place)]
"""A path or URL."""
Places = Annotated[str | tuple[str, ...], BeforeValidator(_to_place)]
"""One or several paths, patterns or URLs."""


Preparation: TypeAlias = Callable[[], object]
"""Work before the first sample of a source is read, such as to index a shard, unless it is done; returns False if
another process is about to have done it."""


class RawSample(NamedTuple):
    """One sample as it is stored, not decoded."""

    image: bytes
    """The image file."""
    captions: tuple[str, ...]
    """At least one; among several a draw keyed by (seed, epoch, sample id) chooses."""
    label: int = -1
    """Class number; -1 without one."""
    keys: tuple[int, ...] = ()
    """Number of the key or column of each caption among those of `SourceConfigBase.caption_weights`; may be empty
    without weights."""


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
    """A source whose samples are stored in shards and ordered by shard, as those of all kinds of this package are."""

    config: SourceConfigBase

    def place(self, index: int) -> str:
        """Return the unique path of a sample below the opened folder: ``pets/cat.png``, ``00003.tar/000031415``."""
        ...

    def key(self, index: int) -> str:
        """Return the sample's name in its shard, as in WebDataset."""
        ...

    @property
    def shards(self) -> list[dict[str, str | int]]:
        """Every shard in order: file ``name``, ``bytes``, ``samples`` and ``sha256``."""
        ...


class SourceConfigBase(Config):
    """Configuration of a source; the base class of all kinds, those of other packages included.

    A kind is a subclass with a literal ``kind``, `build`, and `preparations` if there is something to prepare.
    """

    kind: str
    """Kind of the source."""
    weight: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Number of times that each sample appears in an epoch; fractions allowed. null: 1. For `data.sources` only."""

    _chunk: int | None = PrivateAttr(None)
    """See `in_chunks`."""

    def require_no_weight(self, where: str) -> None:
        """Raise ConfigError if a weight is set in a place that has none."""
        if self.weight is not None:
            raise ConfigError(f"weight: got {self.weight:g} in {where}; it applies to data.sources only: leave it out")

    @property
    def has_classes(self) -> bool | None:
        """True if images have classes, False if they have captions of their own, None if the data decide."""
        return None

    @property
    def caption_weights(self) -> tuple[float, ...]:
        """Return the weight of each key or column of captions; empty if every caption is drawn equally often."""
        given = [each for name in ("captions", "json_keys") if isinstance(each := getattr(self, name, None), dict)]
        return tuple(given[0].values()) if given else ()

    def pins(self) -> dict[str, Any]:
        """Return keys whose meaning may change, such as a branch, with JSON values that cannot; by default none.

        Raises:
            DataError: data are missing.
        """
        return {}

    def preparations(self) -> Sequence[Preparation]:
        """Return what is indexed before the first sample is read, for `vqclip.data.open_sources`; by default none.

        Raises:
            DataError: data are missing.
        """
        return ()

    def in_chunks(self, chunk: int) -> Self:
        """Return this configuration for an order that keeps ``chunk`` consecutive samples together."""
        copy = self.model_copy()
        copy._chunk = chunk
        return copy

    def build(self) -> Source:
        """Open the data, after indexing what has no index; what is made is in `vqclip.io.files.cache_folder()`.

        Raises:
            DataError: the data are missing or damaged.
        """
        raise NotImplementedError


@contextlib.contextmanager
def name_sample(name: str) -> Iterator[None]:
    """Put the name of a sample before the errors of the block."""
    try:
        yield
    except DataError as error:
        error.args = (f"{name}: {error}", *error.args[1:])
        raise


def read_image(file: Path, name: str) -> bytes:
    """Read an image file; raise DataError, which begins with its name, if it cannot be read or is too large."""
    limit = MAX_BYTES["image"]
    try:
        data = read_bounded(file, limit)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}", "unreadable file") from None
    if len(data) > limit:
        raise DataError(f"{name}: more than {limit} bytes, which are not read", "too many bytes")
    return data
