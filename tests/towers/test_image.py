from __future__ import annotations

import json

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from tests.data.hostile import marking_pickle
from vqclip.errors import ConfigError, ShapeError
from vqclip.towers.image import OpenCLIPImageTowerConfig, TimmTowerConfig
from vqclip.towers.pixels import Normalize

VIT = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
CNN = {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 24], "output_stride": 16}


@pytest.mark.parametrize(
    ("name", "args", "tokens", "width"),
    [
        ("vit_tiny_patch16_224", VIT, 16, 16),
        ("convnext_atto", CNN, 4, 24),
        ("resnet10t", {"norm_layer": "layernorm2d", "channels": [8, 8, 16, 24]}, 1, 24),
        (
            "swin_tiny_patch4_window7_224",
            {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1], "window_size": 2},
            16,
            16,
        ),
    ],
)
def test_a_timm_tower_gives_a_sequence_of_patch_features(name, args, tokens, width):
    tower = TimmTowerConfig(name=name, image_size=32, args=args).build()
    assert (tower.num_tokens, tower.width) == (tokens, width)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert tower(images).shape == (2, tokens, width)
    assert tower(images[:0]).shape == (0, tokens, width)


def test_every_trained_parameter_of_a_tower_gets_a_gradient():
    """One without would make DDP wait for it."""
    for config in (
        TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT),
        TimmTowerConfig(name="convnext_atto", image_size=32, args=CNN),
    ):
        tower = config.build()
        tower(torch.rand(2, 3, tower.image_size, tower.image_size)).sum().backward()
        assert [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None] == []


def test_bytes_and_floats_are_the_same_pixels():
    tower = TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT).build().eval()
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(tower(images), tower(images / 255))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 16, 17), r"got shape \(2, 3, 16, 17\), expected \(B, 3, 16, 16\)"),
        (torch.zeros(3, 16, 16), r"got shape \(3, 16, 16\)"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.int64), "got dtype torch.int64"),
    ],
)
def test_wrong_pixels_are_refused(images, message):
    with pytest.raises(ShapeError, match=message):
        Normalize(16)(images)


def test_batch_norm_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"batch-normalisation layers \(first: model.conv1.1\).*group_norm: 8"):
        TimmTowerConfig(name="resnet10t", image_size=32).build()
    with pytest.raises(ConfigError, match="batch-normalisation"):
        TimmTowerConfig(name="fastvit_t8", image_size=64).build()


def test_group_norm_takes_the_place_of_batch_norm():
    sizes = {"channels": [16, 16, 16, 32], "stem_width": 32}
    tower = TimmTowerConfig(name="resnet10t", image_size=32, group_norm=8, args=sizes).build()
    norms = [module for module in tower.modules() if isinstance(module, torch.nn.GroupNorm)]
    assert {norm.num_channels // norm.num_groups for norm in norms} == {8}
    with pytest.raises(ConfigError, match="tower.group_norm: got 5 channels per group"):
        TimmTowerConfig(name="resnet10t", image_size=32, group_norm=5, args=sizes).build()
    with pytest.raises(ConfigError, match="got args.norm_layer too"):
        TimmTowerConfig(name="resnet10t", image_size=32, group_norm=8, args={"norm_layer": "groupnorm"}).build()


@pytest.mark.parametrize(
    ("name", "args", "tokens"),
    [
        ("deit_tiny_patch16_224", {"depth": 1}, 16),
        ("beit_base_patch16_224", {"depth": 1, "embed_dim": 16, "num_heads": 2}, 16),
        ("swin_tiny_patch4_window7_224", {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1]}, 64),
        ("convnext_atto", CNN, 16),
    ],
)
def test_any_model_gets_the_image_size(name, args, tokens):
    assert TimmTowerConfig(name=name, image_size=64, args=args).build().num_tokens == tokens


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({"num_heads": 3}, 16, r"tower.args: timm model 'vit_tiny_patch16_224' refuses.*'num_heads': 3.*divisible"),
        ({"num_heads": 0}, 16, "tower.args.*ZeroDivisionError"),
        ({"norm_layer": "nothing"}, 16, "tower.args.*KeyError: 'nothing'"),
        ({"patch_size": 32}, 16, "tower.image_size: got 16 with patches of 32 pixels.*a multiple of 32, such as 32,"),
        ({"patch_size": 8}, 20, "tower.image_size: got 20.*patches of 8.*last 4 rows.*such as 16 or 24"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(change, size, message):
    with pytest.raises(ConfigError, match=message):
        TimmTowerConfig(name="vit_tiny_patch16_224", image_size=size, args=VIT | change).build()


@pytest.mark.parametrize(
    "name",
    [
        *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_filter_fn", "checkpoint_path"),
        *("cache_dir", "scriptable", "features_only", "img_size", "num_classes", "device"),
    ],
)
def test_args_say_nothing_of_weights_or_what_the_tower_decides(name):
    with pytest.raises(ValueError, match=f"got '{name}', which is"):
        TimmTowerConfig.model_validate({"name": "vit_tiny_patch16_224", "image_size": 16, "args": {name: None}})


def test_weights_from_two_places_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got pretrained true and checkpoint .*weights.pt, .*expected one of the two"):
        TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, pretrained=True, checkpoint=tmp_path / "weights.pt")


def test_an_unknown_timm_name_or_argument_is_refused():
    with pytest.raises(ConfigError, match="no model 'vit_tini_patch16'; did you mean one of: .*vit_tiny_patch16"):
        TimmTowerConfig(name="vit_tini_patch16", image_size=32).build()
    with pytest.raises(ConfigError, match="convnext_atto.*refuses.*dimz"):
        TimmTowerConfig(name="convnext_atto", image_size=32, args={"dimz": 3}).build()


def test_a_name_like_no_other_is_refused_without_a_guess():
    with pytest.raises(ConfigError, match=r"timm has no model 'zzzz'; timm.list_models\(\) gives the names$"):
        TimmTowerConfig(name="zzzz", image_size=32).build()
    with pytest.raises(ConfigError, match=r"no model 'zzzz'; open_clip.list_models\(\) gives the names$"):
        OpenCLIPImageTowerConfig(model="zzzz").build()


def test_weights_that_cannot_be_fetched_are_a_clear_error(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **options):
        raise LocalEntryNotFoundError("cannot find the requested files in the local cache")

    monkeypatch.setattr("timm.models._builder.load_pretrained", offline)
    with pytest.raises(ConfigError, match="tower.pretrained: .*'vit_tiny_patch16_224'.*local cache.*tower.checkpoint"):
        TimmTowerConfig(name="vit_tiny_patch16_224", image_size=224, pretrained=True).build()


def test_open_clip_models_that_give_no_patch_features_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="tower.model: the vision half of 'coca_ViT-B-32'.*such as ViT-B-16"):
        OpenCLIPImageTowerConfig(model="coca_ViT-B-32").build()

    def offline(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr("open_clip.create_model", offline)
    with pytest.raises(ConfigError, match="tower.model: open_clip cannot make roberta-ViT-B-32: OSError: no network"):
        OpenCLIPImageTowerConfig(model="roberta-ViT-B-32").build()


def from_file(file, **changes):
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT | changes, checkpoint=file).build()


@pytest.fixture
def vit():
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=VIT).build().eval()


@pytest.mark.parametrize("kind", ["weights.pt", "nested.pt", "classifier.pt", "weights.safetensors"])
def test_local_weights_are_loaded(vit, tmp_path, kind):
    state = vit.backbone.model.state_dict()
    if kind == "weights.safetensors":
        save_file(state, tmp_path / kind)
    elif kind == "nested.pt":
        torch.save({"state_dict": state, "epoch": 3}, tmp_path / kind)
    else:
        head = {"head.weight": torch.zeros(10, 16), "head.bias": torch.zeros(10)} if kind == "classifier.pt" else {}
        torch.save(state | head, tmp_path / kind)
    images = torch.rand(1, 3, 16, 16)
    assert torch.equal(vit(images), from_file(tmp_path / kind).eval()(images))


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
    with pytest.raises(ConfigError, match=r"tower.checkpoint: .*weights.pt cannot be read.*expected a .safetensors"):
        from_file(file)
    torch.save([1, 2], file)
    with pytest.raises(ConfigError, match="got a list, expected a state dict"):
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


@pytest.fixture(scope="module")
def tiny_open_clip(tmp_path_factory):
    """A small model configuration and a local file of its weights, as open_clip reads them."""
    folder = tmp_path_factory.mktemp("open_clip")
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "patch_size": 16, "head_width": 16},
        "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    }
    (folder / "vqclip-test.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    torch.manual_seed(0)
    model = open_clip.create_model("vqclip-test")
    torch.save(model.state_dict(), folder / "weights.pt")
    return model.eval(), "vqclip-test", str(folder / "weights.pt")


def test_an_open_clip_tower_has_the_weights_of_the_file(tiny_open_clip):
    model, name, weights = tiny_open_clip
    tower = OpenCLIPImageTowerConfig(model=name, pretrained=weights).build().eval()
    images = torch.rand(2, 3, 32, 32)
    expected = model.visual.forward_intermediates(tower.normalize(images), indices=1, output_fmt="NLC")
    features = model.visual.ln_post(expected["image_intermediates"][-1])
    assert tower(images).shape == (2, 4, 32)
    torch.testing.assert_close(tower(images), features)
    tower.train()(images).sum().backward()
    assert [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.fixture
def open_clip_model(tmp_path):
    """Adds a model configuration with some vision half; gives its name."""

    def add(**vision):
        text = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
        config = {"embed_dim": 16, "vision_cfg": {"image_size": 32, **vision}, "text_cfg": text}
        (tmp_path / "vqclip-other.json").write_text(json.dumps(config))
        open_clip.add_model_config(tmp_path)
        return "vqclip-other"

    return add


def test_an_open_clip_tower_with_a_timm_trunk(open_clip_model):
    name = open_clip_model(image_size=224, timm_model_name="vit_tiny_patch16_224", timm_pool="avg", timm_proj="linear")
    tower = OpenCLIPImageTowerConfig(model=name).build()
    images = torch.rand(1, 3, 224, 224)
    trunk = tower.backbone.model
    torch.testing.assert_close(tower.eval()(images), trunk.forward_features(tower.normalize(images))[:, 1:])
    tower.train()(images).sum().backward()
    assert [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None] == []


def test_an_open_clip_tower_that_cannot_be_used_is_refused(open_clip_model, monkeypatch):
    name = open_clip_model(layers=[1, 1, 1, 1], width=8)  # as in RN50
    with pytest.raises(ConfigError, match=r"batch-normalisation layers \(first: bn1\).*choose a ViT"):
        OpenCLIPImageTowerConfig(model=name).build()
    monkeypatch.setattr("vqclip.towers.image._refuse_batch_norm", lambda backbone: None)
    with pytest.raises(ConfigError, match="the vision half of 'vqclip-other' is a ModifiedResNet, .*such as ViT-B-16"):
        OpenCLIPImageTowerConfig(model=name).build()


def test_an_open_clip_text_tower_has_the_weights_of_the_file(tiny_open_clip):
    from vqclip.towers.text import OpenCLIPTextTowerConfig

    model, name, weights = tiny_open_clip
    config = OpenCLIPTextTowerConfig(model=name, pretrained=weights)
    tower = config.build().eval()
    tokens = config.vocabulary()(["a cat", "a much longer caption about a dog"])
    features = model.ln_final(model.transformer(*_embedded(model, tokens)))
    torch.testing.assert_close(tower(tokens), features)
    tower(tokens).sum().backward()
    assert [n for n, p in tower.named_parameters() if p.grad is None] == []


def test_open_clip_weights_that_do_not_fit_are_refused(tiny_open_clip, tmp_path):
    _, name, _ = tiny_open_clip
    torch.save({"nothing": torch.zeros(1)}, tmp_path / "weights.pt")
    with pytest.raises(
        ConfigError, match=r"tower.pretrained: .*weights.pt' cannot be loaded as weights of vqclip-test"
    ):
        OpenCLIPImageTowerConfig(model=name, pretrained=str(tmp_path / "weights.pt")).build()


def test_open_clip_weights_that_are_a_pickle_are_not_run(tiny_open_clip, tmp_path):
    _, name, _ = tiny_open_clip
    (tmp_path / "weights.pt").write_bytes(marking_pickle(tmp_path / "was here"))
    with pytest.raises(ConfigError, match=r"weights.pt' cannot be loaded as weights of vqclip-test: .*[Ww]eights.only"):
        OpenCLIPImageTowerConfig(model=name, pretrained=str(tmp_path / "weights.pt")).build()
    assert not (tmp_path / "was here").exists()


def _embedded(model, tokens):
    return model.token_embedding(tokens) + model.positional_embedding, model.attn_mask


def test_an_unknown_open_clip_model_or_tag_is_refused():
    with pytest.raises(ConfigError, match="no model 'ViT-B-61'; did you mean one of: ViT-B-16"):
        OpenCLIPImageTowerConfig(model="ViT-B-61").build()
    for name in ("local-dir:/nowhere", "hf-hub:nobody/nothing"):
        with pytest.raises(ConfigError, match=f"open_clip has no model '{name}'"):
            OpenCLIPImageTowerConfig(model=name).build()
    with pytest.raises(ConfigError, match="got 'laion', which is neither a file nor one of the tags.*laion400m_e31"):
        OpenCLIPImageTowerConfig(model="ViT-B-32", pretrained="laion").build()
    with pytest.raises(ConfigError, match="trained with QuickGELU.*expected ViT-B-32-quickgelu"):
        OpenCLIPImageTowerConfig(model="ViT-B-32", pretrained="openai").build()
