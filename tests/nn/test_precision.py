from __future__ import annotations

from typing import get_args

import pytest
import torch

from vqclip.errors import ConfigError
from vqclip.nn.precision import AUTOCAST_DTYPES, Precision, autocast, full_precision

CPU = torch.device("cpu")


def product_type() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize("precision", get_args(Precision))
def test_autocast_is_on_for_half_precision_alone(precision):
    with torch.autocast("cpu", torch.bfloat16), autocast(CPU, precision):
        assert product_type() == AUTOCAST_DTYPES.get(precision, torch.float32)


def test_cast_weights_of_a_caller_are_neither_used_nor_kept():
    x, layer = torch.ones(2, 2), torch.nn.Linear(2, 2)
    with torch.autocast("cpu", torch.float16):
        layer(x)
        with torch.no_grad(), autocast(CPU, "bf16"):
            assert layer(x).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad(), autocast(CPU, "bf16"):
            layer(x)
        layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_full_precision_within_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert product_type() == torch.bfloat16
        with full_precision(CPU):
            assert product_type() == torch.float32
    with full_precision(torch.device("meta")):  # which has no autocast
        pass


def test_unknown_precision():
    with pytest.raises(ConfigError, match="precision: got 'int8'; expected one of fp32, bf16, fp16, fp64"):
        autocast(CPU, "int8")


def test_one_graph():
    """Not every question about autocast can be compiled."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        with full_precision(x.device):
            return x @ x

    compiled = torch.compile(doubled, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(torch.ones(2, 2)).dtype == torch.float32
