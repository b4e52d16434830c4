from __future__ import annotations

import pytest
import torch

from vqclip.losses import weighted_total


def test_weighted_total():
    terms = {name: torch.tensor(value, requires_grad=True) for name, value in {"a": 2.0, "b": 3.0, "c": 5.0}.items()}
    total = weighted_total(terms, {"a": 1.0, "b": 0.5, "c": 0.0})
    assert total.item() == 3.5
    total.backward()
    assert terms["a"].grad == 1.0
    assert terms["b"].grad == 0.5
    assert terms["c"].grad is None


def test_a_term_without_weight_may_be_nan():
    assert weighted_total({"a": torch.tensor(1.0), "b": torch.tensor(float("nan"))}, {"a": 1.0, "b": 0.0}) == 1.0


def test_a_weight_on_a_device_is_not_read():
    """On `meta` reading one is an error, on a GPU a wait."""
    value = torch.zeros((), device="meta")
    assert weighted_total({"a": value, "b": value}, {"a": 1.0, "b": value}).device == value.device


def test_terms_of_unlike_precision():
    terms = {"a": torch.tensor(1.0), "b": torch.tensor(1e-12, dtype=torch.float64)}
    total = weighted_total(terms, {"a": 1.0, "b": 1.0})
    assert total.dtype == torch.float64
    assert total.item() == 1.0 + 1e-12


def test_every_term_needs_a_weight():
    with pytest.raises(AssertionError, match="terms {'a'} and weights"):
        weighted_total({"a": torch.tensor(1.0)}, {})
