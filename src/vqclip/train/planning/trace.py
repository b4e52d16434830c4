"""Memory of tensors and exchanges of a training step, followed operator by operator.

Works on real tensors and on those of `FakeTensorMode`. What a kernel allocates for itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from vqclip import dist
from vqclip.train.step import TrainStep

__all__ = ["PARTS", "Trace"]

PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "moving averages",
    "activations",
    "loss",
    "statistics",
    "exchange buffers",
    "batch",
    "other",
)
"""Parts of the memory of a process. Weights include buffers such as codebooks, and those that FSDP has gathered."""

_NAMESPACE = "vqclip"


@dataclass(eq=False)
class _Storage:
    """Memory of one tensor and of its views."""

    part: str
    size: int = 0


class Trace(TorchDispatchMode):
    """Sizes of all tensors that operators make within the block, over time, by part; and exchanges by name.

    Attributes:
        exchanges: name → size of all exchanges of that name since `begin`.
        repeats: how often the exchanges that follow count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: dict[str, dist.Exchanged] = {}
        self.repeats = 1
        self._part, self._start = "other", 0
        self._alive: dict[int, tuple[_Storage, weakref.ref[Any]]] = {}
        self._changes: list[tuple[_Storage, int]] = []
        """Storages that got or lost bytes, in order of time."""
        self._resize, self._depth = torch.UntypedStorage.resize_, 0

    def __enter__(self) -> Self:
        if not self._depth:
            torch.UntypedStorage.resize_ = self._resize_and_follow()  # type: ignore[assignment, method-assign]
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if not self._depth:
            torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _resize_and_follow(self) -> Callable[[Any, int], Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = self._resize(storage, size)
            self._follow(storage, "weights")  # FSDP gathers weights into memory that it has emptied
            return found

        return resize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # a DTensor calls the operator on its own tensor
        if (found := dist.exchange_of(func, args)) is not None:
            name, exchanged = found
            before = self.exchanges.get(name, dist.Exchanged(0, 0, 0))
            self.exchanges[name] = before + exchanged.times(self.repeats)
            self._claim(
                "exchange buffers", (each for each in tree_leaves(args) if isinstance(each, Tensor)), "activations"
            )
        if func.namespace == _NAMESPACE:
            with self:  # to see what the operator does
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._follow(each.untyped_storage(), self._part)
        return out

    # Parts.

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what the block makes as a part."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def claim_since(self, place: int, name: str) -> None:
        """Count activations that exist now, and did not at a former `place`, as a part."""
        alive = {id(storage) for storage, _ in self._alive.values()}
        for storage, _ in self._changes[place:]:
            if storage.part == "activations" and id(storage) in alive:
                storage.part = name

    @property
    def place(self) -> int:
        """Current time."""
        return len(self._changes)

    def watch(self, step: TrainStep[Any]) -> None:
        """Count what a step makes by part from now on; to be called once."""
        for owner, name, part in (
            (step.task, "local", "batch"),
            (step, "_forward", "activations"),
            (step.task, "reduce", "statistics"),
            (step, "_losses", "loss"),
            (step, "_backward", "activations"),
            (step, "_update", "statistics"),
        ):
            setattr(owner, name, self._in_part(getattr(owner, name), part))
        for each in step.model.parameters():
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(self._claim_gradient)

    def _in_part(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return method(*args, **kwargs)

        return call

    def _claim_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._claim("gradients", [dist.local_rows(parameter.grad)])

    def claim_state(self, step: TrainStep[Any]) -> None:
        """Count what stays between steps as its parts."""
        model, optimizer = step.model, step.optimizer
        held = [each for group in optimizer.param_groups for each in group["params"]]
        self._claim("weights", map(dist.local_rows, [*model.parameters(), *model.buffers(), *held]))
        self._claim("gradients", (dist.local_rows(each.grad) for each in held if each.grad is not None))
        self._claim(
            "optimizer", (t for each in optimizer.state.values() for t in each.values() if isinstance(t, Tensor))
        )
        self._claim("moving averages", {} if step.ema is None else step.ema.averages.values())

    def _claim(self, name: str, tensors: Iterable[Tensor], only: str | None = None) -> None:
        for each in tensors:
            found = self._alive.get(id(each.untyped_storage()))
            if found is not None and only in (None, found[0].part):
                found[0].part = name

    # Memory.

    def _follow(self, storage: torch.UntypedStorage, part: str) -> None:
        key = id(storage)
        if key not in self._alive:
            made = _Storage(part)
            self._alive[key] = made, weakref.ref(storage, lambda _: self._release(key))
        found, size = self._alive[key][0], storage.nbytes()
        if size != found.size:
            self._changes.append((found, size - found.size))
            found.size = size

    def _release(self, key: int) -> None:
        found, _ = self._alive.pop(key)
        if found.size:
            self._changes.append((found, -found.size))

    def begin(self) -> None:
        """Forget the exchanges before now, and measure the peak from now on."""
        self._start, self.exchanges = len(self._changes), {}

    def peak(self) -> dict[str, int]:
        """Return the bytes of each of `PARTS` at the time since `begin` in which most memory was in use."""
        total, highest, at = 0, -1, 0
        for number, (_, change) in enumerate(self._changes):
            total += change
            if number >= self._start and total > highest:
                highest, at = total, number
        found = dict.fromkeys(PARTS, 0)
        for storage, change in self._changes[: at + 1]:
            found[storage.part] += change
        return found
