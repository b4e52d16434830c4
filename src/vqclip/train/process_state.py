"""Process-wide state around a run: one run at a time, and torch's random state as the caller had it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from vqclip.errors import ConfigError

__all__ = ["exclusive_run", "preserve_torch_state"]

_lock = threading.Lock()
_folder: Path | None = None
"""Folder of the run in progress."""


@contextlib.contextmanager
def exclusive_run(folder: Path) -> Iterator[None]:
    """Refuse a second run in this process while the block runs: both would draw from torch's global generator.

    Raises:
        ConfigError: a run is in progress, in another thread or around this one.
    """
    global _folder
    if not _lock.acquire(blocking=False):
        raise ConfigError(
            f"run.name: {folder} cannot train while this process trains {_folder}; wait for its end, or start another "
            "process: runs share torch's random generator, the log and the process group"
        )
    try:
        _folder = folder
        yield
    finally:
        _lock.release()


@contextlib.contextmanager
def preserve_torch_state(device: torch.device) -> Iterator[None]:
    """Check that torch has its own defaults, without which a run would have other bits; restore the random state.

    Args:
        device: of the run; the random state of other GPUs is not used.

    Raises:
        ConfigError: the caller has changed a default.
    """
    found = {
        "torch.get_default_dtype()": (torch.get_default_dtype(), torch.float32),
        "torch.get_default_device()": (torch.get_default_device(), torch.device("cpu")),
        "torch.is_grad_enabled()": (torch.is_grad_enabled(), True),
        f"torch.is_autocast_enabled({device.type!r})": (torch.is_autocast_enabled(device.type), False),
    }
    if wrong := [f"{name}: got {got}, expected {want}" for name, (got, want) in found.items() if got != want]:
        raise ConfigError(f"{'; '.join(wrong)}: a run needs torch's own defaults; call it outside of such a block")
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        yield
