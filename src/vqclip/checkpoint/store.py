"""Saving and loading one checkpoint; copies in host memory to save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from vqclip.checkpoint.folders import remove_old, step_of, verify, write_folder
from vqclip.checkpoint.optimizer import LAYOUT_FILE
from vqclip.errors import CheckpointError
from vqclip.io.json_files import Strict, read_plain, write_plain
from vqclip.io.tensors import open_tensors, read_shapes

MODEL = "model"
"""Folder of the model in a checkpoint."""
_STATE = "state.json"
STATE_FILE = "state.safetensors"
"""File of the tensors of the caller's state in a checkpoint."""


class _Content(Strict):
    step: int
    state: dict[str, JsonValue]


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint opened for reading."""

    path: Path
    """Folder of the checkpoint."""
    step: int
    """Number of optimizer steps done when it was saved."""
    state: dict[str, Any]
    """The caller's state, as given to ``save``, with tuples as lists."""

    @property
    def model_folder(self) -> Path:
        """Folder that ``write_model`` has written."""
        return self.path / MODEL

    def tensors(self, most: int, prefix: str = "") -> dict[str, Tensor]:
        """Read the tensors of the caller's state, if it has any.

        Args:
            most: maximum number of elements of all of them together; checked before memory is allocated.
            prefix: beginning of the names of those to return.

        Raises:
            CheckpointError: the file is damaged or contains more.
        """
        path = self.path / STATE_FILE
        if not path.exists():
            return {}
        with open_tensors(path) as file:
            shapes = {name: shape for name, shape in read_shapes(file).items() if name.startswith(prefix)}
            total = sum(math.prod(shape) for shape in shapes.values())
            if total > most:
                raise CheckpointError(f"{path}: contains {total} numbers; expected at most {most} for this model")
            return {name: file.get_tensor(name) for name in shapes}


def save(
    folder: Path,
    step: int,
    *,
    write_tensors: Callable[[Path], object],
    write_model: Callable[[Path], object],
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
    keep_last: int,
    keep: Callable[[int], bool] = lambda step: False,
) -> Path:
    """Save a checkpoint of ``step``, then remove old ones.

    Returns when the checkpoint is on the disk, not only in the page cache. A process that dies at any moment leaves
    either the complete new checkpoint or nothing of it, and all older ones intact.

    Args:
        folder: of the checkpoints of one run; made if necessary. One process at a time may write to it.
        step: optimizer steps done.
        write_tensors: called with the unfinished checkpoint's folder (`unfinished_path`), to write the files of all
            tensors: `OPTIMIZER_FILE`, those of the model, and `STATE_FILE` if the state has any.
        write_model: called next with the folder of the model in it, to write its other files.
        optimizer: result of `optimizer_layout`.
        state: JSON values, such as data position, fingerprints, gradient scaler, configuration.
        keep_last: number of checkpoints to keep, this one included; at least 1.
        keep: whether to keep an older checkpoint, by its step.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it could not be written (disk full, ...); older checkpoints are untouched.
    """
    assert step >= 0, step
    assert keep_last >= 1, keep_last

    def fill(aside: Path) -> None:
        (aside / MODEL).mkdir()
        write_tensors(aside)
        write_model(aside / MODEL)
        write_plain(aside / LAYOUT_FILE, dict(optimizer))
        write_plain(aside / _STATE, {"step": step, "state": dict(state)})

    path = write_folder(Path(folder), step, fill)
    remove_old(Path(folder), path, keep_last, keep)
    return path


def load(path: Path) -> Checkpoint:
    """Open the checkpoint ``path``, after comparing every byte with its manifest.

    Args:
        path: a folder ``step-...``.

    Raises:
        CheckpointError: missing, incomplete or damaged; the message names the file.
    """
    path = Path(path)
    verify(path)
    content = read_plain(path / _STATE, _Content)
    if content.step != step_of(path):
        raise CheckpointError(f"{path / _STATE}: of step {content.step}: the folder was renamed")
    return Checkpoint(path, content.step, dict(content.state))


class Staging:
    """Staging buffers in host memory, reused by the next copy because new memory costs more than the copy.

    The idea is that of torch's asynchronous distributed checkpoints.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return contiguous copies on the CPU, bit for bit; the next call overwrites them.

        Waits for the device, once.

        Args:
            tensors: by name; may be made one after the other.
        """
        held: dict[str, Tensor] = {}
        for name, tensor in tensors:
            held[name] = self._buffer(name, tensor)
            held[name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._held = held
        return dict(held)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        held = self._held.get(name)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            return held
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
