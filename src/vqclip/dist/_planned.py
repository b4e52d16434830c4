"""Ranks that do not exist: one process runs a step as rank 0 of many, without data, to count memory and bytes.

    with planned_ranks(64, machine=8):      # collectives return at once; their results mean nothing
        step(batch)

Tensors must be of `FakeTensorMode`, which have shapes and no memory. `exchange_of` describes a collective for a
`TorchDispatchMode`, in a planned job and in a real one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from vqclip.dist._history import recent_collectives
from vqclip.dist._torch_versions import describe_collectives
from vqclip.errors import ConfigError

_BLOCKS = ("averaging the gradients", "gathering the weights")
"""Names of blocks in which DDP and FSDP communicate."""


class Exchanged(NamedTuple):
    """Size of one collective, or of several of one name."""

    calls: int
    size: int
    """Bytes of the whole tensor: of the sum, of what is gathered, of what is scattered, of what is sent to one rank."""
    sent: int
    """Bytes that a process sends if the ranks form a ring."""

    def __add__(self, other: Exchanged) -> Exchanged:  # type: ignore[override]
        return Exchanged(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: int) -> Exchanged:
        """Return the size of as many such collectives."""
        return Exchanged(*(each * number for each in self))


_OPERATORS = {
    "allreduce_": ("all_reduce", 2),
    "_allgather_base_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 1),
}
"""Name of an operator of c10d → that of the collective, and how often each byte passes a link of the ring."""


def exchange_of(operator: Any, args: Sequence[Any]) -> tuple[str, Exchanged] | None:
    """Return name and size of the collective that an operator of PyTorch starts; None for another operator.

    Collectives of this package have the names of `recent_collectives`. Those of DDP and FSDP are named after
    `train.parallel`: ``all_reduce (ddp)``, ``all_gather (fsdp)``, ``reduce_scatter (fsdp)``, ``all_reduce (hsdp)``.
    """
    if getattr(operator, "namespace", None) != "c10d":
        return None
    kind = operator._schema.name.partition("::")[2]
    if kind == "send":
        size = _bytes_of(args[0])
        return _name(kind, args[1]), Exchanged(1, size, size)
    if kind not in _OPERATORS:
        return None
    name, passes = _OPERATORS[kind]
    group = next(each for each in args if isinstance(each, torch.ScriptObject | c10d.ProcessGroup))
    ranks = _unbox(group).size()
    size = max(_bytes_of(each) for each in args[:2])  # output and input: the larger one is the whole
    return _name(name, group), Exchanged(1, size, size * passes * (ranks - 1) // ranks)


def _name(kind: str, group: Any) -> str:
    found = next((each.name for each in reversed(recent_collectives()) if each.finished is None), kind)
    if found not in _BLOCKS:
        return found
    if kind != "all_reduce":
        return f"{kind} (fsdp)"
    return f"{kind} ({'ddp' if _unbox(group).size() == c10d.get_world_size() else 'hsdp'})"


def _unbox(group: Any) -> c10d.ProcessGroup:
    return group if isinstance(group, c10d.ProcessGroup) else c10d.ProcessGroup.unbox(group)


def _bytes_of(given: Any) -> int:
    if isinstance(given, Tensor):
        return given.numel() * given.element_size()
    return sum(map(_bytes_of, given)) if isinstance(given, list | tuple) else 0


def is_planned() -> bool:
    """Return whether the ranks of the job do not exist."""
    return c10d.is_available() and c10d.group.WORLD is not None and c10d.get_backend() == c10d.Backend.FAKE


@contextmanager
def planned_ranks(world_size: int, machine: int) -> Iterator[None]:
    """Make this process rank 0 of a job without other processes within the block; nothing with one rank.

    Args:
        world_size: number of ranks W.
        machine: ranks of a machine.

    Raises:
        ConfigError: the process is part of a job already.
    """
    if c10d.is_available() and c10d.group.WORLD is not None:
        raise ConfigError("planning: got a process of a running job; expected a process of its own")
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    describe_collectives()
    c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(min(machine, world_size))
    try:
        yield
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before
        c10d.destroy_process_group()


class PlannedDDP(nn.Module):
    """Memory and exchanges of `DistributedDataParallel` with ``gradient_as_bucket_view``, for planned ranks.

    Gradients are copied to flat tensors that always exist, and are views of them. Without synchronisation they are
    tensors of their own. Buckets have the sizes of DDP's own, which are filled in the reverse order of the parameters
    (`_ddp._fix_bucket_layout`).
    """

    def __init__(self, module: nn.Module, bucket_mb: float | None = None):
        super().__init__()
        self.module, self.syncs = module, True
        trained = list[Tensor](each for each in module.parameters() if each.requires_grad)[::-1]
        self._buckets, self._views, self._ready = list[Tensor](), dict[int, Tensor](), 0
        size = int((25 if bucket_mb is None else bucket_mb) * 2**20)
        first = c10d._DEFAULT_FIRST_BUCKET_BYTES if bucket_mb is None else size
        for places in c10d._compute_bucket_assignment_by_size(trained, [first, size])[0]:
            own = [trained[place] for place in places]
            flat = own[0].detach().new_empty(sum(each.numel() for each in own))
            self._buckets.append(flat)
            parts = flat.split([each.numel() for each in own])
            self._views |= {id(each): part.view(each.shape) for each, part in zip(own, parts, strict=True)}
        self._hooks = [each.register_post_accumulate_grad_hook(self._collect) for each in trained]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate in the block."""
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True

    def release(self) -> None:
        """Leave gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _collect(self, parameter: Tensor) -> None:
        if not self.syncs:
            return
        assert parameter.grad is not None
        view = self._views[id(parameter)]
        view.copy_(parameter.grad)
        parameter.grad = view
        self._ready += 1
        if self._ready == len(self._views):
            self._ready = 0
            for bucket in self._buckets:
                c10d.all_reduce(bucket)
