"""Room for new ids in a table of embeddings, and where their rows begin."""

from __future__ import annotations

from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vqclip.errors import ShapeError

MAX_ROWS = 2**22
"""More rows are refused: at a width of 1,024 they would take 16 GiB in float32."""

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@torch.no_grad()
def mean_rows(table: Tensor, count: int, seed: int, spread: float = 0.1) -> Tensor:
    """Rows around the mean of those that there are, so that nothing new is more likely than what was learned.

    Args:
        table: ``(V, H)`` embeddings.
        count: rows to make.
        seed: key of the draws.
        spread: deviation of a row from the mean, as a share of the table's own.

    Returns:
        ``(count, H)`` in the type of ``table`` and where it is.

    Raises:
        ShapeError: more than `MAX_ROWS`, or ``table`` is no matrix.
    """
    require_rows(count)
    mean, deviation = _moments(table)
    noise = torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (mean + spread * deviation * noise).to(table)


@torch.no_grad()
def projected_rows(table: Tensor, codebook: Tensor, seed: int) -> Tensor:
    """Rows from a codebook by a random projection, which keeps the distances between codes (Johnson–Lindenstrauss).

    The codebook is centred, brought to unit size, projected, and given the table's mean and deviation.

    Args:
        table: ``(V, H)`` embeddings.
        codebook: ``(K, d)``, one row a code.
        seed: key of the projection.

    Returns:
        ``(K, H)`` in the type of ``table`` and where it is.

    Raises:
        ShapeError: ``codebook`` is no matrix.
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
    """Raises ShapeError for more rows than a table may have, before any is made."""
    if not 0 <= count <= MAX_ROWS:
        raise ShapeError(
            f"rows: got {count} in all, expected at most {MAX_ROWS}; a Product of smaller codebooks needs fewer ids "
            "for as many bits"
        )


def _moments(table: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of the rows, ``(H,)``, and the root mean square of what is left, ``()``; in float64 on the CPU."""
    if table.ndim != 2 or not len(table):
        raise ShapeError(f"table: got shape {tuple(table.shape)}, expected (V, H) with at least one row")
    rows = table.detach().cpu().double()
    mean = rows.mean(dim=0)
    return mean, (rows - mean).square().mean().sqrt()


def resize(module: ModuleT, start: int, rows: Tensor) -> ModuleT:
    """Make room for new ids: what stands before ``start`` stays, bit for bit, then come ``rows``.

    Args:
        module: an ``nn.Embedding``, or a language model with ``resize_token_embeddings``, ``get_input_embeddings`` and
            ``get_output_embeddings`` as those of Hugging Face have them. The rows of an output layer that has a weight
            of its own get the same first values.
        start: the first new id, such as `Vocabulary.offset`; at most the number of rows that there are.
        rows: ``(count, H)``, such as `Vocabulary.rows`.

    Returns:
        A new ``nn.Embedding`` of the same settings, or the model itself, changed.

    Raises:
        ShapeError: rows of another width, too many of them, a ``start`` that leaves a gap or would cut rows off behind
            the new ones, or a module that is neither.
    """
    is_model = hasattr(module, "resize_token_embeddings")
    if not is_model and not isinstance(module, nn.Embedding):
        raise ShapeError(
            f"resize: got a {type(module).__name__}, expected an nn.Embedding or a model with resize_token_embeddings"
        )
    model: Any = module
    _require_fit(model.get_input_embeddings().weight if is_model else model.weight, start, rows)
    if not is_model:
        return _grown(model, start, rows)
    _resize_tokens(model, start + len(rows))
    _write(model.get_input_embeddings().weight, start, rows)
    output = model.get_output_embeddings()
    if output is not None and output.weight is not model.get_input_embeddings().weight:
        _write(output.weight, start, rows)
    return module


def _resize_tokens(model: Any, count: int) -> None:
    """Without first values from the model's own draws where it offers to leave them out: ours are written anyway."""
    if "mean_resizing" in signature(model.resize_token_embeddings).parameters:
        model.resize_token_embeddings(count, mean_resizing=False)
    else:
        model.resize_token_embeddings(count)


def _require_fit(table: Tensor, start: int, rows: Tensor) -> None:
    if rows.ndim != 2 or rows.shape[1] != table.shape[1]:
        raise ShapeError(f"rows: got shape {tuple(rows.shape)}, expected (count, {table.shape[1]}) as the table has it")
    if not 0 <= start <= len(table):
        raise ShapeError(f"start: got {start} in a table of {len(table)} rows, expected 0 to {len(table)}")
    require_rows(start + len(rows))
    if start + len(rows) < len(table):
        raise ShapeError(
            f"start: got {start} for {len(rows)} rows in a table of {len(table)}, expected at least "
            f"{len(table) - len(rows)}: the last {len(table) - start - len(rows)} rows would be lost"
        )


@torch.no_grad()
def _grown(table: nn.Embedding, start: int, rows: Tensor) -> Any:
    """A copy of the table's first rows with others behind them."""
    weight = torch.cat([table.weight[:start], rows.to(table.weight)])
    grown = nn.Embedding(
        len(weight),
        table.embedding_dim,
        table.padding_idx,
        table.max_norm,
        table.norm_type,
        table.scale_grad_by_freq,
        table.sparse,
        _weight=weight,
    )
    grown.weight.requires_grad_(table.weight.requires_grad)
    return grown.train(table.training)


@torch.no_grad()
def _write(table: Tensor, start: int, rows: Tensor) -> None:
    table[start : start + len(rows)] = rows.to(table)
