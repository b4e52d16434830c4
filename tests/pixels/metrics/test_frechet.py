"""The Fréchet distance beside scipy's matrix root, and Inception's weights as files that may be anything."""

from __future__ import annotations

import hashlib
import sys
from types import ModuleType

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from vqclip.errors import ConfigError
from vqclip.pixels.metrics import frechet
from vqclip.pixels.metrics.frechet import FrechetConfig, InceptionConfig, Moments, frechet_distance


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
    torch.save(nn.Linear(3, 5).state_dict(), tmp_path / "random.pth")
    state = torch.load(tmp_path / "random.pth")
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


class Payload:
    def __reduce__(self):
        return print, ("ran",)


def test_other_files_are_refused_and_never_run(fidelity, capsys):
    torch.save({"layer.weight": Payload()}, fidelity / "evil.pth")
    (fidelity / "damaged.pth").write_bytes((fidelity / "weights.pth").read_bytes()[:-200])
    for name in ("evil.pth", "damaged.pth", "random.pth", "missing.pth"):
        with pytest.raises(ConfigError, match=rf"network.weights: .*{name} cannot be used \(.+\); expected a file of"):
            InceptionConfig(weights=fidelity / name).build()
    assert capsys.readouterr().out == ""


def test_without_torch_fidelity_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", None)
    with pytest.raises(ConfigError, match=r"kind inception needs torch-fidelity .*pip install 'vqclip\[fidelity\]'"):
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
