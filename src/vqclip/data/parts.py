"""Batches that several workers make together: each fills some rows of tensors in shared memory.

main process    allocate the tensors of batch t; send them to the workers, part by part
worker          fill the rows of a part; return everything else about them, which is small
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
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy

from vqclip.data.workers import StartMethod, ordered_map
from vqclip.errors import DataError

__all__ = ["Layout", "PartMaker", "PrefetchPlan", "make_batches"]

BatchT = TypeVar("BatchT", covariant=True)
RestT = TypeVar("RestT")

PART_ROWS = 128
"""Smallest number of rows for which a batch is split: fewer take less than a second, and each part costs the order of
the whole batch once more."""

_SHARED_MEMORY = "/dev/shm"

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name → shape and dtype of a tensor of a batch; the first dimension is rows."""


class PartMaker(Protocol[BatchT, RestT]):
    """Makes batches, whole or in parts; picklable where processes are spawned."""

    @property
    def layout(self) -> Layout:
        """Large tensors of a batch, with as many rows as it has at most."""
        ...

    def fill(self, step: int, part: int, parts: int, tensors: Mapping[str, Tensor]) -> RestT:
        """Write one part of a batch to its rows of ``tensors``, and return what else it consists of."""
        ...

    def join(self, step: int, tensors: Mapping[str, Tensor], rests: Sequence[RestT]) -> BatchT:
        """Return the batch, from its tensors and what `fill` returned for each part."""
        ...


class PrefetchPlan(NamedTuple):
    """Division of batches among workers, within a number of bytes."""

    parts: int
    """Parts of a batch."""
    tasks: int
    """Parts that each worker prepares ahead."""

    @classmethod
    def choose(cls, rows: int, batch_bytes: int, workers: int, prefetch: int, limit_bytes: int) -> PrefetchPlan:
        """Choose so that at most ``limit_bytes`` are prepared ahead, but never less than a batch.

        Args:
            rows: rows of a batch.
            batch_bytes: bytes of its tensors.
            workers: processes, at least 1.
            prefetch: batches ahead for each worker, if the limit allows them.
            limit_bytes: limit for all workers together.
        """
        affordable = max(1, limit_bytes // max(batch_bytes, 1))
        # With few batches ahead, there must be a part for each worker, or its first task is already too much.
        parts = max(1, min(workers, rows, max(rows // PART_ROWS, math.ceil(workers / affordable))))
        return cls(parts, max(1, min(prefetch * workers, affordable) * parts // workers))


def make_batches(
    maker: PartMaker[BatchT, Any],
    steps: Iterable[int],
    workers: int = 0,
    prefetch: int = 2,
    prefetch_bytes: int = sys.maxsize,
    pin_memory: bool = False,
    timeout_s: float = 0,
    start_method: StartMethod | None = None,
) -> Generator[BatchT, None, None]:
    """Yield the batches of some steps; see `vqclip.data.workers.ordered_map` for the other arguments.

    Args:
        maker: makes batches.
        steps: numbers of the batches, in order.
        workers: processes that share each batch; 0 makes it in this one.
        prefetch: batches ahead for each worker.
        prefetch_bytes: limit of the bytes of batches prepared ahead; at least one batch is.
        pin_memory: batches in page-locked memory.
        timeout_s: longest wait for a worker.
        start_method: how workers are started.

    Raises:
        DataError: the maker failed, a worker died or took too long, or the batches need more shared memory than there
            is; a worker would be killed without a message.
    """
    layout = maker.layout
    rows = next(iter(layout.values()))[0][0]
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
    plan = PrefetchPlan.choose(rows, size, max(workers, 1), prefetch, prefetch_bytes)
    if workers:
        _require_shared_memory(size, math.ceil(plan.tasks * workers / plan.parts) + 1)
    batches = _Batches(layout, steps, plan.parts if workers else 1, is_shared=workers > 0)
    results: Generator[Any, None, None] = ordered_map(
        _Filler(maker), batches, workers, plan.tasks, pin_memory, timeout_s, start_method=start_method
    )
    with contextlib.closing(results):
        while filled := list(itertools.islice(results, batches.parts)):
            batch = batches.open.popleft()
            yield maker.join(batch.step, batch.tensors, [each.rest for each in filled])


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


class _Task(NamedTuple):
    key: int
    step: int
    part: int
    parts: int
    tensors: dict[str, Tensor]


class _OpenBatch:
    """A batch that is being made; lives in the process that reads batches."""

    def __init__(self, step: int, parts: int, tensors: dict[str, Tensor]):
        self.step, self.tensors, self._missing = step, tensors, parts

    def pin_after_last_part(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.tensors = {name: each.pin_memory() for name, each in self.tensors.items()}


_open_batches: weakref.WeakValueDictionary[int, _OpenBatch] = weakref.WeakValueDictionary()
"""Batches that are being made, for the thread that pins memory; it sees only what comes from the workers."""
_keys = itertools.count()


@dataclass(frozen=True)
class _Filled(Generic[RestT]):
    """A part of a batch whose rows are written."""

    key: int
    rest: RestT

    def pin_memory(self) -> _Filled[RestT]:
        """Pin the tensors of the batch when this is its last part; called by torch's DataLoader."""
        if (batch := _open_batches.get(self.key)) is not None:
            batch.pin_after_last_part()
        return self


class _Filler(Generic[RestT]):
    """Fills parts; runs in the workers."""

    def __init__(self, maker: PartMaker[Any, RestT]):
        self._maker = maker

    def __call__(self, task: _Task) -> _Filled[RestT]:
        return _Filled(task.key, self._maker.fill(task.step, task.part, task.parts, task.tensors))


class _Batches:
    """Opens batches as their parts are asked for."""

    def __init__(self, layout: Layout, steps: Iterable[int], parts: int, is_shared: bool):
        self.open: deque[_OpenBatch] = deque()
        self.parts = parts
        self._layout, self._steps, self._is_shared = layout, steps, is_shared

    def __iter__(self) -> Iterator[_Task]:
        for step in self._steps:
            tensors = {name: _allocate(*each, self._is_shared) for name, each in self._layout.items()}
            batch, key = _OpenBatch(step, self.parts, tensors), next(_keys)
            self.open.append(batch)
            _open_batches[key] = batch
            for part in range(self.parts):
                yield _Task(key, step, part, self.parts, tensors)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, is_shared: bool) -> Tensor:
    """Return an uninitialised tensor; its memory is taken when it is written."""
    size = math.prod(shape)
    if not is_shared or not size:  # there is no empty shared memory
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(size * dtype.itemsize)  # share_memory_() would copy
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
