"""Collectives on tensors. The docstring of the package states how their gradients are scaled."""

from __future__ import annotations

import math
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import Tensor

from vqclip.dist._state import control_device, is_distributed, rank, run_collective, world_size
from vqclip.dist._torch_versions import ALL_GATHER, HAS_NN_ALL_GATHER, REDUCE_SCATTER, eager_in_old_versions
from vqclip.errors import DistributedError, ShapeError
from vqclip.nn.precision import first_derivative_only

# torch 2.12 to 2.14 announce at our call that they will withdraw the function, which users cannot change.
warnings.filterwarnings("ignore", category=FutureWarning, module=re.escape(__name__) + "$")


@eager_in_old_versions
def all_gather(x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate every rank's `x` along the first dimension, in rank order, keeping the gradient.

    Args:
        x: `(B_r, ...)`, any dtype; B_r may differ between ranks and be zero, everything else must be equal.
        sizes: All B_r in rank order, if the caller knows them. This skips `gather_sizes`, with its checks, and lets
            `torch.compile` keep one graph (from torch 2.12 on; before it runs eagerly).

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
    if not is_distributed():
        return x
    sizes = gather_sizes(x) if sizes is None else sizes
    if len(sizes) != world_size() or sizes[rank()] != x.shape[0]:
        raise ShapeError(
            f"all_gather: sizes {list(sizes)} do not fit rank {rank()} of {world_size()}, which has "
            f"{x.shape[0]} rows; pass every rank's number of rows, in rank order"
        )
    if sum(sizes) * math.prod(x.shape[1:]) == 0:
        return x.new_empty(sum(sizes), *x.shape[1:])
    if x.dtype == torch.bool:  # gloo does not support it
        return all_gather(x.to(torch.uint8), sizes).to(torch.bool)
    longest = max(sizes)
    padding = x.new_zeros(longest - x.shape[0], *x.shape[1:])
    gathered = _gather_equal_sizes(torch.cat([x, padding]) if len(padding) else x)
    if min(sizes) == longest:
        return gathered
    return torch.cat([rows[:size] for rows, size in zip(gathered.split(longest), sizes, strict=True)])


def gather_sizes(x: Tensor, note: str = "") -> list[int]:
    """Return every rank's number of rows B_r in rank order, after checking that `all_gather(x)` is possible.

    Args:
        x: `(B_r, ...)`.
        note: A further property that must be equal on all ranks, as text for the message.

    Raises:
        DistributedError: The ranks differ in dtype, in the shape of a row, in the note, or in whether they need
            gradients.
    """
    if not is_distributed():
        return [x.shape[0]]
    row = f"{tuple(x.shape[1:])} of {x.dtype}{note}"
    wants_grad = torch.is_grad_enabled() and x.requires_grad
    mine = torch.tensor([x.shape[0], zlib.crc32(row.encode()), wants_grad], device=control_device())
    gathered = mine.new_empty(world_size() * len(mine))
    run_collective("all_gather (sizes)", getattr(c10d, ALL_GATHER), gathered, mine)
    sizes, rows, wants = (list(column) for column in zip(*gathered.view(-1, len(mine)).tolist(), strict=True))
    if len(set(rows)) > 1:
        others = [r for r, other in enumerate(rows) if other != rows[rank()]]
        raise DistributedError(
            f"all_gather: rank {rank()} has rows {row}, ranks {others} have different rows; "
            "dtype and all dimensions but the first must be equal"
        )
    if len(set(wants)) > 1:
        with_grad = [r for r, want in enumerate(wants) if want]
        raise DistributedError(
            f"all_gather: only ranks {with_grad} of {len(wants)} need gradients, so the backward would never finish; "
            "run all ranks with gradients (an empty batch too) or all under torch.no_grad()"
        )
    return sizes


@eager_in_old_versions
def replicated_sum(x: Tensor) -> Tensor:
    """Sum `x` over ranks into a new tensor from which every rank computes the same loss.

    The incoming gradients are then equal on all ranks and their sum is W times one of them, so backward needs no
    collective.

    Args:
        x: Any shape, equal on every rank.

    Returns:
        Like `x`, the same on every rank.
    """
    return _ReplicatedSum.apply(x) if is_distributed() else x


def reduce_(x: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Reduce statistics over ranks in place.

    Args:
        x: Any shape, equal on every rank; must not require a gradient.
        op: What to take over the ranks.

    Returns:
        `x`, the same on every rank.

    Raises:
        DistributedError: `x` requires a gradient, which an in-place reduction would silently drop.
    """
    if x.requires_grad:
        raise DistributedError(
            "reduce_: got a tensor that requires a gradient, expected one without; use replicated_sum if every rank "
            "computes the same loss from the sum, or pass x.detach()"
        )
    if is_distributed() and x.numel():
        dense = x.contiguous()
        run_collective("reduce_", c10d.all_reduce, dense, op=getattr(c10d.ReduceOp, op.upper()))
        if dense is not x:
            x.copy_(dense)
    return x


def reduce_scatter(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum `x` over ranks and return this rank's rows of the sum: the inverse of `all_gather`. Carries no gradient.

    Args:
        x: `(ΣB_r, ...)`, equal in shape on every rank; half precision is summed in fp32.
        sizes: All B_r in rank order.

    Returns:
        `(B_r, ...)`.

    Raises:
        ShapeError: `sizes` do not fit.
    """
    if len(sizes) != world_size() or sum(sizes) != x.shape[0]:
        raise ShapeError(
            f"reduce_scatter: sizes {list(sizes)} do not fit {world_size()} ranks and {x.shape[0]} rows; pass "
            "every rank's number of rows, in rank order"
        )
    if not is_distributed() or x.numel() == 0:
        return x[: sizes[rank()]]
    longest, wide = max(sizes), x.detach().to(_sum_dtype(x))
    if min(sizes) < longest:
        rows = wide.unsqueeze(-1).flatten(1).split(list(sizes))
        parts = [F.pad(part, (0, 0, 0, longest - len(part))) for part in rows]
        wide = torch.cat(parts).view(-1, *x.shape[1:])
    mine = wide.new_empty(longest, *x.shape[1:])
    run_collective("reduce_scatter", getattr(c10d, REDUCE_SCATTER), mine, wide.contiguous())
    return mine[: sizes[rank()]].to(x.dtype)


def start_ring_shift(tensors: Sequence[Tensor], rows: int) -> Callable[[], list[Tensor]]:
    """Begin to send tensors to the next rank, the last one to rank 0, and to receive those of the previous rank.

    A rank with nothing to send or receive takes no part. NCCL does not allow that in the first collective of a job:
    call another one before.

    Args:
        tensors: `(B_r, ...)` each, any dtype; B_r may differ between ranks and be zero. They carry no gradient, and
            must not change before the end.
        rows: B of the previous rank.

    Returns:
        A function that waits for the end and returns `(rows, ...)` each; the tensors themselves in one process. Other
        shifts may begin and end in between.
    """
    if not is_distributed():
        return lambda: list(tensors)
    here, ranks = rank(), world_size()
    sent = [x.detach().contiguous() for x in tensors]
    received = [x.new_empty(rows, *x.shape[1:]) for x in sent]
    transfers = [c10d.P2POp(c10d.isend, x, (here + 1) % ranks) for x in sent if x.numel()]
    transfers += [c10d.P2POp(c10d.irecv, x, (here - 1) % ranks) for x in received if x.numel()]
    started: list[c10d.Work] = []
    run_collective("ring_shift", lambda: started.extend(c10d.batch_isend_irecv(transfers) if transfers else ()))

    def wait(*_: Tensor) -> None:
        for work in started:
            work.wait()

    def end() -> list[Tensor]:
        run_collective("ring_shift", wait, *received)
        return received

    return end


def broadcast_(x: Tensor) -> Tensor:
    """Copy rank 0's values to every rank, in place.

    Args:
        x: Any shape and dtype, equal on every rank; overwritten on the other ranks. Carries no gradient.

    Returns:
        `x`, the same on every rank.
    """
    if is_distributed() and x.numel():
        dense = x.detach().contiguous()
        # As bytes, since gloo does not support every dtype.
        run_collective("broadcast_", c10d.broadcast, dense.reshape(-1).view(torch.uint8), 0)
        if not x.is_contiguous():
            x.detach().copy_(dense)
    return x


def _sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is summed over ranks: fp32 for half precision."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _gather_equal_sizes(x: Tensor) -> Tensor:
    """Return every rank's `x` in rank order, `(W · B, ...)`, keeping the gradient.

    With gradients it goes through `torch.distributed.nn.functional.all_gather` before torch 2.15; through `_Gather`
    from then on, in compiled code, for half precision, whose gradients `_Gather` sums in fp32, and for tensors on the
    CPU in a job on GPUs, for which the other one has no backward. Every rank must come to the same choice.
    """
    if (
        torch.compiler.is_compiling()
        or not HAS_NN_ALL_GATHER
        or not (torch.is_grad_enabled() and x.requires_grad)
        or _sum_dtype(x) != x.dtype
        or (x.device.type == "cpu" and "nccl" in c10d.get_backend_config())
    ):
        return _Gather.apply(x)
    import torch.distributed.nn.functional as functional  # an import that warns from torch 2.15 on

    found: list[Tensor] = []
    run_collective("all_gather", lambda x: found.extend(functional.all_gather(x, group=c10d.group.WORLD)), x)
    return torch.cat(found)


class _Gather(torch.autograd.Function):
    """All-gather of equal sizes; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(world_size() * x.shape[0], *x.shape[1:])
        run_collective("all_gather", getattr(c10d, ALL_GATHER), out, x.contiguous())
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        full = grad.to(_sum_dtype(grad)).contiguous()
        mine = full.new_empty(full.shape[0] // world_size(), *full.shape[1:])
        run_collective("all_gather (backward)", getattr(c10d, REDUCE_SCATTER), mine, full)
        return mine.to(grad.dtype)


class _ReplicatedSum(torch.autograd.Function):
    """Sum over ranks; backward multiplies the gradient, equal on all ranks, by W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.world_size = world_size()
        total = x.to(_sum_dtype(x), copy=True, memory_format=torch.contiguous_format)
        if total.numel():
            run_collective("replicated_sum", c10d.all_reduce, total)
        return total.to(x.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.world_size
