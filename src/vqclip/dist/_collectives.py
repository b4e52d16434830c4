"""Collectives on tensors. The docstring of the package states how their gradients are scaled.

The autograd functions below use the public `all_gather_into_tensor`, `reduce_scatter_tensor` and `all_reduce`.
`torch.distributed.nn.functional` has similar functions, but from torch 2.15 on it is deprecated and cannot be compiled.
A test compares the gradients with it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import Tensor

from vqclip.dist._state import Group, control_device, is_distributed, rank, run_collective, world_size
from vqclip.errors import DistributedError, ShapeError
from vqclip.nn.precision import first_derivative_only


def all_gather(x: Tensor, sizes: Sequence[int] | None = None, group: Group = None) -> Tensor:
    """Concatenate every rank's `x` along the first dimension, in rank order, keeping the gradient.

    Args:
        x: `(B_r, ...)`, any dtype; B_r may differ between ranks and be zero, everything else must be equal.
        sizes: All B_r in rank order, if the caller knows them. This skips `gather_sizes`, with its checks, and lets
            `torch.compile` keep one graph.
        group: The ranks that take part; all of them by default.

    Returns:
        `(ΣB_r, ...)`, the same on every rank. Backward returns the sum over ranks of the gradients of this rank's rows;
        it is a collective, so every rank must run it.

    Raises:
        ShapeError: `x` is a scalar, or `sizes` do not fit.
        DistributedError: The ranks' dtypes or shapes do not fit together, or only some of them need gradients (the
            others would never enter the backward).
    """
    if x.ndim == 0:
        raise ShapeError("all_gather: got a scalar, expected at least one dimension; pass x[None]")
    if not is_distributed(group):
        return x
    sizes = gather_sizes(x, group) if sizes is None else sizes
    if len(sizes) != world_size(group) or sizes[rank(group)] != x.shape[0]:
        raise ShapeError(
            f"all_gather: sizes {list(sizes)} do not fit rank {rank(group)} of {world_size(group)}, which has "
            f"{x.shape[0]} rows; pass every rank's number of rows, in rank order"
        )
    if sum(sizes) * math.prod(x.shape[1:]) == 0:
        return x.new_empty(sum(sizes), *x.shape[1:])
    if x.dtype == torch.bool:  # gloo does not support it
        return all_gather(x.to(torch.uint8), sizes, group).to(torch.bool)
    longest = max(sizes)
    padding = x.new_zeros(longest - x.shape[0], *x.shape[1:])
    gathered = _Gather.apply(torch.cat([x, padding]) if len(padding) else x, group)
    if min(sizes) == longest:
        return gathered
    return torch.cat([rows[:size] for rows, size in zip(gathered.split(longest), sizes, strict=True)])


def gather_sizes(x: Tensor, group: Group = None, note: str = "") -> list[int]:
    """Return every rank's number of rows B_r in rank order, after checking that `all_gather(x)` is possible.

    Args:
        x: `(B_r, ...)`.
        group: The ranks that take part; all of them by default.
        note: A further property that must be equal on all ranks, as text for the message.

    Raises:
        DistributedError: The ranks differ in dtype, in the shape of a row, in the note, or in whether they need
            gradients.
    """
    if not is_distributed(group):
        return [x.shape[0]]
    row = f"{tuple(x.shape[1:])} of {x.dtype}{note}"
    wants_grad = torch.is_grad_enabled() and x.requires_grad
    mine = torch.tensor([x.shape[0], zlib.crc32(row.encode()), wants_grad], device=control_device(group))
    gathered = mine.new_empty(world_size(group) * len(mine))
    run_collective("all_gather (sizes)", c10d.all_gather_into_tensor, gathered, mine, group=group)
    sizes, rows, wants = (list(column) for column in zip(*gathered.view(-1, len(mine)).tolist(), strict=True))
    if len(set(rows)) > 1:
        others = [r for r, other in enumerate(rows) if other != rows[rank(group)]]
        raise DistributedError(
            f"all_gather: rank {rank(group)} has rows {row}, ranks {others} have different rows; "
            "dtype and all dimensions but the first must be equal"
        )
    if len(set(wants)) > 1:
        with_grad = [r for r, want in enumerate(wants) if want]
        raise DistributedError(
            f"all_gather: only ranks {with_grad} of {len(wants)} need gradients, so the backward would never finish; "
            "run all ranks with gradients (an empty batch too) or all under torch.no_grad()"
        )
    return sizes


def all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """Sum `x` over ranks into a new tensor, keeping the gradient; `x` itself stays as it is.

    Args:
        x: Any shape, equal on every rank.
        group: The ranks that take part; all of them by default.

    Returns:
        Like `x`, the same on every rank. Backward sums the gradients over ranks; it is a collective, so every rank must
        run it.
    """
    return _AllReduce.apply(x, group) if is_distributed(group) else x


def replicated_sum(x: Tensor, group: Group = None) -> Tensor:
    """Sum `x` over ranks into a new tensor from which every rank computes the same loss.

    The incoming gradients are then equal on all ranks and their sum is W times one of them, so backward needs no
    collective.

    Args:
        x: Any shape, equal on every rank.
        group: The ranks that take part; all of them by default.

    Returns:
        Like `x`, the same on every rank.
    """
    return _ReplicatedSum.apply(x, group) if is_distributed(group) else x


def global_mean(total: Tensor, count: Tensor | float, group: Group = None) -> Tensor:
    """Return Σ total ÷ Σ count over ranks, in one reduction, for a loss that all ranks compute (`replicated_sum`).

    The mean of per-rank means would be wrong when ranks have different counts.

    Args:
        total: This rank's sum, any shape, floating point; may carry a gradient.
        count: This rank's number of terms (or sum of weights), a scalar or of `total`'s shape; zero on an empty rank.
        group: The ranks that take part; all of them by default.

    Returns:
        Shape and dtype of `total`, the same on every rank; 0 where the global count is 0. Summed in fp64, in which
        every count is exact.
    """
    share = torch.as_tensor(count, device=total.device).to(torch.float64)
    flat = torch.cat([total.to(torch.float64).reshape(-1), share.reshape(-1)])
    totals, counts = replicated_sum(flat, group).split([total.numel(), share.numel()])
    counts = counts.view(share.shape)
    mean = totals.view(total.shape) / counts.masked_fill(counts == 0, 1.0)
    return mean.masked_fill(counts == 0, 0.0).to(total.dtype)


def reduce_(x: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """Reduce statistics over ranks in place.

    Args:
        x: Any shape, equal on every rank; must not require a gradient.
        op: "sum", "max" or "min".
        group: The ranks that take part; all of them by default.

    Returns:
        `x`, the same on every rank.

    Raises:
        DistributedError: `x` requires a gradient, which an in-place reduction would silently drop.
    """
    if x.requires_grad:
        raise DistributedError(
            "reduce_: got a tensor that requires a gradient, expected one without; use replicated_sum if every rank "
            "computes the same loss from the sum, all_reduce if not, or pass x.detach()"
        )
    ops = {"sum": c10d.ReduceOp.SUM, "max": c10d.ReduceOp.MAX, "min": c10d.ReduceOp.MIN}
    if op not in ops:
        raise DistributedError(f"reduce_: got op {op!r}, expected one of {', '.join(ops)}")
    if is_distributed(group) and x.numel():
        dense = x.contiguous()
        run_collective("reduce_", c10d.all_reduce, dense, op=ops[op], group=group)
        if dense is not x:
            x.copy_(dense)
    return x


def reduce_scatter(x: Tensor, sizes: Sequence[int], group: Group = None) -> Tensor:
    """Sum `x` over ranks and return this rank's rows of the sum: the inverse of `all_gather`. Carries no gradient.

    Args:
        x: `(ΣB_r, ...)`, equal in shape on every rank; half precision is summed in fp32.
        sizes: All B_r in rank order.
        group: The ranks that take part; all of them by default.

    Returns:
        `(B_r, ...)`.

    Raises:
        ShapeError: `sizes` do not fit.
    """
    if len(sizes) != world_size(group) or sum(sizes) != x.shape[0]:
        raise ShapeError(
            f"reduce_scatter: sizes {list(sizes)} do not fit {world_size(group)} ranks and {x.shape[0]} rows; pass "
            "every rank's number of rows, in rank order"
        )
    if not is_distributed(group) or x.numel() == 0:
        return x[: sizes[rank(group)]]
    longest, wide = max(sizes), x.detach().to(_sum_dtype(x))
    if min(sizes) < longest:
        rows = wide.unsqueeze(-1).flatten(1).split(list(sizes))
        parts = [F.pad(part, (0, 0, 0, longest - len(part))) for part in rows]
        wide = torch.cat(parts).view(-1, *x.shape[1:])
    mine = wide.new_empty(longest, *x.shape[1:])
    run_collective("reduce_scatter", c10d.reduce_scatter_tensor, mine, wide.contiguous(), group=group)
    return mine[: sizes[rank(group)]].to(x.dtype)


def ring_shift(x: Tensor, rows: int, group: Group = None) -> Tensor:
    """Send `x` to the next rank and receive the previous rank's `x`; the last rank sends to rank 0.

    A rank with nothing to send or receive takes no part. NCCL does not allow that in the first collective of a group:
    call another one before.

    Args:
        x: `(B_r, ...)`, any dtype; B_r may differ between ranks and be zero. Carries no gradient.
        rows: B of the previous rank.
        group: The ranks that take part; all of them by default.

    Returns:
        `(rows, ...)`; `x` itself in one process.

    Raises:
        ShapeError: With one process, when `rows` is not the number of rows of `x`.
    """
    if not is_distributed(group):
        if rows != x.shape[0]:
            raise ShapeError(f"ring_shift: got {x.shape[0]} rows in one process, expected {rows}")
        return x
    here, ranks = rank(group), world_size(group)
    x, out = x.detach().contiguous(), x.new_empty(rows, *x.shape[1:])
    transfers = []
    if x.numel():
        transfers.append(c10d.P2POp(c10d.isend, x, _global_rank((here + 1) % ranks, group), group))
    if out.numel():
        transfers.append(c10d.P2POp(c10d.irecv, out, _global_rank((here - 1) % ranks, group), group))
    run_collective("ring_shift", _transfer, transfers)
    return out


def broadcast_(x: Tensor, src: int = 0, group: Group = None) -> Tensor:
    """Copy rank `src`'s values to every rank, in place.

    Args:
        x: Any shape and dtype, equal on every rank; overwritten on the other ranks. Carries no gradient.
        src: Rank within `group`.
        group: The ranks that take part; all of them by default.

    Returns:
        `x`, the same on every rank.

    Raises:
        DistributedError: `src` is not a rank of the group.
    """
    if not 0 <= src < world_size(group):
        raise DistributedError(f"broadcast_: src is {src}, expected a rank from 0 to {world_size(group) - 1}")
    if is_distributed(group) and x.numel():
        dense = x.detach().contiguous()
        # As bytes, since gloo does not support every dtype.
        run_collective(
            "broadcast_", c10d.broadcast, dense.reshape(-1).view(torch.uint8), _global_rank(src, group), group=group
        )
        if dense.data_ptr() != x.data_ptr():
            x.detach().copy_(dense)
    return x


def _transfer(transfers: list[c10d.P2POp]) -> None:
    for work in c10d.batch_isend_irecv(transfers) if transfers else ():
        work.wait()


def _global_rank(within: int, group: Group) -> int:
    return within if group is None else c10d.get_global_rank(group, within)


def _sum_over_ranks(x: Tensor, name: str, group: Group) -> Tensor:
    """Return the sum over ranks in a new tensor; half precision is summed in fp32."""
    total = x.to(_sum_dtype(x), copy=True, memory_format=torch.contiguous_format)
    if total.numel():
        run_collective(name, c10d.all_reduce, total, group=group)
    return total.to(x.dtype)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


class _Gather(torch.autograd.Function):
    """All-gather of equal sizes; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        out = x.new_empty(world_size(group) * x.shape[0], *x.shape[1:])
        run_collective("all_gather", c10d.all_gather_into_tensor, out, x.contiguous(), group=group)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        full = grad.to(_sum_dtype(grad)).contiguous()
        mine = full.new_empty(full.shape[0] // world_size(ctx.group), *full.shape[1:])
        run_collective("all_gather (backward)", c10d.reduce_scatter_tensor, mine, full, group=ctx.group)
        return mine.to(grad.dtype), None


class _AllReduce(torch.autograd.Function):
    """Sum over ranks; backward sums the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sum_over_ranks(x, "all_reduce", group)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(grad, "all_reduce (backward)", ctx.group), None


class _ReplicatedSum(torch.autograd.Function):
    """Sum over ranks; backward multiplies the gradient, equal on all ranks, by W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.world_size = world_size(group)
        return _sum_over_ranks(x, "replicated_sum", group)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.world_size, None
