"""Compute the features of a rank's shards: blocks of samples -> network -> stored dtype -> shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from vqclip.data.features import FeatureFolder, ShardContent
from vqclip.data.features.folder import BadFeatures
from vqclip.data.loader import LoaderOptions
from vqclip.data.samples import SampleMaker
from vqclip.data.workers import ordered_map
from vqclip.errors import ConfigError, NonFiniteError
from vqclip.nn.precision import Precision, autocast
from vqclip.towers.frozen import chunk_size
from vqclip.train.feature_blocks import Block, Blocks
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
        self.samples, self._folder, self._options = samples, folder, options

    def run(self, shards: Sequence[int]) -> Iterator[int]:
        """Compute and write shards; yield the number of samples done since the last time.

        Raises:
            NonFiniteError: features of a sample contain NaN or infinity.
            ConfigError: features are too large for the stored dtype.
            DataError: the samples cannot be read.
        """
        blocks = Blocks(self.samples, self._folder.settings, shards, chunk_size(self.maker.device))
        options = self._options
        made = ordered_map(blocks, range(len(blocks)), options.workers, options.prefetch, timeout_s=options.timeout_s)
        shard: _ShardInWork | None = None
        with contextlib.closing(made):  # type: ignore[type-var]
            for block in made:
                shard = shard or self._begin()
                for _ in shard.add(block):
                    yield 0
                if block.is_last:
                    for _ in shard.finish():
                        yield 0
                    self._write(block.shard, shard)
                    shard = None
                yield block.size

    def _begin(self) -> _ShardInWork:
        size, tokenize = chunk_size(self.maker.device), self.maker.tokenize
        if tokenize is None:
            return _ImageShard(self._compute, size)
        return _TextShard(lambda captions: self._compute(tokenize(captions)), _CAPTION_CHUNKS * size)

    @torch.no_grad()
    def _compute(self, inputs: Tensor) -> Tensor:
        """Return the features ``(R, N, D)`` of some rows in the stored dtype; those that are not finite stay so."""
        with autocast(self.maker.device, self._precision):
            features = self.maker.compute(inputs.to(self.maker.device))
        stored = features.to(self._folder.settings.torch_dtype)
        return torch.where(features.isfinite(), stored, torch.nan).cpu()  # infinity is then too large a number

    def _write(self, number: int, shard: _ShardInWork) -> None:
        settings = self._folder.settings
        rows = torch.cat([torch.empty(0, settings.tokens, settings.width, dtype=settings.torch_dtype), *shard.rows])
        bad_rows = (~rows.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        if bad_rows:
            place = next(place for place, entries in enumerate(shard.entries) if bad_rows[0] in entries)
            source, index = self.samples.locate(settings.shard_range(number)[place])
            raise self._error(source.name(index), bool(rows[bad_rows[0]].isnan().any()))
        self._folder.write(number, ShardContent(shard.entries, rows), tuple(shard.bad))

    def _error(self, name: str, is_nan: bool) -> NonFiniteError | ConfigError:
        network, dtype = self.maker.network, self._folder.settings.dtype
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
    """Rows and entries of a shard that is being computed."""

    def __init__(self) -> None:
        self.entries: list[list[int]] = []
        self.rows: list[Tensor] = []
        self.bad: list[BadFeatures] = []

    def add(self, block: Block) -> Iterator[None]:
        """Add a block of samples, with a pause after each chunk that is computed."""
        self.bad += block.bad
        yield from ()

    def finish(self) -> Iterator[None]:
        """Compute what is left, with a pause now and then."""
        yield from ()


class _ImageShard(_ShardInWork):
    def __init__(self, compute: Callable[[Tensor], Tensor], size: int):
        super().__init__()
        self._compute, self._size, self._count = compute, size, 0

    def add(self, block: Block) -> Iterator[None]:
        yield from super().add(block)
        for views in block.inputs:
            self.entries.append(list(range(self._count, self._count + len(views))))
            self._count += len(views)
        if good := [views for views in block.inputs if isinstance(views, Tensor) and len(views)]:
            for chunk in torch.cat(good).split(self._size):
                self.rows.append(self._compute(chunk))
                yield


class _TextShard(_ShardInWork):
    """Equal captions are computed once."""

    def __init__(self, compute: Callable[[list[str]], Tensor], size: int):
        super().__init__()
        self._compute, self._size = compute, size
        self._row_of: dict[str, int] = {}

    def add(self, block: Block) -> Iterator[None]:
        yield from super().add(block)
        for captions in block.inputs:
            self.entries.append([self._row_of.setdefault(str(each), len(self._row_of)) for each in captions])

    def finish(self) -> Iterator[None]:
        captions = list(self._row_of)
        for start in range(0, len(captions), self._size):
            self.rows.append(self._compute(captions[start : start + self._size]))
            yield
