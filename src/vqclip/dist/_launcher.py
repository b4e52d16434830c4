"""torchrun, which started this process: what to do when it dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import vqclip


def signal_at_parent_death(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies; on Linux only."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, number, 0, 0, 0)


def stop_with_launcher() -> None:
    """Under torchrun: get SIGTERM when torchrun dies, whatever kills it; nobody else would end this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_at_parent_death(signal.SIGTERM)
        if launcher_has_died():  # before the line above
            os.kill(os.getpid(), signal.SIGTERM)


def launcher_has_died() -> bool:
    """Whether torchrun started this process and has died."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != vqclip._PARENT_PID
