"""The C library's heap, for training on CPUs."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""mallopt's numbers of the two (malloc.h)."""


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees, for the next step.

    It hands every large block back to the system when it is freed, and asks for it again, page by page and zeroed: a
    tenth of a step's time on a CPU. Where the environment sets these (``MALLOC_*_THRESHOLD_``, ``GLIBC_TUNABLES``), and
    without glibc, nothing is done.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    mallopt = ctypes.CDLL(None).mallopt
    # Before glibc 2.35 blocks above 32 MiB could not be kept. A trim threshold alone would make matters worse: with it,
    # the other one no longer adapts.
    if mallopt(_MMAP_THRESHOLD, 2**31 - 1) or mallopt(_MMAP_THRESHOLD, 2**25):
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
