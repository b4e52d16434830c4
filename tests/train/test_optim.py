import math
import re

import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay
from torch import nn

from tests.checkpoint.making import restore, save_checkpoint
from tests.models import BUSY_VQ, FSQ, tiny_model
from vqclip import dist
from vqclip.config import load_config
from vqclip.dist._torch_versions import TORCH_VERSION
from vqclip.errors import ConfigError
from vqclip.train.muon import Muon
from vqclip.train.optim import (
    ELEMENTWISE,
    OptimConfig,
    Schedule,
    _kinds_of_timm,
    describe_groups,
    matrix_names,
    parameter_groups,
    set_lr,
)
from vqclip.train.parallel import clip_gradients


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 4))
        self.text = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4))
        self.query = nn.Parameter(torch.ones(1, 1, 4))
        self.positional_embedding = nn.Parameter(torch.ones(3, 4))
        self.text_projection = nn.Parameter(torch.ones(4, 4))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.tensor(-1.0))


def names(groups: list[dict], weight_decay: float) -> set[str]:
    return {name for group in groups if group["weight_decay"] == weight_decay for name, _ in group["params"]}


def test_groups():
    model = Model()
    model.image[3].bias.requires_grad_(False)
    groups = parameter_groups(model, 0.1)
    assert names(groups, 0.1) == {"image.0.weight", "image.3.weight", "text.1.weight", "text_projection"}
    every = [name for group in groups for name, _ in group["params"]]
    assert sorted(every) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert len(groups) == 2
    assert OptimConfig().build(model).defaults["fused"] is True


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=1, global_pool="map", reg_tokens=2)


def clip() -> nn.Module:
    tower = {"layers": 1, "width": 64}
    return open_clip.CLIP(32, open_clip.CLIPVisionCfg(**tower), open_clip.CLIPTextCfg(**tower))


@pytest.mark.parametrize("make", [vit, clip])
def test_groups_of_real_towers_cover_every_parameter_once(make):
    model = make()
    groups = parameter_groups(model, 0.1)
    grouped = [parameter for group in groups for _, parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))
    decayed = names(groups, 0.1)
    assert decayed
    assert not any(word in name for name in decayed for word in ("embedding", "pos_embed", "token", "latent", "norm"))
    assert all(name in decayed for name, _ in model.named_parameters() if "mlp" in name and name.endswith("weight"))


def test_shared_parameters_come_once_and_modules_can_exempt_theirs():
    class Special(nn.Linear):
        def no_weight_decay(self) -> set[str]:
            return {"weight", "not_there"}

    model = nn.ModuleList([special := Special(2, 2), nn.Linear(2, 2)])
    model.append(special)
    groups = parameter_groups(model, 0.1)
    assert names(groups, 0.1) == {"1.weight"}
    assert names(groups, 0.0) == {"0.weight", "0.bias", "1.bias"}


def test_learning_rate_ratios_of_towers_and_of_a_module_that_has_its_own():
    optimizer = OptimConfig(lr=0.5, image_lr_ratio=0.1).build(Model())
    found = {(group["lr_ratio"], group["weight_decay"], group["lr"]) for group in optimizer.param_groups}
    assert found == {(0.1, 0.1, 0.05), (0.1, 0.0, 0.05), (1.0, 0.1, 0.5), (1.0, 0.0, 0.5)}
    set_lr(optimizer, 1.0)
    for group in optimizer.param_groups:
        assert group["lr"] == group["lr_ratio"]
        assert all(name.startswith("image.") == (group["lr_ratio"] == 0.1) for name in group["param_names"])
    model = Model()
    model.judge = nn.Linear(2, 2)
    model.judge.lr_ratio = 0.5
    for group in OptimConfig(lr=1.0).build(model).param_groups:
        assert all(name.startswith("judge.") == (group["lr_ratio"] == 0.5) for name in group["param_names"])
    with pytest.raises(ConfigError, match=r"optim\.text_lr_ratio: got 2\.0, but no parameter's name begins .*'text\.'"):
        OptimConfig(text_lr_ratio=2.0).build(nn.Linear(2, 2))


class Tower(nn.Module):
    """A tower of 3 blocks of 1, 1 and 1 matrices between a stem and a final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2, bias=False), nn.GELU()) for _ in range(3))
        self.norm = nn.LayerNorm(2)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (nn.ModuleDict({"tower": Tower(), "pool": nn.Linear(2, 2)}) for _ in range(2))


def settings_of(optimizer):
    """Name of a parameter -> factor on the learning rate, and weight decay."""
    groups = optimizer.param_groups
    return {name: (round(each["lr_ratio"], 6), each["weight_decay"]) for each in groups for name in each["param_names"]}


def test_layer_decay_is_that_of_timm_and_beit():
    found = settings_of(OptimConfig(layer_decay=0.5).build(TwoTowers()))
    for modality in ("image", "text"):
        assert found[f"{modality}.tower.stem.weight"] == (0.0625, 0.1)
        assert [found[f"{modality}.tower.blocks.{n}.0.weight"][0] for n in range(3)] == [0.125, 0.25, 0.5]
        assert found[f"{modality}.tower.norm.weight"] == (1.0, 0.0)
        assert found[f"{modality}.pool.weight"] == (1.0, 0.1)
    vision = timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=5)  # a head, as ours has after the tower
    model = TwoTowers()
    model.image.tower = vision
    ours = settings_of(OptimConfig(layer_decay={"image": 0.75}).build(model))
    theirs = param_groups_layer_decay(vision, 0.1, layer_decay=0.75)
    name_of = {id(parameter): f"image.tower.{name}" for name, parameter in vision.named_parameters()}
    for group in theirs:
        for parameter in group["params"]:
            name = name_of[id(parameter)]
            if ".norm." in name:  # timm counts it to the last block, MAE and BEiT do not
                continue
            assert ours[name][0] == pytest.approx(group["lr_scale"], abs=1e-6), name
    assert ours["image.tower.norm.weight"][0] == 1
    assert all(ratio == 1 for name, (ratio, _) in ours.items() if not name.startswith("image.tower."))


def test_layer_decay_needs_a_tower_that_trains():
    model = TwoTowers()
    model.image.tower.requires_grad_(False)
    assert settings_of(OptimConfig(layer_decay=0.5).build(model))["text.tower.stem.weight"][0] == 0.0625
    with pytest.raises(ConfigError, match=r"optim\.layer_decay\.image: got 0\.5, but no parameter of that tower"):
        OptimConfig(layer_decay={"image": 0.5}).build(model)
    model.text.tower.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"optim\.layer_decay: got a decay, but no parameter of a tower trains"):
        OptimConfig(layer_decay=0.5).build(model)
    with pytest.raises(ConfigError, match=r"layer_decay.*expected .*(0|1)"):
        load_config(OptimConfig, overrides=["layer_decay=1.5"])


def test_overrides_by_name():
    overrides = [
        {"pattern": "image.tower.blocks.[01].*", "lr_ratio": 0.5, "weight_decay": 0.0},
        {"pattern": "*.tower.*", "weight_decay": 0.05},
        {"pattern": "text.pool.bias", "lr_ratio": 3.0},
    ]
    config = OptimConfig(overrides=overrides, layer_decay=0.5, image_lr_ratio=0.1)
    optimizer = config.build(TwoTowers())
    found = settings_of(optimizer)
    assert found["image.tower.blocks.0.0.weight"] == (0.00625, 0.0)  # 0.1 x 0.5^3 x 0.5
    assert found["image.tower.blocks.2.0.weight"] == (0.05, 0.05)
    assert found["image.tower.norm.weight"] == (0.1, 0.0)  # norms keep no weight decay
    assert found["text.tower.stem.weight"] == (0.0625, 0.05)
    assert found["text.pool.weight"] == (1.0, 0.1)
    assert found["text.pool.bias"] == (3.0, 0.0)
    set_lr(optimizer, 2.0)
    assert {round(g["lr"], 6) for g in optimizer.param_groups} == {round(2 * ratio, 6) for ratio, _ in found.values()}
    what = "1 tensors (4 numbers) with weight decay 0, learning rate × 0.00625, image.tower.blocks.0"
    assert what in describe_groups(optimizer)
    assert len(found) == len(list(TwoTowers().parameters()))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([{"pattern": "image.tower.block.*", "lr_ratio": 2.0}], 'no parameter; .*did you mean "image.tower.blocks'),
        ([{"pattern": "image.pool.*", "lr_ratio": 2.0}], r"only frozen parameters \(image.pool.weight, image.pool.b"),
        (
            [{"pattern": "*.norm.*", "lr_ratio": 2.0}, {"pattern": "text.tower.norm.*", "lr_ratio": 3.0}],
            r"overrides\[1\]\.pattern: .*only parameters of an earlier override \(text\.tower\.norm\.weight, .*reorder",
        ),
        ([{"pattern": "*.norm.*", "weight_decay": 0.2}], r"\[0\].weight_decay: .* only parameters without weight"),
    ],
)
def test_overrides_that_change_nothing_are_refused(overrides, message):
    model = TwoTowers()
    model.image.pool.requires_grad_(False)
    with pytest.raises(ConfigError, match=message):
        OptimConfig(overrides=overrides).build(model)


def test_bad_values_are_refused():
    with pytest.raises(ConfigError) as caught:
        load_config(OptimConfig, overrides=["lr=-1e-4", "betas=[0.9, 1.0]", "warmup=3"])
    assert len(str(caught.value).splitlines()) == 3
    assert load_config(OptimConfig, overrides=["lr=1e-4", "clip_grad_norm=null"]).lr == 1e-4
    with pytest.raises(ConfigError, match="nothing to train"):
        OptimConfig().build(Model().requires_grad_(False))
    with pytest.raises(ConfigError, match="got neither lr_ratio nor weight_decay"):
        load_config(OptimConfig, overrides=["overrides=[{pattern: '*'}]"])
    for key in ("lr", "image_lr_ratio", "text_lr_ratio", "weight_decay"):  # they would overflow weights
        with pytest.raises(ValueError, match="less than or equal to 1000"):
            OptimConfig(**{key: 1e39})


def test_schedule():
    schedule = Schedule(OptimConfig(lr=2.0, warmup_steps=4, final_lr_ratio=0.1), 14)
    assert [schedule(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert schedule(4) == 2.0
    assert schedule(9) == pytest.approx(1.1)
    assert schedule(13) == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 0.9)))
    assert schedule(14) == schedule(99) == pytest.approx(0.2)
    tail = [schedule(step) for step in range(4, 15)]
    assert tail == sorted(tail, reverse=True)
    assert Schedule(OptimConfig(lr=1.0, warmup_steps=0), 10)(0) == 1.0
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps: got 5; expected fewer than the 5 steps of the run"):
        Schedule(OptimConfig(warmup_steps=5), 5)


def test_schedules_without_a_cosine():
    wsd = Schedule(OptimConfig(lr=2.0, schedule="wsd", warmup_steps=2, decay_share=0.4, final_lr_ratio=0.5), 10)
    assert [wsd(step) for step in range(12)] == [1.0, *[2.0] * 6, 1.75, 1.5, 1.25, 1.0, 1.0]
    longer = Schedule(OptimConfig(lr=2.0, schedule="wsd", warmup_steps=2), 1000)
    assert [longer(step) for step in range(7)] == [wsd(step) for step in range(7)]  # so a run can be made longer
    constant = Schedule(OptimConfig(lr=2.0, schedule="constant", warmup_steps=2), 10)
    assert [constant(step) for step in range(11)] == [1.0, *[2.0] * 10]
    for changes, message in (
        ({"decay_share": 0.5}, "decay_share with schedule: cosine"),
        ({"schedule": "constant", "final_lr_ratio": 0.1}, "final_lr_ratio with schedule: constant"),
    ):
        with pytest.raises(ValueError, match=message):
            OptimConfig(**changes)
    with pytest.raises(ConfigError, match=r"optim\.decay_share: got 0\.5, 5 steps, after 6 of optim\.warmup_steps"):
        Schedule(OptimConfig(schedule="wsd", warmup_steps=6, decay_share=0.5), 10)


def small() -> nn.Module:
    torch.manual_seed(0)
    image = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 16))
    return nn.ModuleDict({"image": image, "text": nn.Linear(16, 4)}).to(memory_format=torch.channels_last)


def train_on(model, optimizer, steps):
    for step in steps:
        set_lr(optimizer, 0.01 / (step + 1))
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", *_kinds_of_timm()])
def test_every_kind_resumes_bit_for_bit(tmp_path, kind):
    """Or is refused. Some keep numbers instead of tensors, or the count of steps of a group."""
    model, other = small(), small()
    refusal = ""
    try:
        optimizer = OptimConfig(kind=kind).build(model)
    except ConfigError as error:
        refusal = str(error)
    if refusal or kind.startswith("kron"):
        assert kind.startswith("kron") or kind == "adagrad"  # of torch before 2.15, with a state before the first step
        assert re.match(rf"optim\.kind: {kind} (keeps \w+ of each weight|cannot be used)", refusal)
        return
    train_on(model, optimizer, range(3))
    path = save_checkpoint(tmp_path, 3, optimizer)
    resumed = OptimConfig(kind=kind).build(other)
    train_on(other, resumed, [99])  # a stale count that must go
    other.load_state_dict(model.state_dict())
    restore(path, resumed)
    for each, its in ((model, optimizer), (other, resumed)):
        train_on(each, its, range(3, 6))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


def steps_of_rows(kind, rows):
    """Three steps of a matrix; the first gradient of the upper half is at right angles to it, as AdamP asks."""
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 256, 128, dtype=torch.float64, generator=draw) * torch.arange(256)[:, None]
    upper = F.normalize(start[:128], dim=1)
    gradients[0][:128] -= (gradients[0][:128] * upper).sum(dim=1, keepdim=True) * upper
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(start[rows].clone())
    optimizer = OptimConfig(kind=kind).build(layer)
    for gradient in gradients:
        layer.weight.grad = gradient[rows].clone()
        optimizer.step()
    return layer.weight.detach() - start[rows]


def test_which_kinds_can_be_in_shards():
    allowed = [kind for kind in ["adamw", *_kinds_of_timm()] if ELEMENTWISE.fullmatch(kind)]
    for kind in [*allowed, "lamb", "adafactor", "cadamw", "adamp", "sgdp"]:
        if kind == "adagrad" and TORCH_VERSION < (2, 14):  # which has a state before the first step, and is refused
            continue
        apart = torch.cat([steps_of_rows(kind, slice(128)), steps_of_rows(kind, slice(128, None))])
        same = torch.allclose(steps_of_rows(kind, slice(None)), apart, rtol=1e-6, atol=0.0)
        assert same == (kind in allowed), kind


def test_unknown_kinds_and_moments_that_a_kind_lacks_are_refused():
    message = r"kind: got 'lionn'; expected adamw, muon, .* did you mean \"lion\""
    for kind in ("lionn", "bnbadamw8bit", "adahessian"):
        with pytest.raises(ConfigError, match=message if kind == "lionn" else f"kind: got '{kind}'"):
            load_config(OptimConfig, overrides=[f"kind={kind}"])
    for changes in ({"kind": "lars", "betas": (0.9, 0.99)}, {"kind": "adan", "betas": (0.9, 0.99)}):
        with pytest.raises(ConfigError, match=r"optim\.betas: got \[0\.9, 0\.99\], but \w+ has no two; expected null"):
            OptimConfig(**changes).build(small())
    with pytest.raises(ConfigError, match=r"optim\.eps: got 1e-05, but lion has none; expected null"):
        OptimConfig(kind="lion", eps=1e-5).build(small())
    assert OptimConfig(kind="lion", betas=(0.8, 0.9)).build(small()).param_groups[0]["betas"] == (0.8, 0.9)
    assert OptimConfig(kind="lion").build(small()).param_groups[0]["betas"] == (0.9, 0.99)


def test_muon_is_for_matrices_in_blocks():
    model = tiny_model(BUSY_VQ, FSQ).build()
    chosen = matrix_names(model)
    assert {f"image.tower.backbone.model.blocks.1.{each}.weight" for each in ("attn.qkv", "mlp.fc1")} <= chosen
    assert any(name.startswith("text.tower.") for name in chosen)
    assert not any(word in name for name in chosen for word in ("norm", "bias", "embed", "quantizer", "pool", "scale"))
    groups = OptimConfig(kind="muon", layer_decay=0.5).build(model).param_groups
    assert {name for group in groups for name in group["param_names"] if group["muon"]} == chosen
    assert len({group["lr_ratio"] for group in groups if group["muon"]}) > 1
    with pytest.raises(ConfigError, match=r"optim\.kind: got muon, but no matrix in a block of a tower trains"):
        OptimConfig(kind="muon").build(small())


def matrices(optimizer_of, dtype):
    draw = torch.Generator().manual_seed(1)
    shapes = ((6, 9), (12, 4), (5, 3, 2, 2))
    weights = [nn.Parameter(torch.randn(shape, dtype=dtype, generator=draw)) for shape in shapes]
    optimizer = optimizer_of(weights)
    for _ in range(4):
        for each in weights:
            each.grad = torch.randn(each.shape, dtype=dtype, generator=draw)
        optimizer.step()
    return weights


def muon(weights):
    named = [(str(number), each) for number, each in enumerate(weights)]
    return Muon([{"params": named, "muon": True}], lr=0.1, weight_decay=0.2)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 and later")
def test_muon_is_that_of_torch():
    """Theirs computes in bfloat16."""
    settings = {"lr": 0.1, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
    ours = matrices(muon, torch.float64)
    theirs = matrices(lambda weights: torch.optim.Muon(weights[:2], **settings), torch.float64)
    for one, other in zip(ours[:2], theirs, strict=False):
        assert float((one - other).detach().norm() / other.detach().norm()) < 5e-3


def test_muon_orthogonalizes_a_flattened_convolution():
    weight = nn.Parameter(torch.zeros(5, 3, 2, 2, dtype=torch.float64))
    weight.grad = torch.randn(weight.shape, dtype=torch.float64)
    muon([weight]).step()
    singular = torch.linalg.svdvals(weight.flatten(1)) / (0.1 * 0.2 * math.sqrt(12))
    assert ((singular > 0.6) & (singular < 1.3)).all()


@pytest.mark.parametrize("limit", [None, 0.5, 1e9])
def test_clipping_keeps_the_direction_and_shows_what_is_not_finite(limit):
    model = Model()
    gradients = []
    for name, parameter in model.named_parameters():
        if name != "query":
            parameter.grad = torch.randn_like(parameter)
            gradients.append(parameter.grad.clone())
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    norm = clip_gradients([model.parameters()], dist.Replicas(model), limit)
    assert norm.ndim == 0
    torch.testing.assert_close(norm, expected)
    scale = min(1.0, limit / (expected + 1e-6)) if limit else 1.0
    for before, parameter in zip(gradients, (p for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(parameter.grad, before * scale)
    model.logit_scale.grad.fill_(math.nan)
    assert clip_gradients([model.parameters()], dist.Replicas(model), limit).isnan()
