"""Read and write token shards in either format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

from vqclip.data.tokens.layout import TokenRecord, require_key
from vqclip.data.tokens.manifest import SUFFIXES, Settings
from vqclip.data.tokens.parquet import ParquetShard, write_parquet
from vqclip.data.tokens.tars import TarShard, write_tar
from vqclip.errors import printable

__all__ = ["SUFFIXES", "TokenShard", "open_shard", "write_shard"]


TokenShard: TypeAlias = TarShard | ParquetShard
"""An open token shard."""


def write_shard(file: BinaryIO, records: Iterable[TokenRecord], settings: Settings) -> None:
    """Write a shard in the format of the settings.

    Raises:
        DataError: a key that would leave the folder that it is unpacked into.
    """
    records = _check_keys(records)
    if settings.storage == "wds":
        write_tar(file, records)
    else:
        write_parquet(file, records, settings.image, settings.text)


def _check_keys(records: Iterable[TokenRecord]) -> Iterator[TokenRecord]:
    for record in records:
        require_key(record.key, printable(f"sample {record.key}", one_line=True))
        yield record


def open_shard(path: Path, settings: Settings) -> TokenShard:
    """Open a shard of a folder with these settings.

    Raises:
        DataError: it is damaged, or does not match the settings.
    """
    kind = TarShard if settings.storage == "wds" else ParquetShard
    return kind(path, settings.image, settings.text)
