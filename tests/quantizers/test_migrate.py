"""Ids of vector-quantize-pytorch's quantizers and of those made from them."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import vector_quantize_pytorch as peer
from einops import rearrange
from torch import nn
from vector_quantize_pytorch.vector_quantize_pytorch import directional_reparam

from vqclip.errors import ConfigError
from vqclip.quantizers import from_vector_quantize_pytorch
from vqclip.quantizers.nearest import TableQuantizer

vq = partial(peer.VectorQuantize, dim=8, codebook_size=64)
residual_vq = partial(peer.ResidualVQ, dim=8, codebook_size=32, num_quantizers=3)
lfq = partial(peer.LFQ, codebook_size=256, dim=8)
MODULES: dict[str, Callable[[], Any]] = {
    "vq": partial(vq, kmeans_init=True, threshold_ema_dead_code=2),
    "vq, cosine": partial(vq, use_cosine_sim=True),
    "vq, learned": partial(vq, learnable_codebook=True, ema_update=False, rotation_trick=False),
    "vq, diveq": partial(vq, directional_reparam=True, threshold_ema_dead_code=2),
    "vq, heads": partial(vq, codebook_size=32, codebook_dim=4, heads=2, separate_codebook_per_head=True),
    "residual vq": partial(residual_vq, num_quantizers=4, quantize_dropout=True),
    "residual vq, diveq": partial(residual_vq, diveq=True, rotation_trick=False),
    "residual vq, shared": partial(residual_vq, shared_codebook=True),
    "residual vq, one cosine stage": partial(residual_vq, num_quantizers=1, use_cosine_sim=True),
    "fsq": lambda: peer.FSQ([8, 5, 5, 5]),
    "fsq, symmetric": lambda: peer.FSQ([8, 5, 4, 2], preserve_symmetry=True),
    "fsq, codebooks": lambda: peer.FSQ([8, 6, 5], num_codebooks=2),
    "residual fsq": lambda: peer.ResidualFSQ(levels=[8, 5, 4, 3], num_quantizers=3, dim=4),
    "lfq": lfq,
    "lfq, scaled and clamped": partial(lfq, codebook_scale=0.5, soft_clamp_input_value=1.0),
    "lfq, codebooks": partial(lfq, codebook_size=16, num_codebooks=2),
    "lfq, spherical": partial(lfq, spherical=True),
    "residual lfq": lambda: peer.ResidualLFQ(
        dim=8, codebook_size=256, num_quantizers=3, quantize_dropout=True, soft_clamp_input_value=2.0
    ),
    "simvq": lambda: peer.SimVQ(dim=8, codebook_size=64),
    "grouped vq": lambda: peer.GroupedResidualVQ(dim=8, groups=2, num_quantizers=3, codebook_size=32),
    "vq, frozen": partial(vq, freeze_codebook=True),
}

WIDTHS = {"fsq": 4, "fsq, symmetric": 4, "fsq, codebooks": 6, "residual fsq": 4}


def trained(name: str) -> nn.Module:
    """After a few rounds of training, so that codebooks are not their first draw."""
    torch.manual_seed(0)
    module = MODULES[name]().train()
    for _ in range(5):
        module(torch.randn(2, 200, WIDTHS.get(name, 8)))
    return module.eval()


@pytest.mark.parametrize("name", MODULES)
def test_ids_are_equal_and_training_goes_on(name: str) -> None:
    module = trained(name)
    x = torch.randn(2, 2000, WIDTHS.get(name, 8), generator=torch.Generator().manual_seed(0))
    vectors, ids, *_ = module(x)
    ours = from_vector_quantize_pytorch(module, inner=name == "vq, heads")
    inside = module.project_in(x) if name == "vq, heads" else x
    out = ours(inside)
    assert len(ids) == 2
    ids = rearrange(ids, "g b n q -> b n (g q)") if name.startswith("grouped") else ids
    assert torch.equal(out.ids, ids.reshape(*out.ids.shape).long())
    if name not in ("vq, heads", "residual vq, diveq"):  # that library adds noise in evaluation, too
        torch.testing.assert_close(out.vectors, vectors, rtol=1e-5, atol=1e-5)

    ours = from_vector_quantize_pytorch(module, inner=True).train()
    x = torch.randn(2, 50, ours.dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = [part.codes().clone() for part in ours.parts() if isinstance(part, TableQuantizer)]
    for _ in range(3):
        out = ours(x)
        (out.vectors.square().sum() + sum(ours.losses(out.stats).values())).backward()
        torch.optim.SGD([x, *ours.parameters()], lr=0.1).step()
        ours.update(out.stats)
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(ours(x).vectors).all()
    after = [part.codes() for part in ours.parts() if isinstance(part, TableQuantizer)]
    assert all(torch.equal(*pair) == name.endswith("frozen") for pair in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: peer.VectorQuantize(dim=8, codebook_size=32, accept_image_fmap=True), (2, 8, 5, 6)),
        (lambda: peer.VectorQuantize(dim=8, codebook_size=32, channel_last=False, codebook_dim=4), (2, 8, 30)),
        (lambda: peer.LFQ(codebook_size=256, dim=8, channel_first=True), (2, 8, 30)),
    ],
)
def test_channels_before_positions_are_moved_by_the_caller(module: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given, x = module().eval(), torch.randn(shape)
    with pytest.raises(ConfigError, match=r"inner=True"):
        from_vector_quantize_pytorch(given)
    ours, last = from_vector_quantize_pytorch(given, inner=True), rearrange(x, "b d ... -> b ... d")
    ids = ours(given.project_in(last) if hasattr(given, "project_in") else last).ids
    assert torch.equal(ids, given(x)[1].reshape(*ids.shape).long())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: nn.Linear(3, 3), "got a Linear, expected one of VectorQuantize"),
        (lambda: peer.VectorQuantize(dim=16, codebook_size=8, codebook_dim=4), "projects its input.*inner=True"),
        (lambda: peer.VectorQuantize(dim=4, codebook_size=8, kmeans_init=True), "kmeans init not done"),
        (lambda: peer.VectorQuantize(dim=4, codebook_size=8, affine_param=True), "affine param"),
        (lambda: peer.ResidualVQ(dim=4, codebook_size=8, num_quantizers=2, use_cosine_sim=True), "use cosine sim"),
        (lambda: peer.SimVQ(dim=4, codebook_size=8, frozen_codebook_dim=6), "transform other than a square matrix"),
        (lambda: peer.ResidualLFQ(dim=4, codebook_size=16, num_quantizers=2, spherical=True), "spherical"),
        (lambda: peer.FSQ([4, 4], orthogonal_rotation=True), "orthogonal rotation"),
        (lambda: peer.ResidualFSQ(levels=[4, 4], num_quantizers=2, dim=2, bound_hard_clamp=False), "hard clamp off"),
    ],
)
def test_what_has_no_counterpart_is_refused(module: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_vector_quantize_pytorch(module())


def test_quantize_dropout_leaves_as_many_stages() -> None:
    dropout = {"quantize_dropout": True, "quantize_dropout_cutoff_index": 2}
    module = peer.ResidualVQ(dim=4, codebook_size=8, num_quantizers=4, **dropout)
    assert from_vector_quantize_pytorch(module).least == 3


def test_noise_of_diveq_has_the_variance_of_that_library() -> None:
    settings = {"directional_reparam_variance": 0.02, "threshold_ema_dead_code": 2}
    one = peer.VectorQuantize(dim=4, codebook_size=8, directional_reparam=True, **settings)
    several = peer.ResidualVQ(dim=4, codebook_size=8, num_quantizers=2, diveq=True, rotation_trick=False)
    stage = from_vector_quantize_pytorch(several).stages[0]
    assert stage.learning == "diveq"
    stds = [each.noise.std for each in (from_vector_quantize_pytorch(one), stage)]
    default = inspect.signature(directional_reparam).parameters["noise_variance"].default
    assert stds == pytest.approx([0.02**0.5, default**0.5])
