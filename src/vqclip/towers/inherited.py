"""Record of what a model has taken from an open_clip checkpoint, and what was left."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from vqclip.io.tensors import first_names
from vqclip.nn.temperature import PretrainedTemperature

_TEMPERATURE = ("logit_scale", "logit_bias")


@dataclass(frozen=True)
class InheritedWeights:
    """Weights that a model has taken from an open_clip checkpoint, by open_clip's names."""

    source: str
    """Name of the open_clip model and its pretrained weights."""
    taken: dict[str, tuple[int, ...]]
    """Name → shape of every tensor that a tower or the temperature has taken."""
    left: dict[str, tuple[int, ...]]
    """Name → shape of the others: projections to open_clip's own embedding, its pooling, heads."""
    notes: tuple[str, ...] = ()
    """Remarks on the temperature."""

    def describe(self) -> str:
        """Return a few lines for the log."""
        lines = [f"model.towers: took {_count(self.taken)} of {self.source}"]
        if self.left:
            lines.append(f"model.towers: did not take {_count(self.left)}: {first_names(self.left, 20)}")
        return "\n".join((*lines, *self.notes))


def pretrained_temperature(tensors: Mapping[str, Tensor]) -> PretrainedTemperature | None:
    """Return the temperature among the tensors of an open_clip model, None if they have none."""
    if "logit_scale" not in tensors:
        return None
    bias = tensors.get("logit_bias")
    return PretrainedTemperature(tensors["logit_scale"].item(), None if bias is None else bias.item())


def find_inherited(
    source: str,
    tensors: Mapping[str, Tensor],
    towers: Iterable[nn.Module],
    temperature: Collection[str],
    notes: tuple[str, ...] = (),
) -> InheritedWeights:
    """Find the tensors of an open_clip model that are now those of ``towers``.

    Args:
        source: name of the checkpoint.
        tensors: of the open_clip model, by name; the towers share those that they have taken.
        towers: modules that have taken parts of it; weights that do not affect their features count as left.
        temperature: which of ``logit_scale`` and ``logit_bias`` were taken.
        notes: see `InheritedWeights`.
    """
    used: set[int] = set()
    for tower in towers:
        unused = set(getattr(tower, "unused", ()))
        used |= {id(tensor) for name, tensor in tower.state_dict(keep_vars=True).items() if name not in unused}
    taken: dict[str, tuple[int, ...]] = {}
    left: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        is_taken = name in temperature if name in _TEMPERATURE else id(tensor) in used
        (taken if is_taken else left)[name] = tuple(tensor.shape)
    return InheritedWeights(source, taken, left, notes)


def _count(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return f"{len(shapes)} tensors ({sum(math.prod(shape) for shape in shapes.values()):,} numbers)"
