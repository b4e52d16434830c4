"""A rank's share of each global batch, made by the data workers together: each fills some rows of tensors they share.

main process    allocate the tensors of batch t; send them to the workers, slice by slice
worker          fill the rows of a slice; return everything else about them, which is small
main process    batch t = its tensors and what the workers returned, in the order of the rows

Large tensors are never copied between processes. Those on their way to a GPU are copied once, to page-locked memory, in
the thread of torch's DataLoader for this.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy

from vqclip.config import FREE, Config
from vqclip.data.batch import BadSample, Batch, share_sizes
from vqclip.data.order import GlobalOrder
from vqclip.data.samples import SampleMaker
from vqclip.data.tars.ahead import ChunkSupply
from vqclip.data.workers import StartMethod, ordered_map
from vqclip.errors import DataError

Tokenize = Callable[[list[str]], tuple[Tensor, Sequence[int]]]
"""Captions → ``(B, T)`` int64, padded with 0, and the length of each before it was cut; for any B >= 1."""

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name → shape and dtype of a tensor of a batch; the first dimension is rows."""

SLICE_ROWS = 128
"""Smallest number of rows for which a batch is split: fewer take less than a second, and each slice costs the order of
the whole batch once more."""

_PIXELS = ""
"""Name of the images in a `Layout`, beside those of features."""
_SHARED_MEMORY = "/dev/shm"


class LoaderOptions(Config):
    """Options of the preparation of batches; none changes their content."""

    workers: Annotated[int, Field(ge=0, le=512), FREE] = 2
    """Processes per rank that read and decode; 0 uses the training process. Does not change the samples."""
    prefetch: Annotated[int, Field(ge=1, le=64), FREE] = 2
    """Batches prepared ahead for each worker, if `prefetch_gib` allows."""
    prefetch_gib: Annotated[float, Field(ge=0, le=65_536), FREE] = 2.0
    """Limit of a rank's batches prepared ahead, in GiB of images and features; at least one batch is."""
    start_method: Annotated[StartMethod | None, FREE] = None
    """Start method of workers: `fork`, `forkserver` or `spawn`; null: `fork` on Linux, unless the program has set
    one."""
    timeout_s: Annotated[float, Field(ge=0, le=604_800), FREE] = 240.0
    """Longest wait for a worker, in seconds, at most a week; 0 waits forever."""
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1), FREE] = 0.01
    """Bad samples are replaced; a larger fraction of those seen so far stops the run. Data of fewer than 1,000 samples
    may have as many bad ones as 1,000, but no more than a tenth of them, or one of fewer than ten. It is checked over
    the whole run and all its processes: at every report and checkpoint, and when a process alone has met more."""


class Slice(NamedTuple):
    """Some rows of a batch, which a worker fills."""

    key: int
    """Number of the batch among all that this process has begun."""
    step: int
    number: int
    """Number of the slice, 0 to `slices` - 1."""
    slices: int
    """Slices of the batch."""
    tensors: Mapping[str, Tensor]
    """The large tensors of the whole batch."""


@dataclass(frozen=True)
class Rows:
    """Small fields of the rows of a slice; an array passes between processes faster than a tensor."""

    key: int
    """See `Slice.key`."""
    places: np.ndarray
    texts: np.ndarray
    lengths: tuple[int, ...]
    samples: tuple[tuple[int, int, str], ...]
    """Sample id, label and caption of each row."""
    bad: tuple[BadSample, ...]

    def pin_memory(self) -> Rows:
        """Pin the tensors of the batch when this is its last slice; called by torch's DataLoader in a thread."""
        if (batch := _OpenBatch.by_key.get(self.key)) is not None:
            batch.missing -= 1
            if not batch.missing:
                batch.tensors = {name: each.pin_memory() for name, each in batch.tensors.items()}
        return self


@dataclass(frozen=True)
class BatchMaker:
    """Makes this rank's share of any global batch; runs in the workers."""

    samples: SampleMaker
    order: GlobalOrder
    tokenize: Tokenize
    rank: int
    nodes: Sequence[int]
    """Node of every rank."""
    supply: ChunkSupply | None = None
    """Fetches chunks ahead."""

    @property
    def layout(self) -> Layout:
        """Images and features of this rank's share, with as many rows as it has at most.

        Images have no pixels if features replace them.
        """
        rows, stored = -(-self.order.batch_size // len(self.nodes)), self.samples.features
        shape = (3, 0, 0) if "image" in stored else self.samples.transform.shape
        of_features = {name: reader.settings for name, reader in stored.items()}
        return {
            _PIXELS: ((rows, *shape), torch.uint8),
            **{name: ((rows, each.tokens, each.width), each.torch_dtype) for name, each in of_features.items()},
        }

    def fill(self, task: Slice) -> Rows:
        """Write the rows of a slice to its tensors, and return what else belongs to them."""
        if self.supply is not None:
            self.supply.advance(task.step)
        slots, places = self.order.deal(task.step, self.rank, self.nodes)
        first, end = (len(places) * number // task.slices for number in (task.number, task.number + 1))
        samples, bad = [], []
        for row, slot in enumerate(zip(*(each[first:end].tolist() for each in slots), strict=True), first):
            sample, replaced = self.samples.make(*slot)
            if sample.image is not None:
                task.tensors[_PIXELS][row] = sample.image
            for name, each in sample.features.items():
                task.tensors[name][row] = each
            samples.append((sample.sample_id, sample.label, sample.caption))
            bad += [] if replaced is None else [replaced]
        texts, lengths = self.tokenize([caption for _, _, caption in samples] or [""])
        size = len(samples)
        return Rows(task.key, places[first:end], texts[:size].numpy(), (*lengths[:size],), (*samples,), (*bad,))

    def join(self, step: int, tensors: Mapping[str, Tensor], rows: Sequence[Rows]) -> Batch:
        """Return the batch, from its tensors and what `fill` returned for each slice."""
        samples = [each for some in rows for each in some.samples]
        whole = {name: each[: len(samples)] for name, each in tensors.items()}
        return Batch(
            step=step,
            epoch=self.order.epoch_of(step * self.order.batch_size),
            images=whole.pop(_PIXELS),
            texts=torch.from_numpy(np.concatenate([some.texts for some in rows])),
            sample_ids=torch.tensor([sample_id for sample_id, _, _ in samples], dtype=torch.int64),
            labels=torch.tensor([label for _, label, _ in samples], dtype=torch.int64),
            places=torch.from_numpy(np.concatenate([some.places for some in rows])),
            global_size=self.order.batch_size,
            sizes=share_sizes(self.order.batch_size, len(self.nodes)),
            bad=tuple(each for some in rows for each in some.bad),
            lengths=tuple(each for some in rows for each in some.lengths),
            captions=tuple(caption for _, _, caption in samples),
            features=whole,
        )


def plan_prefetch(rows: int, batch_bytes: int, workers: int, prefetch: int, limit_bytes: int) -> tuple[int, int]:
    """Divide batches among workers so that at most ``limit_bytes`` are prepared ahead, but never less than a batch.

    Args:
        rows: rows of a batch.
        batch_bytes: bytes of its tensors.
        workers: processes, at least 1.
        prefetch: batches ahead for each worker, if the limit allows them.
        limit_bytes: limit for all workers together.

    Returns:
        Slices of a batch, and how many of them each worker prepares ahead.
    """
    affordable = max(1, limit_bytes // max(batch_bytes, 1))
    # With few batches ahead, there must be a slice for each worker, or its first task is already too much.
    slices = max(1, min(workers, rows, max(rows // SLICE_ROWS, math.ceil(workers / affordable))))
    return slices, max(1, min(prefetch * workers, affordable) * slices // workers)


def make_batches(
    maker: BatchMaker, steps: range, options: LoaderOptions, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """Yield this rank's share of the batches of some steps.

    Args:
        maker: makes them.
        steps: numbers of the batches, in order.
        options: how they are prepared.
        pin_memory: batches in page-locked memory.

    Raises:
        DataError: the maker failed, a worker died or took too long, or the batches need more shared memory than there
            is; a worker would be killed without a message.
    """
    layout, workers = maker.layout, options.workers
    rows = next(iter(layout.values()))[0][0]
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
    limit = round(options.prefetch_gib * 2**30)
    slices, ahead = plan_prefetch(rows, size, workers, options.prefetch, limit) if workers else (1, 1)
    if workers:
        _require_shared_memory(size, math.ceil(ahead * workers / slices) + 1)
    batches = deque[_OpenBatch]()

    def tasks() -> Iterator[Slice]:
        for step in steps:
            tensors = {name: _allocate(*each, workers > 0) for name, each in layout.items()}
            batches.append(_OpenBatch(step, tensors, slices))
            for number in range(slices):
                yield Slice(batches[-1].key, step, number, slices, tensors)

    results = ordered_map(
        maker.fill,
        tasks(),
        workers,
        prefetch=ahead,
        pin_memory=pin_memory,
        timeout_s=options.timeout_s,
        start_method=options.start_method,
    )
    with contextlib.closing(results):
        while filled := list(itertools.islice(results, slices)):
            batch = batches.popleft()
            yield maker.join(batch.step, batch.tensors, filled)


class _OpenBatch:
    """A batch that is being made; lives in the process that reads batches."""

    by_key = weakref.WeakValueDictionary[int, "_OpenBatch"]()
    """All of this process: the thread that pins memory sees only what comes from the workers."""
    _keys = itertools.count()

    def __init__(self, step: int, tensors: dict[str, Tensor], slices: int):
        self.step, self.tensors, self.missing = step, tensors, slices
        self.key = next(self._keys)
        self.by_key[self.key] = self


def _require_shared_memory(size: int, count: int) -> None:
    """Raise DataError if ``count`` batches of ``size`` bytes, one of them in use, do not fit where torch puts them."""
    if sys.platform != "linux" or get_sharing_strategy() != "file_descriptor" or not os.path.isdir(_SHARED_MEMORY):
        return
    status = os.statvfs(_SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if size * count > free:
        raise DataError(
            f"{count} batches of {size / 2**20:.1f} MiB on this rank need {size * count / 2**20:.1f} MiB of shared "
            f"memory, and {_SHARED_MEMORY} has {free / 2**20:.1f} MiB free. Lower data.prefetch_gib or data.workers (0 "
            "needs none), or make it larger (docker run --shm-size)",
            "shared memory",
        )


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, is_shared: bool) -> Tensor:
    """Return an uninitialised tensor; its memory is taken when it is written."""
    size = math.prod(shape)
    if not is_shared or not size:  # there is no empty shared memory
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(size * dtype.itemsize)  # share_memory_() would copy
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
