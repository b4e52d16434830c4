"""Random access to stored features."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vqclip.data.features.folder import FeatureFolder
from vqclip.data.features.settings import FeatureSettings
from vqclip.data.features.shard import HEADER_BYTES, ShardTable, checksum, parse_header, parse_table
from vqclip.errors import DataError, StorageError

__all__ = ["FeatureReader"]

_OPEN_SHARDS = 64


@dataclass
class _OpenShard:
    file: int
    key: int
    """Key of its checksums."""
    table: ShardTable
    bad: dict[int, DataError] | None = field(default=None)
    """Errors of the bad samples; read when one is met."""


class FeatureReader:
    """Reads the features of samples by `pread`; works in any process and after a fork.

    At most 64 shards are open, so memory does not grow with the data.

    Args:
        folder: finished features. Each byte is verified when it is read.
    """

    def __init__(self, folder: FeatureFolder):
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()  # first, since `__del__` needs it
        self._folder = folder

    @property
    def settings(self) -> FeatureSettings:
        """Settings of the features."""
        return self._folder.settings

    def empty(self, count: int) -> Tensor:
        """Return an uninitialised tensor ``(count, N, D)`` in the stored dtype."""
        settings = self.settings
        return torch.empty(count, settings.tokens, settings.width, dtype=settings.torch_dtype)

    def read(self, sample_id: int, entry: int, entries: int) -> Tensor:
        """Return the features ``(N, D)`` of one view or caption of a sample.

        Args:
            sample_id: number of the sample over all sources.
            entry: number of the view or caption.
            entries: how many of them the sample has.

        Raises:
            DataError: the sample is bad, with the reason and kind that its decoding had.
            StorageError: the shard is missing or damaged, or was made from other data.
        """
        number, place = divmod(sample_id, self.settings.shard_samples)
        try:
            shard = self._shard(number)
            rows = shard.table.rows_of(place)
            if not len(rows):
                raise self._error_of(number, shard, sample_id)
            if len(rows) != entries:
                raise StorageError(
                    f"{self._path(number)}: sample {sample_id} has features of {len(rows)} views or captions, expected "
                    f"{entries}; delete the folder",
                    "changed features",
                )
            row, size = int(rows[entry]), self.settings.row_bytes
            data = os.pread(shard.file, size, shard.table.rows_at + row * size)
        except OSError as error:
            raise self._damage_error(number, str(error.strerror)) from None
        if len(data) != size or checksum(data, shard.key) != shard.table.sums[row]:
            raise self._damage_error(number, f"the features of sample {sample_id} have changed or are cut short")
        features = torch.frombuffer(bytearray(data), dtype=self.settings.torch_dtype)
        return features.view(self.settings.tokens, self.settings.width)

    def _shard(self, number: int) -> _OpenShard:
        found = self._open.pop(number, None)
        if found is None:
            found = self._open_shard(number)
        self._open[number] = found  # the last one used
        if len(self._open) > _OPEN_SHARDS:
            os.close(self._open.popitem(last=False)[1].file)
        return found

    def _open_shard(self, number: int) -> _OpenShard:
        file = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            header = parse_header(os.pread(file, HEADER_BYTES, 0))
            if os.fstat(file).st_size != header.rows_at + header.rows * self.settings.row_bytes:
                raise ValueError("cut short")  # before memory is taken for the tables
            key = self._folder.key(number)
            return _OpenShard(file, key, parse_table(header, os.pread(file, header.table_bytes, HEADER_BYTES), key))
        except (ValueError, OSError) as error:
            os.close(file)
            problem = error.strerror if isinstance(error, OSError) else error
            raise self._damage_error(number, str(problem)) from None

    def _error_of(self, number: int, shard: _OpenShard, sample_id: int) -> DataError:
        if shard.bad is None:
            record = self._folder.read_record(number)
            shard.bad = {each.sample_id: DataError(each.reason, each.kind) for each in record.bad} if record else {}
        return shard.bad.get(sample_id) or self._damage_error(number, f"sample {sample_id} has no features")

    def _damage_error(self, number: int, problem: str) -> StorageError:
        path = self._path(number)
        forgotten = self._folder.forget(number)
        remedy = "start the run again, which computes this shard again" if forgotten else f"delete {path}"
        return StorageError(
            f"{path}: {problem}: the feature cache was changed or deleted; {remedy}", "damaged features"
        )

    def _path(self, number: int) -> Path:
        return self._folder.shard_path(number)

    def close(self) -> None:
        """Close the open files; they are opened again on demand."""
        while self._open:
            os.close(self._open.popitem()[1].file)

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        # Descriptors are not valid in a spawned worker.
        return {**self.__dict__, "_open": OrderedDict()}
