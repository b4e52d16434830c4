"""Stack dumps of a hanging process and its child processes, written by `faulthandler` to a file."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
from pathlib import Path

_SIGNAL = signal.SIGUSR2
_ANSWER_S = 0.1
"""Seconds for one child to write, so that two do not write at once."""

_descriptor = 2
"""File descriptor that newly forked children write to: stderr, or the open file."""


class StackFile:
    """File for stack dumps of this process and of the children forked while it is open.

    Its methods need no lock of the interpreter and wait for nothing but the file.

    Args:
        path: the file; its folder is made if necessary.
    """

    def __init__(self, path: Path):
        global _descriptor
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._has_timer = False
        _descriptor = self._file

    def write(self, text: str) -> None:
        """Append text."""
        os.write(self._file, text.encode(errors="backslashreplace"))

    def dump(self) -> None:
        """Append the stacks of all threads of this process, then those of its children."""
        faulthandler.dump_traceback(self._file, all_threads=True)
        for child in multiprocessing.active_children():
            self.write(f"\nchild process {child.pid} ({child.name}):\n")
            with contextlib.suppress(OSError, TypeError):  # it has ended
                os.kill(child.pid, _SIGNAL)  # type: ignore[arg-type]
            time.sleep(_ANSWER_S)

    def dump_and_exit_after(self, seconds: float) -> None:
        """Append the stacks and end the process with status 1, unless called again within ``seconds``.

        A thread in C does this; it needs no lock that the hanging code may hold.
        """
        self._has_timer = True
        faulthandler.dump_traceback_later(max(seconds, 1e-3), exit=True, file=self._file)

    def close(self) -> None:
        """Cancel `dump_and_exit_after`; remove the file and the folder if they are empty."""
        global _descriptor
        if self._has_timer:  # there is one timer in a process; another one is not ours
            faulthandler.cancel_dump_traceback_later()
        _descriptor = 2
        os.close(self._file)
        with contextlib.suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()
            self.path.parent.rmdir()


def dump_stacks_on_request() -> None:
    """Let this child process write its stacks when `StackFile.dump` of the parent requests them.

    A child that was spawned instead of forked writes them to stderr.
    """
    faulthandler.register(_SIGNAL, file=_descriptor, all_threads=True)
