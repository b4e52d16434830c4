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
        () in the widest dtype of the terms. A term of weight 0 is left out, with its gradient.
    """
    assert terms.keys() == weights.keys(), f"terms {set(terms)} and weights {set(weights)}"
    return torch.stack([weights[name] * term for name, term in terms.items() if weights[name] != 0]).sum()
