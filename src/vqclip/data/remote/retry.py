"""Retries with growing pauses, within a number of tries and a deadline, and the options that set them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import Field

from vqclip.config import Config
from vqclip.data.remote.urls import display_url
from vqclip.errors import StorageError

T = TypeVar("T")

logger = logging.getLogger("vqclip.data")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_ASKED_S = 0.5, 30.0, 120.0
_sleep = time.sleep
"""Replaced by tests."""


class TransferConfig(Config):
    """Retries and time limits of transfers."""

    tries: Annotated[int, Field(ge=1, le=100)] = 8
    """Number of tries for a file when the connection breaks, stalls or ends early, or the server answers 408, 425, 429
    or 5xx; the pauses double, from half a second to half a minute."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest wait for a connection and for the next bytes, in seconds. A download of less than 16 KiB a second over
    that time counts as stalled."""
    total_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """Longest time for one file, or a range of a shard, in seconds: all tries and pauses, and waiting for space and for
    another process that downloads it. For shards, keep it well below `data.timeout_s` and `run.step_timeout_s`, which
    would otherwise end the run before the failure is reported; raise all three for shards that take longer."""


class RemoteConfig(TransferConfig):
    """Download and caching of shards at URLs. No option changes which samples are read."""

    cache_gib: Annotated[float, Field(gt=0, le=1e6)] = 100.0
    """Largest size in GiB of the downloaded chunks of all runs on this machine, in `chunks` of the cache folder. The
    least recently used are removed first. What is packed once, in `packed`, does not count: Parquet, compressed tars,
    and tars of servers that send whole files only."""

    @property
    def cache_bytes(self) -> int:
        """`cache_gib` in bytes."""
        return int(self.cache_gib * 2**30)


class Deadline:
    """Time limit of everything that one shard waits for.

    Args:
        total_s: seconds from now.
    """

    def __init__(self, total_s: float):
        self.total_s = total_s
        self._start = time.monotonic()

    @property
    def spent(self) -> float:
        """Elapsed seconds."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Remaining seconds; at most 0 once the time is over."""
        return self.total_s - self.spent


class FetchError(Exception):
    """Failure of one try.

    Args:
        message: what happened, without credentials.
        again: whether another try may succeed.
        after_s: pause that the server asks for, in seconds.
        status: of the server's answer; None without one.
    """

    def __init__(self, message: str, again: bool, after_s: float = 0.0, status: int | None = None):
        super().__init__(message)
        self.again, self.after_s, self.status = again, after_s, status


def retry(
    action: Callable[[Deadline], T],
    url: str,
    options: TransferConfig,
    deadline: Deadline | None = None,
    done: str = "fetched",
    section: str = "remote",
) -> T:
    """Call `action` until it does not raise `FetchError`, and return its result.

    Args:
        action: one try; it must keep the deadline itself.
        url: for messages.
        options: number of tries.
        deadline: ends the pauses too; default ``options.total_s`` from now.
        done: what is done to the URL, for messages.
        section: key of the options in a configuration, for messages.

    Raises:
        StorageError: the last failure; names URL, tries, time and the options that limit them. Its `kind` is "gone" if
            another try would not help, such as after 404, otherwise "storage".
    """
    deadline = deadline or Deadline(options.total_s)
    for number in range(1, options.tries + 1):
        try:
            return action(deadline)
        except FetchError as failure:
            last = failure
        share = int.from_bytes(os.urandom(4), "big") / 2**32  # so that processes do not retry together
        pause = min(_FIRST_PAUSE_S * 2.0 ** (number - 1), _LONGEST_PAUSE_S) * (1 - share / 2)
        pause = max(pause, min(last.after_s, _LONGEST_ASKED_S))
        if not last.again or number == options.tries or pause >= deadline.left:
            break
        logger.warning(
            "%s: try %d of %d failed (%s); again in %.1f s", display_url(url), number, options.tries, last, pause
        )
        _sleep(pause)
    why = "" if last.again else "; this is not tried again"
    raise StorageError(
        f"{display_url(url)}: cannot be {done}: {last}{why}. Tries: {number} of {section}.tries={options.tries}, "
        f"in {deadline.spent:.1f} s of {section}.total_s={deadline.total_s:g}",
        "storage" if last.again else "gone",
    )
