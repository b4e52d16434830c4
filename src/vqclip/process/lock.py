"""Lock of a run folder, so that one job at a time writes to it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.io.atomic import ProcessLock

LOCK_FILE = "run.lock"
LOCK_FILES = (f".{LOCK_FILE}", LOCK_FILE)
"""Two files: a job that loses one to an ``rm`` still holds the folder. First the one that an ``rm *`` leaves."""


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
        self._folder, self._locks = folder, [ProcessLock(folder / name) for name in LOCK_FILES]

    def acquire(self) -> None:
        """Lock the folder, making it if necessary, or check that it is still locked. A collective.

        Raises:
            ConfigError: another job holds the lock; on every rank.
        """

        def acquire() -> str | None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                told = f"run.folder: cannot make the run's folder {self._folder}: {error.strerror}"
                raise OSError(told) from error
            return next((holder for lock in self._locks if (holder := lock.try_acquire())), None)

        holder = dist.run_on_main(acquire)
        if holder is not None:
            raise ConfigError(
                f"run.name: {self._folder} is in use by another job ({holder}); wait for its end, stop it, or give "
                "this run another name"
            )

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for lock in self._locks:
            with contextlib.suppress(OSError):  # a full disk, which was reported when the line was written
                lock.release()
