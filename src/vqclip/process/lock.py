"""Lock of a run folder, so that one job at a time writes to it."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import TracebackType
from typing import TextIO

from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.io.file_locks import is_at, open_lock, take_lock
from vqclip.io.files import name_file_in_errors

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
LOCK_FILES = (LOCK_FILE, f".{LOCK_FILE}")
"""Two files: a job that loses one to an ``rm`` still holds the folder."""


class RunLock:
    """Rank 0's lock on a run folder, held until the context or the process ends, even by SIGKILL.

        with RunLock(folder) as lock:
            ...
            lock.acquire()
            ...

    The files stay in the folder; an unlocked one means nothing. Another `acquire` restores a deleted one.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._held: dict[str, TextIO] = {}

    def acquire(self) -> None:
        """Lock the folder, making it if necessary, or check that it is still locked. A collective.

        Raises:
            ConfigError: another job holds the lock; on every rank.
        """

        def acquire() -> str | None:
            self._folder.mkdir(parents=True, exist_ok=True)
            return next((holder for name in LOCK_FILES if (holder := self._acquire(self._folder / name))), None)

        holder = dist.run_on_main(acquire)
        if holder is not None:
            raise ConfigError(
                f"run.name: {self._folder} is in use by another job ({holder}); wait for its end, stop it, or give "
                "this run another name"
            )

    def _acquire(self, path: Path) -> str | None:
        """Lock one file; return its holder if that is another job."""
        held = self._held.get(path.name)
        if held is not None:
            if is_at(held.fileno(), path):
                return None
            logger.warning("%s was deleted or replaced while this job held it", path)
            held.close()
        self._held[path.name] = file = open_lock(path)
        with name_file_in_errors(path):
            return take_lock(file, self._folder)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._held:
            with contextlib.suppress(OSError):  # a full disk, which was reported when the line was written
                self._held.popitem()[1].close()
