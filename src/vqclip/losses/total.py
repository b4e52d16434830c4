"""The weighted sum of all terms of the training loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def weighted_total(terms: Mapping[str, Tensor], weights: Mapping[str, float | Tensor]) -> Tensor:
    """Return Σ weight × term.

    Args:
        terms: name → () unweighted loss over the global batch.
        weights: name → weight; the same names as ``terms``.

    Returns:
        () in the widest dtype of the terms. A term is left out, with its gradient, if its weight is the number 0; a
        weight on a device is not read.
    """
    assert terms.keys() == weights.keys(), f"terms {set(terms)} and weights {set(weights)}"
    present = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor) or weight != 0}
    return torch.stack([present[name] * term for name, term in terms.items() if name in present]).sum()
