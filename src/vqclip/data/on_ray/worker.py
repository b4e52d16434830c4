"""The part of a job that runs in the workers of Ray. Imports no torch; jobs import what they need."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from vqclip import errors
from vqclip.data.remote import mask_credentials
from vqclip.errors import VqclipError

__all__ = ["RayJob", "Starts", "Surroundings", "Worker", "first_line", "read_reply"]

logger = logging.getLogger(__name__)

_STARTS = 4
"""Times that an item is started before it fails: its workers died."""


class RayJob(Protocol):
    """A picklable description of the work on an item."""

    def open(self) -> Callable[[int], dict[str, Any]]:
        """Prepare a worker, once, such as by loading a model; return the function item → JSON-able result."""
        ...


class Surroundings:
    """Working folder and cache folder of the driver, for workers that have the same folders."""

    def __init__(self) -> None:
        self._folder, self._cache = os.getcwd(), os.environ.get("VQCLIP_CACHE")

    def enter(self) -> None:
        """Make them those of this process; a working folder that this machine lacks is left out.

        On Linux the process then ends with Ray on its machine: Ray's own end of a worker can hang, with its GPU memory.
        """
        if sys.platform == "linux":
            set_death_signal = 1
            ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError):
            os.chdir(self._folder)
        if self._cache is not None:
            os.environ["VQCLIP_CACHE"] = self._cache


class Starts:
    """Counter of the starts of each item, in a process of its own."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, item: int) -> int:
        """Count a start, and return the number of starts."""
        self._counts[item] += 1
        return self._counts[item]


class Worker:
    """A worker of the pool; errors are replies, since Ray would wrap them in its tracebacks."""

    def __init__(self, job: RayJob, starts: Any, what: str, surroundings: Surroundings):
        self._job, self._starts, self._what, self._surroundings = job, starts, what, surroundings
        self._work: Callable[[int], dict[str, Any]] | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Return item and reply for the batch of one item."""
        item = int(batch["item"][0])
        return {"item": [item], "reply": [json.dumps(self._reply(item))]}

    def _reply(self, item: int) -> dict[str, Any]:
        if importlib.import_module("ray").get(self._starts.add.remote(item)) > _STARTS:
            return _failure(
                f"{self._what} {item}: the worker that made it died {_STARTS} times; was it killed for memory? Fewer "
                "workers on a machine (more --ray-cpus each) or a smaller --batch-size need less"
            )
        try:
            if self._work is None:  # here: Ray starts a worker again without end if its constructor fails
                self._surroundings.enter()
                self._work = self._job.open()
            return {"result": self._work(item)}
        except VqclipError as error:
            return _failure(str(error), type(error).__name__, getattr(error, "kind", None))
        except OSError as error:
            return _failure(f"{os.fsdecode(error.filename or '')}: {error.strerror or error}".removeprefix(": "))
        except Exception as error:
            return _failure(f"{type(error).__name__}: {first_line(error)}") | {"details": traceback.format_exc()}


def _failure(message: str, error: str = "VqclipError", kind: str | None = None) -> dict[str, Any]:
    return {"failure": message, "error": error, "kind": kind}


def read_reply(text: str) -> dict[str, Any]:
    """Return the result in a reply, or raise the error in it as the class that it was."""
    reply: dict[str, Any] = json.loads(text)
    if "failure" not in reply:
        result: dict[str, Any] = reply["result"]
        return result
    if "details" in reply:
        logger.error("%s", mask_credentials(reply["details"].rstrip()))
    found = getattr(errors, reply["error"], VqclipError)
    raise found(reply["failure"], reply["kind"]) if reply["kind"] else found(reply["failure"])


def first_line(error: BaseException) -> str:
    """Return the first line of a message; of Ray's errors, which begin with a traceback, that of the cause."""
    cause = getattr(error, "cause", None)
    text = str(cause or error).strip() or type(error).__name__
    return mask_credentials(text.splitlines()[0][:400])
