"""The products of the tiled losses against fp64, in every way that they are called."""

from __future__ import annotations

import pytest
import torch

from vqclip.losses import products
from vqclip.losses.products import add_product_, product

SHAPES = [(1, 1, 1), (5, 3, 7), (0, 4, 5), (3, 4, 0), (64, 33, 130)]


def matrix(rows: int, columns: int, transposed: bool, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (columns, rows) if transposed else (rows, columns)
    made = torch.randn(shape, generator=generator, dtype=dtype)
    return made.T if transposed else made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_fp64(shape, transposed, dtype):
    rows, inner, columns = shape
    left, right = matrix(rows, inner, transposed[0], 1, dtype), matrix(inner, columns, transposed[1], 2, dtype)
    wanted = left.double() @ right.double()
    found = product(left, right)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    total = torch.ones(rows, columns, dtype=dtype)
    add_product_(total, left, right)
    torch.testing.assert_close(total.double(), 1 + wanted, rtol=1e-5, atol=1e-5)


def test_this_torch_has_the_fast_product():
    """So that a PyTorch that renames the operator is noticed: the losses would be right, at half the speed."""
    assert torch.backends.mkldnn.is_available() == products.HAS_ONEDNN
