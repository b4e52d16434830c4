"""Features of a frozen tower: the same bits for a sample in every batch.

    pad the batch to a multiple of the chunk  ->  run the tower chunk by chunk  ->  remove the padding

Kernels choose their blocking by the shape of their input, and so round differently for other batch sizes. In one shape
each row gets the same bits, wherever it is in the chunk: measured on CPUs for convolutions with batch normalisation, a
ViT and a text transformer. Another number of threads may round differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqclip.nn.device import gpu_memory
from vqclip.towers.image import ImageTower
from vqclip.towers.text import TextTower

__all__ = ["chunk_size", "frozen_features", "run_in_chunks"]

Reduce: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Features of a chunk and its inputs → fewer features."""


def chunk_size(device: torch.device) -> int:
    """Return the number of samples in a chunk: 16 on a CPU, 64 on devices with more parallel units."""
    return 16 if device.type == "cpu" and gpu_memory(device) is None else 64


@torch.no_grad()
def frozen_features(tower: ImageTower | TextTower, inputs: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Run a frozen tower without gradient, in evaluation mode, in chunks of one shape.

    Captions are padded to the whole context.

    Args:
        tower: no parameter of it requires a gradient.
        inputs: ``(B, 3, H, W)`` images or ``(B, T)`` token numbers; B may be 0.
        reduce: of the features ``(chunk, N, D)`` of a chunk, and its padded inputs, to ``(chunk, M, D)``.

    Returns:
        ``(B, N, D)``, for captions ``(B, T, D)``, or ``(B, M, D)``, in the dtype of the tower's weights.
    """
    full, length = inputs, tower.num_tokens
    if isinstance(tower, TextTower):
        full, length = _pad_to_context(tower, inputs), inputs.shape[1]
    dtype = next((parameter.dtype for parameter in tower.parameters()), torch.get_default_dtype())

    def run(rows: Tensor) -> Tensor:
        features = tower(rows).to(dtype)
        return features[:, :length] if reduce is None else reduce(features, rows)

    with _in_evaluation_mode(tower):
        return run_in_chunks(run, full)


def run_in_chunks(run: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return ``run(inputs)``, from chunks of one shape; the last one is filled up with rows of zeros."""
    size, parts = chunk_size(inputs.device), []
    for rows in inputs.split(size):
        padding = rows.new_zeros(size - len(rows), *rows.shape[1:])
        parts.append(run(torch.cat([rows, padding]))[: len(rows)])
    return torch.cat(parts)


def _pad_to_context(tower: TextTower, tokens: Tensor) -> Tensor:
    """Add padding to the rows of ``(B, T)`` tokens up to the context length."""
    missing = tower.context_length - tokens.shape[1]
    if missing <= 0:
        return tokens
    padding = int(tower.vocabulary([""])[0, -1])  # of a row that is nearly empty
    return F.pad(tokens, (0, missing), value=padding)


@contextlib.contextmanager
def _in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set the modules that are in training mode to evaluation mode, within the block."""
    training = [each for each in module.modules() if each.training]
    try:
        for each in training:
            each.training = False
        yield
    finally:
        for each in training:
            each.training = True
