"""Checkpoints of any optimizer, without a run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from vqclip import checkpoint
from vqclip.checkpoint.optimizer import optimizer_tensors, read_optimizer, restore_optimizer
from vqclip.io import parts
from vqclip.io.parts import Part


def save_checkpoint(
    folder: Path,
    step: int,
    optimizer: Optimizer,
    write_model: Callable[[Path], object] = lambda folder: None,
    state: Mapping[str, Any] | None = None,
    keep_last: int = 1,
) -> Path:
    """Save the state of an optimizer as it is now, with what ``write_model`` writes."""
    tensors = {name: each.detach().cpu().contiguous() for name, each in optimizer_tensors(optimizer).items()}
    whole = {name: Part(tuple(each.shape), each.dtype, each) for name, each in tensors.items()}

    def fill(aside: Path) -> None:
        parts.create(aside / checkpoint.OPTIMIZER_FILE, whole)
        parts.write(aside / checkpoint.OPTIMIZER_FILE, whole)
        write_model(aside / checkpoint.MODEL)

    return checkpoint.save(folder, step, fill, state or {}, keep_last)


def restore(path: Path, optimizer: Optimizer) -> None:
    """Verify a checkpoint, and load its state into an optimizer."""
    tensors = read_optimizer(checkpoint.load(path).path, optimizer)
    restore_optimizer(optimizer, tensors.items())
