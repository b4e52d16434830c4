"""The operators that onnxruntime lacks in float64, against torch's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from vqclip.export.float64 import DECOMPOSITIONS

CONVOLUTIONS = [
    {},
    {"padding": 1},
    {"stride": 2, "padding": [0, 2]},
    {"stride": [3, 1], "dilation": [1, 2]},
    {"padding": 2, "dilation": 2, "groups": 2},
    {"groups": 4},
]


def ours(operator):
    return DECOMPOSITIONS[operator.default]


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("settings", CONVOLUTIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_convolutions(settings, biased):
    x, weight = drawn(2, 4, 9, 11), drawn(8, 4 // settings.get("groups", 1), 3, 2)
    bias = drawn(8) if biased else None
    got = ours(torch.ops.aten.conv2d)(x, weight, bias, **settings)
    torch.testing.assert_close(got, F.conv2d(x, weight, bias, **settings), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(affine):
    x = 3 + drawn(2, 6, 4, 5)
    weights = (drawn(6), drawn(6) + 1) if affine else (None, None)
    got = ours(torch.ops.aten.group_norm)(x, 3, *weights, 1e-3)
    torch.testing.assert_close(got, F.group_norm(x, 3, *weights, 1e-3), rtol=1e-13, atol=1e-13)


def test_erf_and_gelu():
    x = torch.linspace(-12, 12, 10001, dtype=torch.float64)
    torch.testing.assert_close(ours(torch.ops.aten.erf)(x), torch.erf(x), rtol=0, atol=3e-14)
    for approximate in ("none", "tanh"):
        got = ours(torch.ops.aten.gelu)(x, approximate=approximate)
        torch.testing.assert_close(got, F.gelu(x, approximate=approximate), rtol=0, atol=1e-13)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(affine):
    x = 3 + drawn(2, 6, 4, 5)
    weights = (drawn(4, 5), drawn(4, 5) + 1) if affine else (None, None)
    got = ours(torch.ops.aten.layer_norm)(x, [4, 5], *weights, 1e-3)
    torch.testing.assert_close(got, F.layer_norm(x, [4, 5], *weights, 1e-3), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "settings", [{}, {"scale": 0.3}, {"is_causal": True}, {"mask": torch.ones(5, 5).tril(1) > 0}, {"mask": drawn(5, 5)}]
)
def test_attention(settings):
    query, key, value = drawn(3, 2, 4, 5, 6)
    got = ours(torch.ops.aten.scaled_dot_product_attention)(query, key, value, **settings)
    settings = {"attn_mask" if name == "mask" else name: setting for name, setting in settings.items()}
    expected = F.scaled_dot_product_attention(query, key, value, **settings)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_numbers_keep_their_digits():
    """The exporter rounds them to float32."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    translate = pytest.importorskip("vqclip.export.to_onnx")._translate

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return (0.1 - x / 0.3).clamp(-0.7, 0.7) * 1.702

    x = drawn(8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scaled.onnx"
        translate(torch.export.export(Scaled(), (x,)), "encode", "fp64", path)
        (got,) = runtime.InferenceSession(str(path)).run(None, {"inputs": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), Scaled()(x), rtol=1e-15, atol=1e-15)
