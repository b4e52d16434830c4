"""Retry with growing pauses, within a number of tries and a deadline."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from vqclip.data.remote.config import TransferConfig
from vqclip.data.remote.deadline import Deadline
from vqclip.data.remote.urls import display_url
from vqclip.errors import StorageError

__all__ = ["FetchError", "retry"]

T = TypeVar("T")

logger = logging.getLogger("vqclip.data")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_ASKED_S = 0.5, 30.0, 120.0
_sleep = time.sleep
"""Replaced by tests."""


class FetchError(Exception):
    """FetchError of one try.

    Args:
        message: what happened, without credentials.
        again: whether another try may succeed.
        after_s: pause that the server asks for, in seconds.
    """

    def __init__(self, message: str, again: bool, after_s: float = 0.0):
        super().__init__(message)
        self.again, self.after_s = again, after_s


def retry(
    action: Callable[[], T],
    url: str,
    options: TransferConfig,
    deadline: Deadline,
    done: str = "fetched",
    section: str = "remote",
) -> T:
    """Call `action` until it does not raise `FetchError`, and return its result.

    Args:
        action: one try; it must keep the deadline itself.
        url: for messages.
        options: number of tries.
        deadline: ends the pauses too.
        done: what is done to the URL, for messages.
        section: key of the options in a configuration, for messages.

    Raises:
        StorageError: the last failure; names URL, tries, time and the options that limit them. Its `kind` is "gone" if
            another try would not help, such as after 404, otherwise "storage".
    """
    for number in range(1, options.tries + 1):
        try:
            return action()
        except FetchError as failure:
            last = failure
        pause = max(_pause(url, number), min(last.after_s, _LONGEST_ASKED_S))
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


def _pause(url: str, number: int) -> float:
    """Return the pause after a failed try in seconds: doubled every time, less a part keyed by (URL, try, process).

    So processes that failed together do not retry together. No random generator is used.
    """
    key = f"{url}\n{number}\n{socket.gethostname()}\n{os.getpid()}".encode("utf-8", "surrogateescape")
    part = int.from_bytes(hashlib.sha256(key).digest()[:4], "big") / 2**32
    return min(_FIRST_PAUSE_S * 2.0 ** (number - 1), _LONGEST_PAUSE_S) * (1 - part / 2)
