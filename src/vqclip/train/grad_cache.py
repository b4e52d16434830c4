"""Gradient accumulation with all the negatives of the global batch (GradCache).

    cached = [forward(microbatch) without a graph for each microbatch]     first pass
    loss(cached).backward()                   gradients of the embeddings and of the quantizers' statistics
    for each microbatch:                                                   second pass
        out = forward(microbatch)             the same outputs, now with a graph
        out.backward(gradients of the cached rows)

The cached outputs are the embeddings and the quantizers' statistics, which are sums over tokens and so add up over
microbatches. The second pass must repeat the first: random draws are keyed by microbatch, and quantizers change in
`update` only, after both passes. After Gao et al. 2021, https://arxiv.org/abs/2101.06983 (embeddings only).
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


def join_outputs(model: CLIP, parts: Iterable[CLIPOutput]) -> CLIPOutput:
    """Join the outputs of all microbatches; each tensor of the result is a leaf that collects its gradient.

    Args:
        model: gives the temperature, which so enters the loss once.
        parts: outputs of the first pass, made one by one; at least one. Their ids are not kept.
    """
    modalities = [_ModalityOutputs(), _ModalityOutputs()]
    for part in parts:
        for modality, output in zip(modalities, (part.image, part.text), strict=True):
            modality.add(output)
    image, text = (modality.join() for modality in modalities)
    return CLIPOutput(image, text, *model.temperature())


class _ModalityOutputs:
    """Outputs of the first pass, of one modality."""

    def __init__(self) -> None:
        self._embeddings: list[Tensor] = []
        self._stats: Stats | None = None
        self._no_ids = torch.empty(0, dtype=torch.int64)

    def add(self, output: TokenizerOutput) -> None:
        self._embeddings.append(output.embedding.detach())
        stats = output.stats.detach()
        self._stats = stats if self._stats is None else self._stats + stats
        self._no_ids = output.ids[:0]

    def join(self) -> TokenizerOutput:
        assert self._stats is not None
        sums = {name: total.clone() for name, total in self._stats.sums.items()}
        for total in sums.values():
            total.requires_grad_(total.is_floating_point())
        embedding = torch.cat(self._embeddings).requires_grad_()
        return TokenizerOutput(embedding, self._no_ids, dataclasses.replace(self._stats, sums=sums))


def backward_from_cached_grads(out: CLIPOutput, cached: CLIPOutput, rows: slice) -> None:
    """Run the backward of one microbatch from the gradients of the cached outputs.

    Args:
        out: output of the second pass.
        cached: result of `join_outputs`, after the loss's backward.
        rows: rows of the microbatch in it.
    """
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for mine, all_rows in ((out.image, cached.image), (out.text, cached.text)):
        assert all_rows.embedding.grad is not None
        pairs.append((mine.embedding, all_rows.embedding.grad[rows]))
        pairs += [(total, all_rows.stats[name].grad) for name, total in mine.stats.items()]
    # The temperature has its gradient; DDP wants to see all weights in every backward.
    pairs += [(number, None) for number in (out.scale, out.bias) if number is not None]
    with_grad = [(output, found) for output, found in pairs if output.requires_grad]  # parts of the model may be frozen
    torch.autograd.backward(
        [output for output, _ in with_grad],
        [torch.zeros_like(output) if found is None else found for output, found in with_grad],
    )


def mean_drift(out: CLIPOutput, cached: CLIPOutput, rows: slice) -> float:
    """Return the mean distance of this rank's unit embeddings between the two passes; 0 without rows."""
    pairs = ((out.image.embedding, cached.image.embedding[rows]), (out.text.embedding, cached.text.embedding[rows]))
    distances = torch.cat([(again.detach() - first.detach()).norm(dim=1) for again, first in pairs])
    return float(distances.mean()) if len(distances) else 0.0


def first_drifting_module(model: nn.Module, forward: Callable[[], object], tolerance: float) -> str | None:
    """Return the first module, in the order in which modules finish, whose outputs differ between two forwards.

    As in the two passes, the first forward is without gradients and the second with them.

    Args:
        model: whose modules are compared.
        forward: runs the model, every time from the same state of torch's generators.
        tolerance: difference of an output, relative to its norm, that counts as rounding.
    """
    with torch.no_grad():
        first = _fingerprints(model, forward)
    with torch.enable_grad():
        second = _fingerprints(model, forward)
    for before, after in itertools.zip_longest(first, second, fillvalue=_Fingerprint("", 0.0, 0.0)):
        if before.name != after.name or _differ(before, after, tolerance):
            return before.name or after.name
    return None


def _differ(before: _Fingerprint, after: _Fingerprint, tolerance: float) -> bool:
    if math.isfinite(before.projection) and math.isfinite(after.projection):
        return abs(after.projection - before.projection) > tolerance * before.norm
    return math.isfinite(before.projection) or math.isfinite(after.projection)


class _Fingerprint(NamedTuple):
    """Summary of a module's output: enough to detect another output, and to measure the difference."""

    name: str
    projection: float
    """Projection onto random signs: it changes by about the norm of the outputs' difference."""
    norm: float


def _fingerprints(model: nn.Module, forward: Callable[[], object]) -> list[_Fingerprint]:
    """Return a fingerprint of every tensor that a module returns, in the order in which modules finish."""
    found: list[_Fingerprint] = []

    def hook(name: str) -> Callable[[nn.Module, object, object], None]:
        def record(module: nn.Module, inputs: object, output: object) -> None:
            for leaf in _leaves(output):
                if isinstance(leaf, Tensor):
                    wide = leaf.detach().double()
                    found.append(_Fingerprint(name, float((wide * _signs(wide)).sum()), float(wide.norm())))

        return record

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _leaves(output: object) -> Iterable[object]:
    """Return the fields of an output such as `QuantizerOutput`, the items of a tuple, or the output itself."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    return output if isinstance(output, tuple) else (output,)


def _signs(like: Tensor) -> Tensor:
    """Draw random signs, the same for every tensor of that shape, from a generator of their own."""
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randint(0, 2, like.shape, generator=generator).to(like) - 1
