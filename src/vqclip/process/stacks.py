"""Python stacks of a process that hangs, and of its helpers, written by `faulthandler` into a file."""

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
"""What a helper gets for its answer, so that two do not write at once."""

_descriptor = 2
"""Where helpers forked from now on write: stderr, or the file that is open."""


class StackFile:
    """Appends to one file; helpers forked while it is open answer into it too.

    Nothing here waits for the interpreter's lock once it is set up, or for anything but the file.

    Args:
        path: the file; its folder is made if it is missing.
    """

    def __init__(self, path: Path):
        global _descriptor
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        _descriptor = self._file

    def write(self, text: str) -> None:
        """Append text."""
        os.write(self._file, text.encode(errors="backslashreplace"))

    def dump(self) -> None:
        """Append the stacks of all threads of this process, then those of its helpers."""
        faulthandler.dump_traceback(self._file, all_threads=True)
        for helper in multiprocessing.active_children():
            self.write(f"\nhelper process {helper.pid} ({helper.name}):\n")
            with contextlib.suppress(OSError, TypeError):  # it has ended
                os.kill(helper.pid, _SIGNAL)  # type: ignore[arg-type]
            time.sleep(_ANSWER_S)

    def dump_and_exit_after(self, seconds: float) -> None:
        """Unless it is called again by then: append the stacks and end the process with status 1.

        A thread in C does it, which needs no lock that the stuck code may hold.
        """
        faulthandler.dump_traceback_later(max(seconds, 1e-3), exit=True, file=self._file)

    def close(self) -> None:
        """Call off what `dump_and_exit_after` said; an empty file goes, and an empty folder."""
        global _descriptor
        faulthandler.cancel_dump_traceback_later()
        _descriptor = 2
        os.close(self._file)
        with contextlib.suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()
            self.path.parent.rmdir()


def dump_stacks_on_request() -> None:
    """In a helper process: write the stacks of all threads whenever `StackFile.dump` of the parent asks for them.

    A helper that was not forked writes them to stderr.
    """
    faulthandler.register(_SIGNAL, file=_descriptor, all_threads=True)
