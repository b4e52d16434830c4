"""Detection that torchrun, which started this process, has died."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import vqclip


def signal_at_parent_death(number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent dies. Linux only."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, number, 0, 0, 0)


def stop_with_launcher() -> None:
    """Under torchrun: request SIGTERM for the death of torchrun, after which nothing else would end this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_at_parent_death(signal.SIGTERM)
        if launcher_has_died():  # it died before the line above
            os.kill(os.getpid(), signal.SIGTERM)


def launcher_has_died() -> bool:
    """Return True if torchrun started this process and has died."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != vqclip._PARENT_PID
