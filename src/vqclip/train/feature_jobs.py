"""Features of frozen networks that are stored: which network, settings that determine every byte, computation.

FeatureMaker    a frozen tower or teacher, and everything about it that determines its features
FeatureJob.run  blocks of samples, read in the data workers -> network -> stored dtype -> shard
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vqclip.config import Modality
from vqclip.data import TrainData
from vqclip.data.batch import BadSample
from vqclip.data.features import FeatureFolder, FeatureSettings
from vqclip.data.features.config import TORCH_DTYPES, choose_shard_samples
from vqclip.data.in_order import InOrderReader, SamplesRead, ShardSlices
from vqclip.data.workers import ordered_map
from vqclip.errors import ConfigError, NonFiniteError
from vqclip.io.tensors import module_digest
from vqclip.nn.precision import autocast
from vqclip.seeds import derive_seed
from vqclip.tokenizer import TextTokenizer, Tokenizer
from vqclip.towers.frozen import chunk_size
from vqclip.towers.training import TowerConfig

if TYPE_CHECKING:
    from vqclip.train.config import TaskConfig

_CAPTION_CHUNKS = 16
"""Chunks of captions between two heartbeats."""
_MADE_WITH = (
    *("vqclip", "torch", "torchvision", "pillow", "timm", "open_clip_torch", "transformers"),
    *("tokenizers", "ftfy", "regex"),  # they decide the token numbers of a caption
)


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


def feature_settings(config: TaskConfig, maker: FeatureMaker, data: TrainData) -> FeatureSettings:
    """Return the settings of stored features: fingerprints of everything that determines their values.

    They are the same on any number of processes and of threads; the number of threads may change the last bits.
    """
    cache, chunk, is_image = config.data.feature_cache, chunk_size(maker.device), maker.modality == "image"
    assert cache is not None
    origin: dict[str, Any] = {
        "data": [source.fingerprint for source in data.samples.sources],
        "precision": config.train.precision,
        "device": device_name(maker.device),
        "chunk": chunk,
        "made_with": library_versions(),
    }
    if is_image:
        origin["transform"] = config.data.transform.model_dump(mode="json")
        origin["views"] = config.data.views
        origin["augmentation_seed"] = derive_seed(config.run.seed, "data", "augmentation")
        origin["max_pixels"] = config.data.max_pixels
    views = config.data.views or 1 if is_image else 1
    sample_bytes = views * maker.tokens * maker.width * TORCH_DTYPES[cache.dtype].itemsize
    return FeatureSettings(
        modality=maker.modality,
        samples=len(data),
        shard_samples=choose_shard_samples(len(data), sample_bytes, chunk),
        tokens=maker.tokens,
        width=maker.width,
        dtype=cache.dtype,
        origin=origin | maker.origin,
    )


def device_name(device: torch.device) -> str:
    """Return the kind of device, with the instructions that its kernels use, such as AVX512."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that compute features, as far as they are installed."""
    found = {}
    for name in _MADE_WITH:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # an extra
            found[name] = importlib.metadata.version(name)
    return found


class FeatureJob:
    """Computes shards of features; the networks see chunks of one shape, so the bits depend on no other sample.

    Args:
        config: of the run.
        maker: computes the features.
        data: reads the samples.

    Attributes:
        folder: where the shards are written.
    """

    def __init__(self, config: TaskConfig, maker: FeatureMaker, data: TrainData):
        assert config.data.feature_cache is not None
        self.maker, self._precision = maker, config.train.precision
        self.samples, self._options = data.samples, data.options
        self.folder = FeatureFolder(config.data.feature_cache.path, feature_settings(config, maker, data))

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
        reader = InOrderReader[Tensor | tuple[str, ...]](read, ShardSlices(sizes, shards, size))
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
