"""Compute the features of a rank's shards: blocks of samples -> network -> stored dtype -> shard.

Blocks are read, decoded and transformed in the data workers, shard after shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from vqclip.data.batch import BadSample
from vqclip.data.batch_maker import LoaderOptions
from vqclip.data.features import FeatureFolder
from vqclip.data.in_order import InOrderReader, SamplesRead
from vqclip.data.samples import SampleMaker
from vqclip.data.workers import ordered_map
from vqclip.errors import ConfigError, NonFiniteError
from vqclip.nn.precision import Precision, autocast
from vqclip.towers.frozen import chunk_size
from vqclip.train.feature_makers import FeatureMaker

_CAPTION_CHUNKS = 16
"""Chunks of captions between two heartbeats."""


class FeatureJob:
    """Computes shards of features; the networks see chunks of one shape, so the bits depend on no other sample.

    Args:
        maker: computes the features.
        precision: of the run's steps.
        samples: reads the samples.
        folder: where the shards are written.
        options: of the data workers.
    """

    def __init__(
        self,
        maker: FeatureMaker,
        precision: Precision,
        samples: SampleMaker,
        folder: FeatureFolder,
        options: LoaderOptions,
    ):
        self.maker, self._precision = maker, precision
        self.samples, self.folder, self._options = samples, folder, options

    def run(self, shards: Sequence[int]) -> Iterator[int]:
        """Compute and write shards; yield the number of samples done since the last time.

        Raises:
            NonFiniteError: features of a sample contain NaN or infinity.
            ConfigError: features are too large for the stored dtype.
            DataError: the samples cannot be read.
        """
        size, options = chunk_size(self.maker.device), self._options
        settings = self.folder.settings
        sizes = [len(settings.shard_range(number)) for number in range(settings.shards)]
        read = self.samples.make_views if settings.modality == "image" else self.samples.read_captions
        reader = InOrderReader[Tensor | tuple[str, ...]](read, sizes, shards, size)
        blocks = ordered_map(
            reader,
            range(len(reader)),
            options.workers,
            prefetch=options.prefetch,
            timeout_s=options.timeout_s,
            start_method=options.start_method,
        )
        tokenize = self.maker.tokenize
        prepare: Callable[[list[Tensor | str]], Tensor] = torch.stack if tokenize is None else tokenize  # type: ignore[assignment]
        rows_at_once = size if tokenize is None else _CAPTION_CHUNKS * size
        shard: _ShardInWork | None = None
        with contextlib.closing(blocks):
            for block in blocks:
                is_last = block.ids[-1] + 1 == settings.shard_range(block.shard).stop
                shard = shard or _ShardInWork(lambda rows: self._compute(prepare(rows)), rows_at_once)
                shard.add(block)
                for _ in shard.compute(all_rows=is_last):
                    yield 0
                if is_last:
                    self._write(block.shard, shard)
                    shard = None
                yield len(block.ids)

    @torch.no_grad()
    def _compute(self, inputs: Tensor) -> Tensor:
        """Return the features ``(R, N, D)`` of some rows in the stored dtype; those that are not finite stay so."""
        with autocast(self.maker.device, self._precision):
            features = self.maker.compute(inputs.to(self.maker.device))
        stored = features.to(self.folder.settings.torch_dtype)
        return torch.where(features.isfinite(), stored, torch.nan).cpu()  # infinity is then too large a number

    def _write(self, number: int, shard: _ShardInWork) -> None:
        settings = self.folder.settings
        rows = torch.cat([torch.empty(0, settings.tokens, settings.width, dtype=settings.torch_dtype), *shard.rows])
        bad_rows = (~rows.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        if bad_rows:
            place = next(place for place, entries in enumerate(shard.entries) if bad_rows[0] in entries)
            source, index = self.samples.locate(settings.shard_range(number)[place])
            raise self._error(source.name(index), bool(rows[bad_rows[0]].isnan().any()))
        self.folder.write(number, shard.entries, rows, shard.bad)

    def _error(self, name: str, is_nan: bool) -> NonFiniteError | ConfigError:
        network, dtype = self.maker.network, self.folder.settings.dtype
        if is_nan:
            return NonFiniteError(
                f"{name}: the {network}'s features contain NaN or infinity; are its weights those that "
                "were meant, and does it need train.precision: fp32?"
            )
        return ConfigError(
            f"data.feature_cache.dtype: got {dtype}, but the {network}'s features of {name} exceed its range; "
            "expected bf16 or fp32"
        )


class _ShardInWork:
    """Rows and entries of a shard that is being computed; equal captions are computed once."""

    def __init__(self, compute: Callable[[list[Tensor | str]], Tensor], size: int):
        self._compute, self._size = compute, size
        self.entries: list[list[int]] = []
        self.rows: list[Tensor] = []
        self.bad: list[BadSample] = []
        self._waiting: list[Tensor | str] = []
        self._count = 0
        self._row_of: dict[str, int] = {}

    def add(self, block: SamplesRead[Tensor | tuple[str, ...]]) -> None:
        """Add a block of samples."""
        self.bad += block.bad
        self.entries += [[self._row(each) for each in block.found.get(sample_id, ())] for sample_id in block.ids]

    def compute(self, all_rows: bool) -> Iterator[None]:
        """Compute the rows that wait, at least those that fill a part, with a pause after each part."""
        while len(self._waiting) >= (1 if all_rows else self._size):
            part, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
            self.rows.append(self._compute(part))
            yield

    def _row(self, value: Tensor | str) -> int:
        if isinstance(value, str) and value in self._row_of:
            return self._row_of[value]
        self._waiting.append(value)
        self._count += 1
        if isinstance(value, str):
            self._row_of[value] = self._count - 1
        return self._count - 1
