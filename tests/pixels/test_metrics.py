"""Metrics of images beside their originals, files of a given size, and the Fréchet distance."""

import hashlib
import io
import math
import sys
from types import ModuleType

import numpy as np
import pytest
import scipy.linalg
import torch
from PIL import Image
from torch import Tensor, nn

from tests.data.hostile import Marker
from vqclip.errors import ConfigError, NonFiniteError, ShapeError
from vqclip.pixels import frechet
from vqclip.pixels.codecs import best_within, compress
from vqclip.pixels.frechet import FrechetConfig, InceptionConfig, Moments, frechet_distance
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
    tiniest = 20 * math.log10(255) + 10 * math.log10(768)
    assert found["psnr"].tolist() == pytest.approx([100, 20 * math.log10(5), tiniest])
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


def test_batches_change_no_error_by_a_bit_and_ssim_by_rounding():
    real = images(5, 3, 20, 24)
    made = noisy(real, 9)
    whole = compare_images(made, real)
    for size, names in ((10, 3), (11, 4), (160, 4), (161, 5)):  # some metrics need larger images
        assert len(compare_images(images(1, 3, size, size + 9), images(1, 3, size, size + 9, seed=3))) == names
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


@pytest.fixture
def image():
    """48 x 64 pixels of soft waves, with some noise."""
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(64.0), indexing="ij")
    waves = torch.stack([torch.sin(x / 9), torch.cos(y / 7), torch.sin((x + y) / 11)])
    noise = torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(0))
    return (128 + 90 * waves + 12 * noise).clamp(0, 255).to(torch.uint8)


def error(found, image):
    return float(compare_images(found.pixels[None], image[None])["mse"])


@pytest.mark.parametrize("codec", ["webp", "jpeg"])
def test_files_fit_and_a_better_quality_would_not(image, codec):
    """Without a file that fits, the smallest one counts."""
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, codec, quality=50, method=6, optimize=True)
    found = compress(image, codec, file.tell())[0]
    assert 0.97 * file.tell() <= found.bytes <= file.tell()
    assert found.pixels.shape == image.shape
    less = compress(image, codec, found.bytes - 1)[0]
    assert less.bytes < found.bytes
    assert error(less, image) > error(found, image)
    too_large = compress(image, codec, 10)
    assert [each.pixels.shape for each in too_large] == [image.shape] * 4
    assert best_within(too_large, image, 10).bytes == min(each.bytes for each in too_large) > 10


def test_a_reduced_size_wins_where_bytes_are_few(image):
    found = compress(image, "webp", 120)
    best = best_within(found, image, 120)
    assert found[0].bytes > 120 >= best.bytes
    assert error(best, image) == min(error(each, image) for each in found if each.bytes <= 120)
    rich = compress(image, "webp", 10_000)
    assert best_within(rich, image, 10_000) is rich[0]


def features(count, seed, width=6):
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(width, width, generator=generator)
    return torch.randn(count, width, generator=generator) @ mixed + seed


@pytest.mark.parametrize("count", [40, 4])  # with four, the covariance of six features is singular
def test_distance_is_that_of_the_formula(count):
    x, y = features(count, 1), features(count + 3, 2)
    (a, b), (c, d) = ((each.double().numpy().mean(axis=0), np.cov(each.double().numpy().T)) for each in (x, y))
    root = scipy.linalg.sqrtm(b @ d).real
    expected = ((a - c) ** 2).sum() + np.trace(b + d - 2 * root)
    assert frechet_distance(Moments.of(x), Moments.of(y)) == pytest.approx(expected, rel=1e-3 if count == 4 else 1e-9)


def test_a_set_is_at_no_distance_from_itself_and_parts_add_up():
    x = features(30, 1)
    whole = Moments.of(x)
    assert frechet_distance(whole, whole) == pytest.approx(0, abs=1e-6)
    parts = Moments.of(x[:7]).add(Moments.of(x[7:]))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(parts, whole, strict=True))


class Extractor(nn.Module):
    """The part of torch-fidelity's network that matters here: it takes uint8 and reads a file of weights."""

    def __init__(self, name, features_list, feature_extractor_weights_path):
        super().__init__()
        assert features_list == ["2048"]
        self.layer = nn.Linear(3, 5)
        self.load_state_dict(torch.load(feature_extractor_weights_path, weights_only=False))

    def forward(self, images):
        assert images.dtype == torch.uint8
        return (self.layer(images.float().mean(dim=(2, 3))),)


@pytest.fixture
def fidelity(monkeypatch, tmp_path):
    """A stub of torch-fidelity, and a file of random weights for it."""
    package = ModuleType("torch_fidelity.feature_extractor_inceptionv3")
    package.FeatureExtractorInceptionV3 = Extractor
    monkeypatch.setitem(sys.modules, "torch_fidelity", ModuleType("torch_fidelity"))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    state = nn.Linear(3, 5).state_dict()
    torch.save(state, tmp_path / "random.pth")
    torch.save({f"layer.{name}": tensor for name, tensor in state.items()}, tmp_path / "weights.pth")
    return tmp_path


def test_fid_is_the_name_with_the_known_weights_only(fidelity, monkeypatch):
    path = fidelity / "weights.pth"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    built = FrechetConfig(network={"kind": "inception", "weights": path}).build()
    assert built.name == f"Fréchet distance (Inception, other weights {digest[:8]})"
    assert built.features(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).shape == (2, 5)
    monkeypatch.setattr(frechet, "INCEPTION_SHA256", digest)
    assert InceptionConfig(weights=path).build().name == "FID"


def test_other_files_are_refused_and_never_run(fidelity):
    torch.save({"layer.weight": Marker(fidelity / "ran")}, fidelity / "evil.pth")
    (fidelity / "damaged.pth").write_bytes((fidelity / "weights.pth").read_bytes()[:-200])
    for name in ("evil.pth", "damaged.pth", "random.pth", "missing.pth"):
        with pytest.raises(ConfigError, match=rf"network.weights: .*{name} cannot be used \(.+\); expected a file of"):
            InceptionConfig(weights=fidelity / name).build()
    assert not (fidelity / "ran").exists()


def test_without_torch_fidelity_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", None)
    with pytest.raises(ConfigError, match=r"kind inception needs the package torch_fidelity, .*'vqclip\[fidelity\]'"):
        InceptionConfig(weights=tmp_path / "weights.pth").build()


@pytest.mark.slow
def test_torch_fidelity_itself(tmp_path, monkeypatch):
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    loaded = []
    monkeypatch.setattr(module, "load_state_dict_from_url", lambda url, progress: loaded.append(url) or {})
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda self, state, *args, **more: None)
    torch.save(module.FeatureExtractorInceptionV3("x", ["2048"]).state_dict(), tmp_path / "weights.pth")
    monkeypatch.undo()
    built = InceptionConfig(weights=tmp_path / "weights.pth").build()
    with torch.no_grad():
        assert built.features(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).shape == (2, 2048)
    assert loaded
