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
    tenth of a step's time on a CPU. What the environment says (``MALLOC_*_THRESHOLD_``) stands; without glibc nothing
    is done.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for variable, option in (("MALLOC_TRIM_THRESHOLD_", _TRIM_THRESHOLD), ("MALLOC_MMAP_THRESHOLD_", _MMAP_THRESHOLD)):
        if variable not in os.environ:
            mallopt(option, 2**31 - 1)
