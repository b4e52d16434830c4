"""Fetch chunks before they are needed, in threads of a data worker."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vqclip.errors import StorageError

__all__ = ["FetchAhead", "PlannedFetch"]

_THREADS = 4


class PlannedFetch(NamedTuple):
    """A chunk that will be needed."""

    position: int
    """Place of the sample that needs it first; ascending. Behind it, the reader has fetched it."""
    size: int
    """Bytes of the chunk."""
    chunk: int
    """Number of the chunk."""


class FetchAhead:
    """Fetches chunks in the order of need, several at a time, up to a number of bytes ahead of the reader.

    The workers of a machine divide the chunks among them: each takes every K-th. Chunks that the reader has come to
    before are left out: they may not be needed any more. So is a chunk that cannot be fetched, since the reader meets
    the same error when it needs the chunk. Make it in the process that reads: threads do not survive a fork.

    Args:
        plan: the chunks that the machine needs, in the order of need; may be without end.
        fetch: puts a chunk into the cache; called in several threads.
        room: bytes that the workers of the machine together may fetch beyond the position of `advance`; one chunk for
            each worker is always allowed.
        worker: number of this worker, from 0.
        workers: number K of workers of the machine.
        threads: number of chunks that this worker fetches at a time.
    """

    def __init__(
        self,
        plan: Iterable[PlannedFetch],
        fetch: Callable[[int], object],
        room: int,
        worker: int = 0,
        workers: int = 1,
        threads: int = _THREADS,
    ):
        self._plan = itertools.islice(plan, worker, None, workers)
        self._fetch, self._room = fetch, room // workers
        self._changed = threading.Condition()
        self._first: PlannedFetch | None = None  # of the plan
        self._ahead: deque[PlannedFetch] = deque()
        self._bytes, self._position, self._closed = 0, -1, False
        self._error: BaseException | None = None
        for _ in range(threads):
            threading.Thread(target=self._run, name="vqclip-fetch", daemon=True).start()

    def advance(self, position: int) -> None:
        """Allow more chunks to be fetched, since the reader has come to `position`.

        Raises:
            Exception: any error of the threads that is not a StorageError.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            self._position = max(position, self._position)
            while self._ahead and self._ahead[0].position <= self._position:
                self._bytes -= self._ahead.popleft().size
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads after the chunks that they fetch now."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (planned := self._next()) is not None:
                with contextlib.suppress(StorageError):
                    self._fetch(planned.chunk)
        except BaseException as error:
            with self._changed:
                self._error = error

    def _next(self) -> PlannedFetch | None:
        """Wait until the next chunk may be fetched, and return it; None at the end."""
        with self._changed:
            while not self._closed:
                self._first = self._first or next(self._plan, None)
                if self._first is None:
                    return None
                planned, size = self._first, self._bytes + self._first.size
                if planned.position <= self._position:
                    self._first = None  # the reader was faster
                elif size <= self._room or not self._ahead:
                    self._first, self._bytes = None, size
                    self._ahead.append(planned)
                    return planned
                else:
                    self._changed.wait()
        return None
