"""The two formats of token shards behind one door."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from vqclip.data.tokens.layout import TokenRecord, require_key
from vqclip.data.tokens.manifest import SUFFIXES, Settings
from vqclip.data.tokens.parquet import ParquetShard, write_parquet
from vqclip.data.tokens.tars import TarShard, write_tar
from vqclip.errors import printable

__all__ = ["SUFFIXES", "TokenShard", "open_shard", "write_shard"]


class TokenShard(Protocol):
    """An open token shard."""

    def __len__(self) -> int:
        """Samples in it."""
        ...

    def read(self, row: int) -> TokenRecord:
        """The sample at a place; raises DataError for a damaged one."""
        ...

    def close(self) -> None:
        """Close its file."""
        ...


def write_shard(file: BinaryIO, records: Iterable[TokenRecord], settings: Settings) -> None:
    """Write a shard in the format that the settings name.

    Raises:
        DataError: a key that would lead out of a folder it is unpacked into.
    """
    records = _safely_named(records)
    if settings.storage == "wds":
        write_tar(file, records)
    else:
        write_parquet(file, records, settings.image, settings.text)


def _safely_named(records: Iterable[TokenRecord]) -> Iterator[TokenRecord]:
    for record in records:
        require_key(record.key, printable(f"sample {record.key}", one_line=True))
        yield record


def open_shard(path: Path, settings: Settings) -> TokenShard:
    """Open a shard of a folder with these settings.

    Raises:
        DataError: it is damaged, or not what they say.
    """
    kind = TarShard if settings.storage == "wds" else ParquetShard
    return kind(path, settings.image, settings.text)
