"""A run folder that one job at a time may write to."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import TextIO

from vqclip import dist
from vqclip.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"


class RunLock:
    """Rank 0's lock on a run folder, held until the context ends or the process does, however it does.

        with RunLock(folder) as lock:
            ...
            lock.take()
            ...

    The file stays behind; what it says counts only while it is locked.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: TextIO | None = None

    def take(self) -> None:
        """Lock the folder, making it if need be. A collective: every rank calls it.

        Raises:
            ConfigError: another job holds the lock; on every rank.
        """
        holder = dist.broadcast_json(self._take() if dist.is_main() else None)
        if holder is not None:
            raise ConfigError(
                f"run.name: {self._folder} is in use by another job ({holder}); wait for its end or stop it, or give "
                "this run another name"
            )

    def _take(self) -> str | None:
        """None, or who holds the lock."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            # Not flock, which the data workers would inherit and hold beyond the death of this process.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._file.seek(0)
                return self._file.read(200).strip() or "which has not said who it is"
            logger.warning("%s cannot be locked (%s): see to it that one job uses it", self._folder, error.strerror)
            return None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
        return None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
