"""Gradient accumulation with all the negatives of the global batch: forward twice, the loss once.

A first pass without gradients keeps what the loss looks at, its *inputs*: the embeddings, and the quantizers'
statistics, which are sums over tokens and so add up over micro-batches. The loss over the whole global batch gives the
gradient of each. A second pass runs every micro-batch again, with gradients, and hands its part of these on to the
weights (GradCache: Gao et al. 2021, https://arxiv.org/abs/2101.06983, there for embeddings alone). The second pass must
repeat the first: random draws are keyed by micro-batch, and quantizers change in `update` only, after both.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vqclip.model import CLIP, CLIPOutput
from vqclip.quantizers import Stats
from vqclip.tokenizer import TokenizerOutput


def joined(model: CLIP, parts: Iterable[CLIPOutput]) -> CLIPOutput:
    """The outputs of all micro-batches as those of one batch, each tensor a leaf that collects its gradient.

    Args:
        model: gives the temperature, which so enters the loss once.
        parts: of the first pass, made one by one; at least one. Their ids are not kept.
    """
    sides = [_Side(), _Side()]
    for part in parts:
        for side, output in zip(sides, (part.image, part.text), strict=True):
            side.add(output)
    image, text = (side.whole() for side in sides)
    return CLIPOutput(image, text, *model.temperature())


class _Side:
    """Gathers the first pass's outputs of one modality."""

    def __init__(self) -> None:
        self._embeddings: list[Tensor] = []
        self._stats: Stats | None = None
        self._no_ids = torch.empty(0, dtype=torch.int64)

    def add(self, output: TokenizerOutput) -> None:
        self._embeddings.append(output.embedding.detach())
        stats = output.stats.detach()
        self._stats = stats if self._stats is None else self._stats + stats
        self._no_ids = output.ids[:0]

    def whole(self) -> TokenizerOutput:
        assert self._stats is not None
        sums = {name: total.clone() for name, total in self._stats.sums.items()}
        for total in sums.values():
            total.requires_grad_(total.is_floating_point())
        embedding = torch.cat(self._embeddings).requires_grad_()
        return TokenizerOutput(embedding, self._no_ids, dataclasses.replace(self._stats, sums=sums))


def backward_from_cached_grads(out: CLIPOutput, whole: CLIPOutput, rows: slice) -> None:
    """Backward from the outputs of one micro-batch, as the loss's backward would have reached them.

    Args:
        out: of the second pass.
        whole: what `joined` gave, after the loss's backward.
        rows: of the micro-batch in it.
    """
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for mine, all_rows in ((out.image, whole.image), (out.text, whole.text)):
        assert all_rows.embedding.grad is not None
        pairs.append((mine.embedding, all_rows.embedding.grad[rows]))
        pairs += [(total, all_rows.stats[name].grad) for name, total in mine.stats.items()]
    # The temperature has its gradient; DDP wants to see all weights in every backward.
    pairs += [(number, None) for number in (out.scale, out.bias) if number is not None]
    learning = [(output, found) for output, found in pairs if output.requires_grad]  # parts of the model may be frozen
    torch.autograd.backward(
        [output for output, _ in learning],
        [torch.zeros_like(output) if found is None else found for output, found in learning],
    )


def drift(out: CLIPOutput, whole: CLIPOutput, rows: slice) -> float:
    """Mean distance of this rank's embeddings, which have length 1, between the two passes; 0 without rows."""
    pairs = ((out.image.embedding, whole.image.embedding[rows]), (out.text.embedding, whole.text.embedding[rows]))
    distances = torch.cat([(again.detach() - first.detach()).norm(dim=1) for again, first in pairs])
    return float(distances.mean()) if len(distances) else 0.0


def drifting_module(model: nn.Module, forward: Callable[[], object], tolerance: float) -> str | None:
    """The first module of ``model``, in the order in which they finish, whose outputs differ between two forwards.

    As in the two passes, the first is without gradients and the second with them.

    Args:
        model: its modules are looked at.
        forward: runs the model, from the same state of torch's generators every time.
        tolerance: difference of an output, relative to its norm, that counts as rounding.
    """
    with torch.no_grad():
        first = _prints(model, forward)
    with torch.enable_grad():
        second = _prints(model, forward)
    for before, after in itertools.zip_longest(first, second, fillvalue=_Print("", 0.0, 0.0)):
        if before.name != after.name or _differ(before, after, tolerance):
            return before.name or after.name
    return None


def _differ(before: _Print, after: _Print, tolerance: float) -> bool:
    if math.isfinite(before.projection) and math.isfinite(after.projection):
        return abs(after.projection - before.projection) > tolerance * before.norm
    return math.isfinite(before.projection) or math.isfinite(after.projection)


class _Print(NamedTuple):
    """What is noted of a module's output: enough to see that another one differs, and by how much."""

    name: str
    projection: float
    """On random signs: two outputs' differ by about the norm of the outputs' difference."""
    norm: float


def _prints(model: nn.Module, forward: Callable[[], object]) -> list[_Print]:
    """A print of every tensor that a module gives, in the order in which modules finish."""
    found: list[_Print] = []

    def hook(name: str) -> Callable[[nn.Module, object, object], None]:
        def note(module: nn.Module, inputs: object, output: object) -> None:
            for leaf in output if isinstance(output, tuple) else (output,):
                if isinstance(leaf, Tensor):
                    wide = leaf.detach().double()
                    found.append(_Print(name, float((wide * _signs(wide)).sum()), float(wide.norm())))

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _signs(like: Tensor) -> Tensor:
    """Random signs, the same for every tensor of that shape, drawn apart from the model's own draws."""
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randint(0, 2, like.shape, generator=generator).to(like) - 1
