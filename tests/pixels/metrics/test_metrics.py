from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vqclip.errors import NonFiniteError, ShapeError
from vqclip.pixels.metrics import MS_SSIM_SIZE, compare_images, mean_figures, ms_ssim, ssim, to_uint8


def images(*shape: int, seed: int = 0) -> Tensor:
    """Random 8-bit images with some structure: each the sum of a wave and of noise."""
    generator = torch.Generator().manual_seed(seed)
    wave = torch.sin(torch.arange(shape[-1]) / 5) * 60 + 128
    return (wave + 40 * torch.rand(shape, generator=generator)).to(torch.uint8)


def noisy(real: Tensor, amount: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-amount, amount + 1, real.shape, generator=generator)
    return (real.long() + noise).clamp(0, 255).to(torch.uint8)


def windows_of(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All windows inside of one channel ``(n, 121)``, and their weights."""
    found = np.lib.stride_tricks.sliding_window_view(image, (11, 11)).reshape(-1, 121)
    steps = np.arange(11) - 5
    weights = np.exp(-(steps[:, None] ** 2 + steps**2) / (2 * 1.5**2)).ravel()
    return found, weights / weights.sum()


def ssim_by_windows(x: np.ndarray, y: np.ndarray) -> float:
    """The formula of Wang et al. (2004) for one channel, window by window."""
    (first, weights), (second, _) = windows_of(x), windows_of(y)
    found = []
    for a, b in zip(first, second, strict=True):
        mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
        var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
        cov = (weights * (a - mean_a) * (b - mean_b)).sum()
        top = (2 * mean_a * mean_b + 1e-4) * (2 * cov + 9e-4)
        found.append(top / ((mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4)))
    return float(np.mean(found))


def test_ssim_is_the_formula_window_by_window():
    real = images(2, 3, 17, 24)
    made = noisy(real, 30)
    expected = [
        np.mean([ssim_by_windows(made[i, c].numpy() / 255, real[i, c].numpy() / 255) for c in range(3)])
        for i in range(2)
    ]
    assert compare_images(made, real)["ssim"].tolist() == pytest.approx(expected, abs=1e-12)


def test_values_of_other_libraries():
    """Measured with scikit-image 0.26 (SSIM) and torchmetrics 1.9 (MS-SSIM, which handles odd sizes in another way)."""
    real = images(1, 3, 192, 180)
    x, y = noisy(real, 30).double() / 255, real.double() / 255
    assert float(ssim(x, y)) == pytest.approx(0.6536074075947297, abs=1e-9)
    assert float(ms_ssim(x, y)) == pytest.approx(0.957379882225107, abs=2e-6)


def test_psnr_and_errors_are_what_their_names_say():
    real = torch.full((3, 3, 16, 16), 100, dtype=torch.uint8)
    made = real.clone()
    made[1] += 51  # a fifth of the range: 20 log10(5) dB
    made[2, 0, 0, 0] = 101
    found = compare_images(made, real)
    assert found["mse"].tolist() == pytest.approx([0, 0.04, 1 / 255**2 / 768])
    assert found["mae"].tolist() == pytest.approx([0, 0.2, 1 / 255 / 768])
    assert found["psnr"].tolist() == pytest.approx(
        [100, 20 * math.log10(5), 20 * math.log10(255) + 10 * math.log10(768)]
    )
    means = mean_figures(found)
    assert means["psnr"] == pytest.approx(float(found["psnr"].mean()))
    assert means["psnr_of_mse"] == pytest.approx(-10 * math.log10(float(found["mse"].mean())))
    assert means["psnr_of_mse"] < means["psnr"]


def test_floats_are_rounded_to_eight_bits_as_a_file_does():
    assert to_uint8(torch.tensor([[-0.2, 0.0, 0.5 / 255 + 1e-4, 0.5, 1.0, 1.7]])).tolist() == [[0, 0, 1, 128, 255, 255]]
    real = images(2, 3, 16, 16)
    jitter = 0.4 * (torch.rand(real.shape) - 0.5)
    assert compare_images((real + jitter) / 255, real)["psnr"].tolist() == [100, 100]


def test_equal_images_are_perfect_and_metrics_fall_with_the_noise():
    real = images(1, 3, MS_SSIM_SIZE, MS_SSIM_SIZE)
    found = [compare_images(noisy(real, amount), real) for amount in (0, 5, 20, 80)]
    assert {name: float(each) for name, each in found[0].items()} == {
        "mse": 0, "mae": 0, "psnr": 100, "ssim": pytest.approx(1), "ms_ssim": pytest.approx(1)
    }  # fmt: skip
    for name in ("psnr", "ssim", "ms_ssim"):
        values = [float(each[name]) for each in found]
        assert values == sorted(values, reverse=True)
        assert values[-1] < values[0]


@pytest.mark.parametrize(("size", "names"), [(10, 3), (11, 4), (160, 4), (161, 5)])
def test_images_that_are_too_small_for_a_metric_go_without_it(size, names):
    assert len(compare_images(images(1, 3, size, size + 9), images(1, 3, size, size + 9, seed=3))) == names


def test_batches_change_no_error_by_a_bit_and_ssim_by_rounding():
    real = images(5, 3, 20, 24)
    made = noisy(real, 9)
    whole = compare_images(made, real)
    for i in range(5):
        one = compare_images(made[i : i + 1], real[i : i + 1])
        assert all(torch.equal(one[name], whole[name][i : i + 1]) for name in ("mse", "mae", "psnr"))
        assert torch.allclose(one["ssim"], whole["ssim"][i : i + 1], rtol=0, atol=1e-12)


def test_wrong_images_are_refused():
    with pytest.raises(ShapeError, match=r"got \(2, 3, 16, 16\) beside originals of \(1, 3, 16, 16\)"):
        compare_images(images(2, 3, 16, 16), images(1, 3, 16, 16))
    with pytest.raises(ShapeError, match=r"expected \(B, 3, H, W\)"):
        compare_images(images(2, 1, 16, 16), images(2, 1, 16, 16))
    broken = torch.rand(3, 3, 16, 16)
    broken[1, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="1 of 3 images have NaN"):
        compare_images(broken, images(3, 3, 16, 16))
