"""Features of frozen networks that are stored: which network, and its computation.

FeatureMaker    a frozen tower or teacher, and everything about it that determines its features
FeatureJob.run  blocks of samples, read in the data workers -> network -> stored dtype -> shard
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vqclip.config import Modality
from vqclip.data import TrainData
from vqclip.data.batch import BadSample
from vqclip.data.features import FeatureFolder
from vqclip.data.in_order import InOrderReader, SamplesRead
from vqclip.data.workers import ordered_map
from vqclip.errors import ConfigError, NonFiniteError
from vqclip.io.tensors import module_digest
from vqclip.nn.precision import Precision, autocast
from vqclip.tokenizer import TextTokenizer, Tokenizer
from vqclip.towers.frozen import chunk_size
from vqclip.towers.training import TowerConfig

_CAPTION_CHUNKS = 16
"""Chunks of captions between two heartbeats."""


@dataclass(frozen=True)
class FeatureMaker:
    """A frozen network whose features are stored."""

    modality: Modality
    network: str
    """Name of the network, for messages, such as "image tower"."""
    compute: Callable[[Tensor], Tensor]
    """Images ``(R, 3, S, S)`` or token numbers ``(R, T)`` → features ``(R, N, D)``, the same bits in every batch."""
    tokens: int
    """N, tokens of a sample."""
    width: int
    """D, features of a token."""
    device: torch.device
    origin: dict[str, Any]
    """Everything about the network and its input that determines the features."""
    tokenize: Callable[[list[str]], Tensor] | None = None
    """Captions → token numbers; None for images."""


def tower_maker(tokenizer: Tokenizer) -> FeatureMaker:
    """Return the maker of a frozen tower's features, reduced if `Tokenizer.reduces_early`."""
    tower, reduction = tokenizer.tower, tokenizer.reduce if tokenizer.reduces_early else None
    reduced = {} if reduction is None else {"reduce": tokenizer.config.reduce.model_dump(mode="json")}
    return FeatureMaker(
        modality="image" if tokenizer.modality == "image" else "text",
        network=f"{tokenizer.modality} tower",
        compute=tokenizer.tower_features,
        tokens=tower.num_tokens if reduction is None else reduction.num_tokens,
        width=tower.width,
        device=tokenizer.device,
        origin=tower_origin(tower, tokenizer.config.tower) | reduced | vocabulary_origin(tokenizer),
        tokenize=tokenizer.preprocess if isinstance(tokenizer, TextTokenizer) else None,
    )


def tower_origin(tower: nn.Module, config: TowerConfig) -> dict[str, Any]:
    """Return the SHA-256 of the configuration of a tower, but for what trains, and of all its tensors."""
    return {"tower": module_digest(tower, f"{type(tower).__name__} {config.model_dump_json(exclude={'train'})}")}


def vocabulary_origin(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what determines the token numbers of a caption; nothing for images."""
    if not isinstance(tokenizer, TextTokenizer):
        return {}
    vocabulary = tokenizer.preprocess
    files = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(vocabulary.files().items())}
    return {
        "vocabulary": vocabulary.describe(),
        "vocabulary_files": files,
        "context_length": vocabulary.context_length,
    }


class FeatureJob:
    """Computes shards of features; the networks see chunks of one shape, so the bits depend on no other sample.

    Args:
        maker: computes the features.
        precision: of the run's steps.
        data: reads the samples.
        folder: where the shards are written.
    """

    def __init__(self, maker: FeatureMaker, precision: Precision, data: TrainData, folder: FeatureFolder):
        self.maker, self._precision, self.folder = maker, precision, folder
        self.samples, self._options = data.samples, data.options

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
        settings, network = self.folder.settings, self.maker.network
        rows = torch.cat([torch.empty(0, settings.tokens, settings.width, dtype=settings.torch_dtype), *shard.rows])
        for row in (~rows.isfinite()).flatten(1).any(1).nonzero().flatten().tolist():
            place = next(place for place, entries in enumerate(shard.entries) if row in entries)
            source, index = self.samples.locate(settings.shard_range(number)[place])
            name = source.name(index)
            if rows[row].isnan().any():
                raise NonFiniteError(
                    f"{name}: the {network}'s features contain NaN or infinity; are its weights those that "
                    "were meant, and does it need train.precision: fp32?"
                )
            raise ConfigError(
                f"data.feature_cache.dtype: got {settings.dtype}, but the {network}'s features of {name} exceed its "
                "range; expected bf16 or fp32"
            )
        self.folder.write(number, shard.entries, rows, shard.bad)


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
        """Return the number of the row of an image or caption, which waits if it is new."""
        if isinstance(value, str) and value in self._row_of:
            return self._row_of[value]
        row = self._count
        self._waiting.append(value)
        self._count += 1
        if isinstance(value, str):
            self._row_of[value] = row
        return row
