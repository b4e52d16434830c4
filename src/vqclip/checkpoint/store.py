"""Saving and loading one checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from vqclip.checkpoint.folders import remove_old, step_of, verify, write_folder
from vqclip.checkpoint.optimizer import OptimizerState, read_optimizer, restore_optimizer, write_optimizer
from vqclip.checkpoint.plain import check_plain
from vqclip.errors import CheckpointError

_MODEL = "model"
_STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint opened for reading."""

    path: Path
    """Its folder."""
    step: int
    """Number of optimizer steps done when it was saved."""
    state: dict[str, Any]
    """The caller's state, as given to ``save`` (tuples have become lists)."""

    @property
    def model_folder(self) -> Path:
        """The folder that ``write_model`` filled."""
        return self.path / _MODEL

    def restore_optimizer(self, optimizer: Optimizer) -> None:
        """Put the saved state into ``optimizer``; see `vqclip.checkpoint.restore_optimizer`.

        Raises:
            CheckpointError: The state does not fit; the message names the checkpoint and says what differs.
        """
        try:
            restore_optimizer(optimizer, read_optimizer(self.path))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error


def save(
    folder: Path,
    step: int,
    *,
    write_model: Callable[[Path], object],
    optimizer: OptimizerState,
    state: Mapping[str, Any],
    keep_last: int,
    keep: Callable[[int], bool] = lambda step: False,
) -> Path:
    """Save a checkpoint of ``step``, then remove old ones.

    Returns when the checkpoint is on the disk, not merely in the page cache. A process that dies at any moment
    leaves either the new checkpoint whole or none of it, and never harms an older one.

    Args:
        folder: Where the checkpoints of one run lie; made if it is missing. One process at a time may write to it.
        step: Number of optimizer steps done.
        write_model: Called with an empty folder to write the model into, e.g. ``model.save_pretrained``.
        optimizer: What `pack_optimizer` made.
        state: Anything JSON can hold exactly: data position, fingerprints, gradient scaler, configuration.
        keep_last: How many checkpoints up to this one stay, at least 1.
        keep: By step, which of those before them stay too.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: It could not be written (disk full, ...); older checkpoints are untouched.
    """
    assert step >= 0, step
    assert keep_last >= 1, keep_last
    check_plain(dict(state), "state")

    def fill(aside: Path) -> None:
        (aside / _MODEL).mkdir()
        write_model(aside / _MODEL)
        write_optimizer(optimizer, aside)
        text = json.dumps({"step": step, "state": dict(state)}, indent=1, allow_nan=False) + "\n"
        (aside / _STATE).write_text(text, encoding="utf-8")

    path = write_folder(Path(folder), step, fill)
    remove_old(Path(folder), path, keep_last, keep)
    return path


def load(path: Path, *, check: bool = True) -> Checkpoint:
    """Open the checkpoint ``path``.

    Args:
        path: A folder ``step-...``, from ``latest`` or named by the user.
        check: Compare every byte with the manifest first; False for a path that ``latest`` has just verified.

    Raises:
        CheckpointError: Missing, incomplete or damaged; the message names the file.
    """
    path = Path(path)
    if check:
        verify(path)
    try:
        content = json.loads((path / _STATE).read_text(encoding="utf-8"))
        step, state = content["step"], content["state"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _STATE}: cannot be read ({error})") from error
    if step != step_of(path):
        raise CheckpointError(f"{path / _STATE}: of step {step}: the folder was renamed")
    return Checkpoint(path, step, state)
