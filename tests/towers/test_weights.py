"""Weights from a local file: loaded exactly, or refused."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from safetensors.torch import save_file

from tests.towers.test_image import VIT
from vqclip.errors import ConfigError
from vqclip.towers.image import TimmTowerConfig


def from_file(file, **changes):
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT | changes, checkpoint=file).build()


@pytest.fixture
def vit():
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT).build().eval()


@pytest.mark.parametrize("kind", ["weights.pt", "nested.pt", "classifier.pt", "weights.safetensors"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "visual."])
def test_local_weights_are_loaded(vit, tmp_path, kind, prefix, caplog):
    state = {f"{prefix}{name}": tensor for name, tensor in vit.backbone.model.state_dict().items()}
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


def test_names_of_the_model_itself_are_no_prefix(vit, tmp_path):
    state = {name: each for name, each in vit.backbone.model.state_dict().items() if name.startswith("blocks.")}
    torch.save(state, tmp_path / "part.pt")
    with pytest.raises(ConfigError, match=r"missing cls_token.* names in the file: blocks\.0\."):
        from_file(tmp_path / "part.pt")


def test_local_weights_in_half_precision_are_widened(vit, tmp_path):
    torch.save({name: tensor.half() for name, tensor in vit.backbone.model.state_dict().items()}, tmp_path / "half.pt")
    images = torch.rand(1, 3, 16, 16)
    vit.backbone.model.half().float()
    assert torch.equal(vit(images), from_file(tmp_path / "half.pt").eval()(images))


class Malicious:
    def __reduce__(self):
        return exec, ("raise SystemExit('a weights file ran code')",)


def test_a_file_of_weights_that_does_not_fit_is_refused(vit, tmp_path):
    state = vit.backbone.model.state_dict()
    file = tmp_path / "weights.pt"
    with pytest.raises(ConfigError, match=r"tower.checkpoint: .*weights.pt: no such file"):
        from_file(file)
    torch.save({"state_dict": state, "run": Malicious()}, file)
    with pytest.raises(
        ConfigError, match=r"tower.checkpoint: .*weights.pt cannot be read.*expected a .safeten"
    ) as told:
        from_file(file)
    assert "weights_only" not in str(told.value)
    torch.save([1, 2], file)
    with pytest.raises(ConfigError, match="got a list, expected a state dict"):
        from_file(file)
    torch.save({"student": state, "teacher": state}, file)
    with pytest.raises(ConfigError, match="got a dict with student, teacher, expected a state dict"):
        from_file(file)
    torch.save({"text.bias": torch.zeros(1)} | {f"visual.{name}": tensor for name, tensor in state.items()}, file)
    with pytest.raises(ConfigError, match=r"names in the file: text.bias, visual.cls_token.*only a prefix that all"):
        from_file(file)
    for damaged in (b"", b"nothing of the sort", b"PK\x03\x04" + bytes(50)):
        for name in ("weights.pt", "weights.safetensors"):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(ConfigError, match=f"{name} cannot be read"):
                from_file(tmp_path / name)
    torch.save(
        {name: tensor for name, tensor in state.items() if name != "norm.weight"} | {"more": state["norm.bias"]}, file
    )
    with pytest.raises(ConfigError, match=r"weights.pt does not fit the model: missing norm.weight; unexpected more"):
        from_file(file)
    torch.save({name: tensor.double() for name, tensor in state.items()}, file)
    with pytest.raises(ConfigError, match="cls_token: got dtype torch.float64, expected torch.float32"):
        from_file(file)
    torch.save(state, file)
    with pytest.raises(ConfigError, match=r"blocks.0.mlp.fc1.bias: got shape \(64,\), expected \(32,\)"):
        from_file(file, mlp_ratio=2)
