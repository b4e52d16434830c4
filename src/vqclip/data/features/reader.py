"""Random access to stored features."""

from __future__ import annotations

import torch
from torch import Tensor

from vqclip.data.features.config import FeatureSettings
from vqclip.data.features.folder import FeatureFolder, StoredShard
from vqclip.data.lookup import Recent
from vqclip.errors import DataError, StorageError

__all__ = ["FeatureReader"]

_OPEN_SHARDS = 256


class FeatureReader:
    """Reads the features of samples; works in any process and after a fork.

    At most 256 shards are mapped, so memory does not grow with the data.

    Args:
        folder: finished features. Each byte is verified when it is read.
    """

    def __init__(self, folder: FeatureFolder):
        self._folder = folder
        self._shards = Recent[int, StoredShard](_OPEN_SHARDS)

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
        shard = self._shards.get(number, self._open)
        rows = shard.entries_of(place)
        if not len(rows):
            raise self._error_of(number, sample_id)
        if len(rows) != entries:
            raise StorageError(
                f"{self._folder.shard_path(number)}: sample {sample_id} has features of {len(rows)} views or captions, "
                f"expected {entries}; delete the folder",
                "changed features",
            )
        data = shard.read(int(rows[entry]))
        if data is None:
            raise self._damage_error(number, f"the features of sample {sample_id} have changed")
        return torch.frombuffer(data, dtype=self.settings.torch_dtype).view(self.settings.tokens, self.settings.width)

    def _open(self, number: int) -> StoredShard:
        try:
            return self._folder.open(number)
        except DataError as error:
            path = self._folder.shard_path(number)
            raise self._damage_error(number, str(error).removeprefix(f"{path}: ")) from None

    def _error_of(self, number: int, sample_id: int) -> DataError:
        record = self._folder.record(number)
        for bad in record.bad if record else ():
            if bad.sample_id == sample_id:
                return DataError(bad.reason, bad.kind)
        return self._damage_error(number, f"sample {sample_id} has no features")

    def _damage_error(self, number: int, problem: str) -> StorageError:
        path = self._folder.shard_path(number)
        forgotten = self._folder.forget(number)
        remedy = "start the run again, which computes this shard again" if forgotten else f"delete {path}"
        return StorageError(
            f"{path}: {problem}: the feature cache was changed or deleted; {remedy}", "damaged features"
        )
