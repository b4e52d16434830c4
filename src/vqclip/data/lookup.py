"""Tools of readers: look-ups, values that were used last, optional libraries and the errors of all libraries."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

import numpy as np

from vqclip.data.remote.urls import mask_credentials
from vqclip.errors import DataError, VqclipError, import_extra

K = TypeVar("K")
V = TypeVar("V")


def locate(starts: np.ndarray | Sequence[int], index: int) -> tuple[int, int]:
    """Return the number of the interval that an index belongs to, such as a shard, and the place of the index in it.

    Args:
        starts: ascending first index of each interval, and the end of the last one; an empty one is never returned.
        index: at least the first of them.
    """
    number = int(np.searchsorted(starts, index, side="right")) - 1
    return number, int(index - starts[number])


class Recent(Generic[K, V]):
    """Values that are made when they are needed, such as open files; those that were used last are kept.

    Another process makes its own: after a fork, and in a pickled copy.

    Args:
        limit: largest sum of the sizes; at least one value is kept.
        size: size of a value; default 1 each.
        close: called with each value that is dropped.
    """

    def __init__(self, limit: int, size: Callable[[V], int] | None = None, close: Callable[[V], object] | None = None):
        self._limit, self._size, self._close = limit, size, close
        self._forget()

    def _forget(self) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()
        self._used, self._process = 0, os.getpid()

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """Return the value of a key, made by a function of the key if it is not kept."""
        if self._process != os.getpid():
            self._forget()
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = self._values[key] = make(key)
        self._used += self._size(value) if self._size else 1
        while self._used > self._limit and len(self._values) > 1:
            _, dropped = self._values.popitem(last=False)
            self._used -= self._size(dropped) if self._size else 1
            if self._close:
                self._close(dropped)
        return value

    def clear(self) -> None:
        """Drop all values."""
        while self._values:
            _, dropped = self._values.popitem()
            if self._close:
                self._close(dropped)
        self._used = 0

    def __len__(self) -> int:
        """Return the number of values that are kept."""
        return len(self._values)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._limit, self._size, self._close)


def map_ahead(pool: Executor, function: Callable[[K], V], items: Iterable[K], ahead: int) -> Iterator[V]:
    """Yield the results of a function in order, with some of the next calls under way."""
    running: deque[Future[V]] = deque()
    for item in items:
        running.append(pool.submit(function, item))
        if len(running) > ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def require_pyarrow() -> tuple[Any, Any]:
    """Return the modules ``(pyarrow, pyarrow.parquet)``; raises ConfigError if pyarrow is not installed."""
    return import_extra("pyarrow", "parquet", "Parquet "), import_extra("pyarrow.parquet", "parquet", "Parquet ")


@contextlib.contextmanager
def name_errors(prefix: str, kind: str = "damaged shard") -> Iterator[None]:
    """Raise errors of the block as `DataError` with a prefix: libraries raise nearly anything for damaged data."""
    try:
        yield
    except VqclipError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        raise DataError(f"{prefix} ({type(error).__name__}: {mask_credentials(reason)})", kind) from None
