"""Settings of the C library's malloc, for training on CPUs."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of mallopt (malloc.h)."""


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step.

    By default it returns every large block to the system and requests it again, page by page and zeroed: a tenth of a
    step's time on a CPU. Does nothing without glibc, or if the environment sets ``MALLOC_*_THRESHOLD_`` or
    ``GLIBC_TUNABLES``.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    mallopt = ctypes.CDLL(None).mallopt
    # Before glibc 2.35 blocks above 32 MiB could not be kept. A trim threshold alone is slower: it stops the other
    # threshold from adapting.
    if mallopt(_MMAP_THRESHOLD, 2**31 - 1) or mallopt(_MMAP_THRESHOLD, 2**25):
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
