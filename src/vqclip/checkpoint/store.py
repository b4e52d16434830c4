"""Saving and loading one checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from torch import Tensor
from torch.optim import Optimizer

from vqclip.checkpoint.folders import remove_old, step_of, verify, write_folder
from vqclip.checkpoint.optimizer import (
    OptimizerState,
    checked_rates,
    read_optimizer,
    restore_optimizer,
    write_optimizer,
)
from vqclip.errors import CheckpointError
from vqclip.io.json_files import Strict, read_plain, write_plain
from vqclip.io.tensors import open_tensors, read_shapes, save_tensors

_MODEL = "model"
_STATE = "state.json"
MODEL_FILE = f"{_MODEL}/model.safetensors"
"""File of the model's tensors in a checkpoint."""
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
        return self.path / _MODEL

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

    def restore_optimizer(self, optimizer: Optimizer) -> OptimizerState:
        """Load the saved state into ``optimizer`` and return it; see `vqclip.checkpoint.restore_optimizer`.

        Raises:
            CheckpointError: the state does not fit; the message has the checkpoint and the differences.
        """
        state = self.optimizer_for(optimizer)
        restore_optimizer(optimizer, state)
        return state

    def optimizer_for(self, optimizer: Optimizer) -> OptimizerState:
        """Return the saved state of ``optimizer``, mapped from its file and compared with it.

        Raises:
            CheckpointError: as for `restore_optimizer`.
        """
        state = read_optimizer(self.path, optimizer)
        try:
            checked_rates(optimizer, state)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        return state


def save(
    folder: Path,
    step: int,
    *,
    write_model: Callable[[Path], object],
    optimizer: OptimizerState,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    write_tensors: Callable[[Path], object] | None = None,
    keep_last: int,
    keep: Callable[[int], bool] = lambda step: False,
) -> Path:
    """Save a checkpoint of ``step``, then remove old ones.

    Returns when the checkpoint is on the disk, not only in the page cache. A process that dies at any moment leaves
    either the complete new checkpoint or nothing of it, and all older ones intact.

    Args:
        folder: of the checkpoints of one run; made if necessary. One process at a time may write to it.
        step: optimizer steps done.
        write_model: called with an empty folder for the model, e.g. ``model.save_pretrained``.
        optimizer: result of `pack_optimizer`.
        state: JSON values, such as data position, fingerprints, gradient scaler, configuration.
        tensors: of the state, contiguous and on the CPU.
        write_tensors: called first with the unfinished checkpoint's folder (`unfinished_path`), to write the files of
            all tensors: `MODEL_FILE`, `OPTIMIZER_FILE` and, if the state has any, `STATE_FILE`. ``write_model`` then
            writes none, and ``optimizer`` and ``tensors`` have none.
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
        (aside / _MODEL).mkdir()
        if write_tensors is not None:
            write_tensors(aside)
        write_model(aside / _MODEL)
        write_optimizer(optimizer, aside, has_tensors=write_tensors is None)
        write_plain(aside / _STATE, {"step": step, "state": dict(state)})
        if tensors:
            save_tensors(dict(tensors), aside / STATE_FILE)

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
