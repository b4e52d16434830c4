"""LPIPS on random weights, beside the formula: its real weights are not here."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.pixels.losses.test_contract import build, gradients, images, total_of
from vqclip.errors import ConfigError
from vqclip.io.tensors import save_tensors

WIDTHS = [[64, 64], [128, 128], [256, 256, 256], [512, 512, 512], [512, 512, 512]]
LPIPS = {"kind": "lpips", "trunk": "vgg16.safetensors", "heads": "lin.pth"}


@pytest.fixture(scope="module", autouse=True)
def weights(networks):
    """VGG16's convolutions by number, and the heads; in files with the names that users have."""
    torch.manual_seed(0)
    trunk, heads, number, before = {}, {}, 0, 3
    for layer, widths in enumerate(WIDTHS):
        for width in widths:
            trunk[f"features.{number}.weight"] = torch.randn(width, before, 3, 3) * (2 / (9 * before)) ** 0.5
            trunk[f"features.{number}.bias"] = torch.randn(width) / 10
            number, before = number + 2, width  # a ReLU follows
        heads[f"lin{layer}.model.1.weight"] = torch.rand(1, before, 1, 1)
        number += 1  # pooling
    save_tensors(trunk | {"classifier.0.weight": torch.zeros(1)}, Path("vgg16.safetensors"))
    torch.save(heads, "lin.pth")
    return trunk, heads


def by_hand(trunk, heads, made, real):
    """One image at a time, layer by layer."""
    means, deviations = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    total = 0.0
    for a, b in zip(made, real, strict=True):
        pair = torch.stack([a, b]) * 2 - 1
        x, number = (pair - means[:, None, None]) / deviations[:, None, None], 0
        for layer, widths in enumerate(WIDTHS):
            if layer:
                x, number = F.max_pool2d(x, 2), number + 1
            for _ in widths:
                x = F.relu(F.conv2d(x, *(trunk[f"features.{number}.{part}"] for part in ("weight", "bias")), padding=1))
                number += 2
            one, other = x / x.norm(dim=1, keepdim=True).clamp_min(1e-5)
            total += (heads[f"lin{layer}.model.1.weight"][0] * (one - other) ** 2).sum(dim=0).mean()
    return total / len(made)


def test_lpips_is_its_formula(weights):
    losses, (made, real) = build([LPIPS], torch.float32), images(3, torch.float32)
    expected = by_hand(*weights, made, real / 255)
    value = total_of(losses, losses(made, real, 0))
    torch.testing.assert_close(value, expected.double(), rtol=1e-5, atol=0)
    (at_pixels,) = torch.autograd.grad(expected, made)
    torch.testing.assert_close(gradients(losses, made, real, [0, 1, 3])[2][0], at_pixels, rtol=1e-3, atol=1e-6)
    assert not losses.state_dict()
    assert len(losses.identity[0]["digest"]) == 64
    assert "trunk" not in losses.identity[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trunk": "nothing.pth"}, r"losses\[0\].trunk: nothing.pth: no such file"),
        ({"trunk": "lin.pth"}, r"losses\[0\].trunk: lin.pth does not fit the model: missing features.0.weight"),
        ({"heads": "vgg16.safetensors"}, r"losses\[0\].heads: .* missing lin0.model.1.weight"),
        ({"heads": "pickled.pth"}, r"losses\[0\].heads: pickled.pth cannot be read"),
        ({"heads": "other.pth"}, r"lin0.model.1.weight: got shape \(1, 32, 1, 1\), expected \(1, 64, 1, 1\)"),
    ],
)
def test_files_that_do_not_fit(weights, changes, message):
    torch.save({"lin0.model.1.weight": Path}, "pickled.pth")
    torch.save(weights[1] | {"lin0.model.1.weight": torch.rand(1, 32, 1, 1)}, "other.pth")
    with pytest.raises(ConfigError, match=message):
        build([LPIPS | changes])
