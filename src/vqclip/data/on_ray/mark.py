"""Tell whether the machines of a job see one folder."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from vqclip.errors import ConfigError
from vqclip.io.atomic import TEMPORARY
from vqclip.io.file_locks import try_lock

__all__ = ["ShareMark"]

_VISIBLE_S = 90.0
"""Longest wait for a file of another machine: a network file system may hide new files for a minute."""


class ShareMark:
    """A temporary file by which workers know the driver's folder from another one of the same path; picklable.

    Args:
        folder: the folder, which is made.
        option: option that names it, for messages.

    Raises:
        ConfigError: it cannot be made or written to.
    """

    def __init__(self, folder: Path, option: str):
        self._folder, self._option = folder, option
        self._path = folder / f"{TEMPORARY}ray-{uuid.uuid4().hex}"

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the file within the block, locked like a file that is being written, so that nobody removes it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = open(self._path, "xb")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"{self._option}: {self._folder}: cannot be written to ({error.strerror}); expected a folder that all "
                "machines share"
            ) from None
        with file:
            with contextlib.suppress(OSError):  # the file system has no locks
                try_lock(file.fileno())
            try:
                yield
            finally:
                self._path.unlink(missing_ok=True)

    def require(self) -> None:
        """Wait until this process sees the file; raise ConfigError if it does not appear."""
        end = time.monotonic() + _VISIBLE_S
        while not self._path.exists():
            if time.monotonic() >= end or not self._folder.exists():
                raise ConfigError(
                    f"{self._option}: machine {os.uname().nodename} does not see the folder {self._folder} of the "
                    "machine that runs the command; expected a folder that all machines share, under the same path"
                )
            time.sleep(1)
