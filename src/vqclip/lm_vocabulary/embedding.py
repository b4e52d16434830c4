"""Rows for new ids in an embedding table."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vqclip.errors import ShapeError

MAX_ROWS = 2**22
"""Largest number of rows: at a width of 1,024 they would take 16 GiB in float32."""

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@torch.no_grad()
def mean_rows(table: Tensor, count: int, seed: int, spread: float = 0.1) -> Tensor:
    """Draw rows around the mean of the existing ones, so that no new id is more likely than learned ones.

    Args:
        table: ``(V, H)`` embeddings.
        count: number of rows.
        seed: seed of the draws.
        spread: deviation of a row from the mean, as a fraction of the table's own.

    Returns:
        ``(count, H)`` in the dtype and on the device of ``table``.

    Raises:
        ShapeError: more than `MAX_ROWS`, or ``table`` is not a matrix.
    """
    require_rows(count)
    mean, deviation = _moments(table)
    noise = torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (mean + spread * deviation * noise).to(table)


@torch.no_grad()
def projected_rows(table: Tensor, codebook: Tensor, seed: int) -> Tensor:
    """Project a codebook randomly to rows, which nearly keeps the distances between codes (Johnson–Lindenstrauss).

    The codebook is centred, scaled to unit size, projected, and given the table's mean and deviation.

    Args:
        table: ``(V, H)`` embeddings.
        codebook: ``(K, d)``, one row a code.
        seed: seed of the projection.

    Returns:
        ``(K, H)`` in the dtype and on the device of ``table``.

    Raises:
        ShapeError: ``codebook`` is not a matrix.
    """
    if codebook.ndim != 2:
        raise ShapeError(f"codebook: got shape {tuple(codebook.shape)}, expected (K, d): one row a code")
    mean, deviation = _moments(table)
    codes = codebook.detach().cpu().double()
    codes = codes - codes.mean(dim=0)
    size = codes.square().sum(dim=1).mean().sqrt().clamp(min=1e-12)
    draws = torch.Generator().manual_seed(seed)
    projection = torch.randn(codes.shape[1], table.shape[1], generator=draws, dtype=torch.float64)
    return (mean + deviation * (codes / size) @ projection).to(table)


def require_rows(count: int) -> None:
    """Check the number of rows of a table before they are made; raise ShapeError if it is too large."""
    if not 0 <= count <= MAX_ROWS:
        raise ShapeError(
            f"rows: got {count} in all, expected at most {MAX_ROWS}; a Product of smaller codebooks needs fewer ids "
            "for the same number of bits"
        )


def _moments(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean ``(H,)`` of the rows and their RMS deviation ``()``, in float64 on the CPU."""
    if table.ndim != 2 or not len(table):
        raise ShapeError(f"table: got shape {tuple(table.shape)}, expected (V, H) with at least one row")
    rows = table.detach().cpu().double()
    mean = rows.mean(dim=0)
    return mean, (rows - mean).square().mean().sqrt()


@torch.no_grad()
def resize(module: ModuleT, start: int, rows: Tensor) -> ModuleT:
    """Resize an embedding table: rows before ``start`` stay, bit for bit, and ``rows`` follow.

    Args:
        module: an ``nn.Embedding``, or a language model with ``resize_token_embeddings``, ``get_input_embeddings`` and
            ``get_output_embeddings``, as in Hugging Face. The new rows of an output layer with a weight of its own get
            the same values.
        start: the first new id, such as `Vocabulary.offset`; at most the current number of rows.
        rows: ``(count, H)``, such as `Vocabulary.rows`.

    Returns:
        A new ``nn.Embedding`` of the same settings, or the model itself, changed.

    Raises:
        ShapeError: rows of another width, too many of them, a ``start`` that leaves a gap or would cut off rows after
            the new ones, or a module that is neither.
    """
    is_model = hasattr(module, "resize_token_embeddings")
    if not is_model and not isinstance(module, nn.Embedding):
        raise ShapeError(
            f"resize: got a {type(module).__name__}, expected an nn.Embedding or a model with resize_token_embeddings"
        )
    model: Any = module
    table = model.get_input_embeddings().weight if is_model else model.weight
    if rows.ndim != 2 or rows.shape[1] != table.shape[1]:
        raise ShapeError(f"rows: got shape {tuple(rows.shape)}, expected (count, {table.shape[1]}) like the table")
    if not 0 <= start <= len(table):
        raise ShapeError(f"start: got {start} in a table of {len(table)} rows, expected 0 to {len(table)}")
    end = start + len(rows)
    require_rows(end)
    if end < len(table):
        raise ShapeError(
            f"start: got {start} for {len(rows)} rows in a table of {len(table)}, expected at least "
            f"{len(table) - len(rows)}: the last {len(table) - end} rows would be lost"
        )
    if not is_model:
        grown = copy.deepcopy(model)
        grown.num_embeddings = end
        weight = torch.cat([table[:start], rows.to(table)])
        grown.weight = nn.Parameter(weight, requires_grad=table.requires_grad)
        return grown
    # Without the model's own initial values if possible: ours replace them anyway.
    takes_it = "mean_resizing" in signature(model.resize_token_embeddings).parameters
    model.resize_token_embeddings(end, **({"mean_resizing": False} if takes_it else {}))
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is not None:  # a tied output is written twice
            layer.weight[start:end] = rows.to(layer.weight)
    return module
