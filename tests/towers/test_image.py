import pytest
import torch

from vqclip.errors import ConfigError, ShapeError
from vqclip.towers.image import ConvolutionalTowerConfig, Normalize, TimmTowerConfig

VIT = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
CNN = {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 24], "output_stride": 16}
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1]}


@pytest.mark.parametrize(
    ("name", "args", "tokens", "width"),
    [
        ("vit_tiny_patch16_224", VIT, 16, 16),
        ("deit_tiny_patch16_224", {"depth": 1}, 4, 192),
        ("beit_base_patch16_224", {"depth": 1, "embed_dim": 16, "num_heads": 2}, 4, 16),
        ("convnext_atto", CNN, 4, 24),
        ("resnet10t", {"norm_layer": "layernorm2d", "channels": [8, 8, 16, 24]}, 1, 24),
        ("swin_tiny_patch4_window7_224", SWIN | {"window_size": 2}, 16, 16),
    ],
)
def test_a_timm_tower_gives_a_sequence_of_patch_features(name, args, tokens, width):
    tower = TimmTowerConfig(name=name, image_size=32, args=args).build()
    assert (tower.num_tokens, tower.width) == (tokens, width)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert tower(images[:0]).shape == (0, tokens, width)
    features = tower(images)
    assert features.shape == (2, tokens, width)
    features.sum().backward()  # a parameter without a gradient would make DDP wait for it
    assert [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize(
    ("name", "args", "layers", "widths"),
    [
        ("vit_tiny_patch16_224", VIT | {"depth": 3}, [0, 1], [16, 16]),
        ("convnext_atto", CNN, [0, 2], [8, 16]),
        ("swin_tiny_patch4_window7_224", SWIN, [0], [8]),
        ("tf_efficientnet_lite0", {}, [2, 3], [40, 112]),
    ],
)
def test_features_of_inner_layers_follow_the_last_ones(name, args, layers, widths):
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    config = TimmTowerConfig(name=name, image_size=64, args=args, inner_layers=layers, train="none")
    tower = config.build().eval()
    alone = config.model_copy(update={"inner_layers": ()}).build().eval()
    alone.load_state_dict(tower.state_dict())
    features = tower(images)
    assert tower.width == alone.width + sum(widths)
    assert torch.equal(features[..., : alone.width], alone(images))
    maps = tower.backbone.model.forward_intermediates(tower.normalize(images), indices=layers)[1]
    means = torch.cat([each.mean((2, 3)) for each in maps], dim=1)
    torch.testing.assert_close(features[..., alone.width :].mean(1), means)
    with pytest.raises(ConfigError, match=r"with inner_layers \[99\]"):
        config.model_copy(update={"inner_layers": (99,)}).build()


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
    ("change", "size", "message"),
    [
        ({"num_heads": 3}, 16, r"tower.args: timm model 'vit_tiny_patch16_224' refuses.*'num_heads': 3.*divisible"),
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
    with pytest.raises(ValueError, match=f"got '{name}', which does not describe"):
        TimmTowerConfig.model_validate({"name": "vit_tiny_patch16_224", "image_size": 16, "args": {name: None}})


def test_an_unknown_name_or_argument_is_refused(tmp_path):
    for name, args, message in (
        ("vit_tini_patch16", {}, "no model 'vit_tini_patch16'; did you mean one of: .*vit_tiny_patch16"),
        ("convnext_atto", {"dimz": 3}, "convnext_atto.*refuses.*dimz"),
        ("zzzz", {}, r"timm has no model 'zzzz'; timm.list_models\(\) gives the names$"),
    ):
        with pytest.raises(ConfigError, match=message):
            TimmTowerConfig(name=name, image_size=32, args=args).build()
    with pytest.raises(ValueError, match="got pretrained true and checkpoint .*weights.pt, .*expected one of the two"):
        TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, pretrained=True, checkpoint=tmp_path / "weights.pt")


def test_weights_that_cannot_be_fetched_are_a_clear_error(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **options):
        raise LocalEntryNotFoundError("cannot find the requested files in the local cache")

    monkeypatch.setattr("timm.models._builder.load_pretrained", offline)
    with pytest.raises(ConfigError, match="tower.pretrained: .*'vit_tiny_patch16_224'.*local cache.*tower.checkpoint"):
        TimmTowerConfig(name="vit_tiny_patch16_224", image_size=224, pretrained=True).build()


@pytest.mark.parametrize(
    ("size", "channels", "per_group", "message"),
    [
        (32, [8, 18], 4, r"got channels \[8, 18\] and channels_per_group 4; expected channels that"),
        (60, [8] * 4, 4, "got image_size 60 and 4 stages in channels; expected .* multiple of 2\\^4, such as 64"),
        (8, [8] * 4, 4, "got image_size 8 .* such as 16"),  # it would have other tokens than those that are promised
        (16, [8] * 4, 1, "got channels_per_group 1 with a single token.*expected channels_per_group 2"),
    ],
)
def test_sizes_that_the_stages_do_not_halve_or_group_are_refused(size, channels, per_group, message):
    with pytest.raises(ValueError, match=message):
        ConvolutionalTowerConfig(image_size=size, channels=channels, channels_per_group=per_group)
