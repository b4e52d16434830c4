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
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vqclip.model import CLIP, CLIPOutput
from vqclip.quantizers import Stats
from vqclip.tokenizer import TokenizerOutput


def joined(model: CLIP, parts: Sequence[CLIPOutput]) -> CLIPOutput:
    """The outputs of all micro-batches as those of one batch, each tensor a leaf that collects its gradient.

    Args:
        model: gives the temperature, which so enters the loss once.
        parts: of the first pass; at least one.
    """
    image, text = _joined([part.image for part in parts]), _joined([part.text for part in parts])
    return CLIPOutput(image, text, *model.temperature())


def hand_on(out: CLIPOutput, whole: CLIPOutput, rows: slice) -> None:
    """Backward from the outputs of one micro-batch, as the loss's backward would have reached them.

    Args:
        out: of the second pass.
        whole: what `joined` gave, after the loss's backward.
        rows: of the micro-batch in it.
    """
    outputs, gradients = [], []
    for mine, all_rows in ((out.image, whole.image), (out.text, whole.text)):
        assert all_rows.embedding.grad is not None
        outputs.append(mine.embedding)
        gradients.append(all_rows.embedding.grad[rows])
        for name, total in mine.stats.items():
            if total.requires_grad:
                found = all_rows.stats[name].grad
                outputs.append(total)
                gradients.append(torch.zeros_like(total) if found is None else found)
    for number in (out.scale, out.bias):  # they have theirs; DDP wants to see all weights in every backward
        if number is not None:
            outputs.append(number)
            gradients.append(torch.zeros_like(number))
    torch.autograd.backward(outputs, gradients)


def drift(out: CLIPOutput, whole: CLIPOutput, rows: slice) -> float:
    """Mean distance of this rank's embeddings, which have length 1, between the two passes; 0 without rows."""
    pairs = ((out.image.embedding, whole.image.embedding[rows]), (out.text.embedding, whole.text.embedding[rows]))
    distances = torch.cat([(again.detach() - first.detach()).norm(dim=1) for again, first in pairs])
    return float(distances.mean()) if len(distances) else 0.0


@torch.no_grad()
def drifting_module(model: nn.Module, forward: Callable[[], object], tolerance: float) -> str | None:
    """The first module of ``model``, in the order in which they finish, whose outputs differ between two forwards.

    Args:
        model: its modules are looked at.
        forward: runs the model, from the same state of torch's generators every time.
        tolerance: relative difference of an output's norm that counts as rounding.
    """
    first, second = _norms(model, forward), _norms(model, forward)
    for (name, before), (other, after) in itertools.zip_longest(first, second, fillvalue=("", 0.0)):
        if name != other or abs(after - before) > tolerance * abs(before):
            return name or other
    return None


def _joined(parts: Sequence[TokenizerOutput]) -> TokenizerOutput:
    embedding = torch.cat([part.embedding.detach() for part in parts]).requires_grad_()
    stats = parts[0].stats
    for part in parts[1:]:
        stats = stats + part.stats
    return TokenizerOutput(embedding, torch.cat([part.ids for part in parts]), _leaves(stats))


def _leaves(stats: Stats) -> Stats:
    sums = {name: total.detach().clone() for name, total in stats.sums.items()}
    for total in sums.values():
        total.requires_grad_(total.is_floating_point())
    return dataclasses.replace(stats, sums=sums)


def _norms(model: nn.Module, forward: Callable[[], object]) -> list[tuple[str, float]]:
    """Name and norm of whatever tensor each module gives, in the order in which they finish."""
    found: list[tuple[str, float]] = []

    def hook(name: str) -> Callable[[nn.Module, object, object], None]:
        def note(module: nn.Module, inputs: object, output: object) -> None:
            for leaf in output if isinstance(output, tuple) else (output,):
                if isinstance(leaf, Tensor):
                    found.append((name, float(leaf.double().norm())))

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found
