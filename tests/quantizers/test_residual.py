from __future__ import annotations

import itertools

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from vqclip.errors import ConfigError
from vqclip.quantizers import BSQ, FSQ, LFQ, VQ, Identity, Product, Quantizer, Residual, ResidualConfig, SimVQ, VQConfig


def skewed(tokens: int = 1000) -> Tensor:
    """Off centre, and much wider along some channels than along others."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, 8, generator=generator) * torch.tensor([3, 2, 1, 1, 0.5, 0.2, 0.1, 0.05]) + 2


def errors_by_depth(quantizer: Residual, x: Tensor) -> list[float]:
    ids = quantizer.encode(x)
    columns = ids.shape[-1] // quantizer.depth
    stage = torch.arange(ids.shape[-1]) // columns
    bounded = quantizer.continuous(x)
    return [
        float((bounded - quantizer.decode(ids.masked_fill(stage >= depth, -1))).square().mean())
        for depth in range(1, quantizer.depth + 1)
    ]


@pytest.mark.parametrize(
    "layer",
    [FSQ((8, 5, 2), "uniform"), FSQ((3,) * 8, "uniform"), LFQ(8), BSQ(8), Product(LFQ(4), 2)],
    ids=["fsq", "fsq of 3", "lfq", "bsq", "product"],
)
def test_every_stage_refines(layer: Quantizer) -> None:
    quantizer = Residual(layer, 5)
    x = torch.randn(1000, quantizer.dim, generator=torch.Generator().manual_seed(0))
    errors = errors_by_depth(quantizer, x.tanh() if isinstance(layer, (LFQ, Product)) else x)
    assert all(after < 0.6 * before for before, after in itertools.pairwise(errors))


def test_stages_start_one_after_another_on_what_is_left() -> None:
    torch.manual_seed(0)
    quantizer = Residual(VQ(8, 64, dead_below=0), 4)
    started = []
    for _ in range(4):
        quantizer.update(quantizer(skewed()).stats)
        started.append([stage.started for stage in quantizer.stages])
    assert started == [[i <= step for i in range(4)] for step in range(4)]
    errors = errors_by_depth(quantizer, skewed())
    assert all(after < 0.6 * before for before, after in itertools.pairwise(errors))
    assert errors[-1] < 0.15


def test_dropout_draws_every_depth_and_leaves_the_rest_out() -> None:
    quantizer = Residual(LFQ(6, 1.0), 4, dropout=True, least=2)
    quantizer.set_seed(0)
    x = torch.randn(50, 6)
    whole = quantizer.eval()(x)
    assert (whole.ids >= 0).all()
    quantizer.train()
    depths = []
    for _ in range(40):
        out = quantizer(x)
        depth = int((out.ids[0] >= 0).sum())
        depths.append(depth)
        assert torch.equal(out.ids[:, :depth], whole.ids[:, :depth])
        assert (out.ids[:, depth:] == -1).all()
        assert torch.equal(quantizer.decode(out.ids), out.vectors)
        assert out.stats[f"{depth - 1}/tokens"] == 50
        assert depth == 4 or out.stats[f"{depth}/tokens"] == 0
        again = quantizer(x)
        assert torch.equal(again.ids, out.ids), "the draw belongs to the step"
        assert torch.equal(checkpoint(quantizer, x, use_reentrant=False).ids, out.ids)
        quantizer.update(out.stats)
    assert set(depths) == {2, 3, 4}


def test_dropout_compiles_to_one_graph_for_all_depths() -> None:
    torch._dynamo.reset()
    quantizer = Residual(VQ(4, 8, kmeans=False), 3, dropout=True)
    frames = CompileCounter()
    compiled = torch.compile(quantizer, fullgraph=True, backend=frames)
    x = torch.randn(20, 4)
    depths = set()
    for _ in range(10):
        out = compiled(x)
        assert torch.equal(out.ids, quantizer(x).ids)
        depths.add(int((out.ids[0] >= 0).sum()))
        quantizer.update(out.stats)
    assert depths == {1, 2, 3}
    assert frames.frame_count == 1


def test_layers_and_seeds_draw_apart() -> None:
    pair = Product(Residual(VQ(2, 4), 5, dropout=True), 2), Residual(VQ(2, 4), 5, dropout=True)
    for quantizer, seed in zip(pair, (0, 1), strict=True):
        quantizer.set_seed(seed)
    keys = {module.key for quantizer in pair for module in quantizer.modules() if isinstance(module, Quantizer)}
    assert len(keys) > 10


def test_health_is_that_of_the_stages_that_took_part() -> None:
    quantizer = Residual(LFQ(3, 1.0), 3, dropout=True)
    x = torch.randn(500, 3)
    while (out := quantizer(x)).ids[0, 1] >= 0:  # until one stage is drawn
        quantizer.step.add_(1)
    alone = quantizer.metrics(out.stats)
    assert alone["usage"] == alone["0/usage"] == 1
    assert alone["bits_used"] == alone["0/bits_used"]
    whole = quantizer.metrics(quantizer.eval()(x).stats)
    torch.testing.assert_close(whole["bits_used"], sum(whole[f"{i}/bits_used"] for i in range(3)))
    vq = Residual(VQ(3, 16), 2)
    vq.stages[0].age[0, 3], vq.stages[1].age[0, 5] = 7, 4
    assert vq.metrics(vq(x).stats)["oldest"] == 7


@pytest.mark.parametrize(
    ("layer", "name"),
    [(FSQ((4, 4)), "FSQ"), (FSQ((4, 4), "symmetric"), "FSQ"), (Identity(4), "Identity"), (VQ(4, 8, cosine=True), "VQ")],
)
def test_what_cannot_be_refined_is_refused(layer: Quantizer, name: str) -> None:
    with pytest.raises(ConfigError, match=f"codes of this {name} cannot be refined"):
        Residual(layer, 2)
    with pytest.raises(ConfigError, match="codes of this Product cannot be refined"):
        Residual(Product(layer, 2), 2)


def test_more_stages_than_float32_has_digits_are_refused() -> None:
    with pytest.raises(ConfigError, match="depth is 23, expected at most 8"):
        Residual(FSQ((8, 8), "uniform"), 23)
    assert errors_by_depth(Residual(FSQ((8, 8), "uniform"), 8), torch.randn(100, 2))[-1] < 1e-12
    with pytest.raises(ConfigError, match="at most 24"):
        Residual(LFQ(3), 25)
    with pytest.raises(ConfigError, match="depth is 2, expected at most 1"):
        Residual(Residual(FSQ((8, 8), "uniform"), 5), 2)
    Residual(SimVQ(3, 4), 100)


def test_different_ids_are_different_vectors_at_the_last_depth() -> None:
    quantizer = Residual(LFQ(1), 24)
    ids = torch.randint(0, 2, (20_000, 24), generator=torch.Generator().manual_seed(0))
    assert len(quantizer.decode(ids).unique()) == len(ids.unique(dim=0))


@pytest.mark.parametrize("layer", [FSQ((4, 4)), VQ(4, 8, cosine=True)], ids=["fsq", "vq, cosine"])
def test_one_stage_is_the_layer(layer: Quantizer) -> None:
    quantizer = Residual(layer, 1)
    quantizer.layers[0].load_state_dict(layer.state_dict())
    x = torch.randn(30, layer.dim)
    assert torch.equal(quantizer(x).vectors, layer(x).vectors)


def test_stages_that_start_one_by_one_compile_once_and_draw_in_turn() -> None:
    torch._dynamo.reset()
    quantizer = Residual(VQ(4, 8), 5)
    frames = CompileCounter()
    compiled = torch.compile(quantizer, fullgraph=True, backend=frames)
    for step in range(7):
        stats = compiled(torch.randn(200, 4)).stats
        assert [int(draw.count) for draw in stats.draws.values()] == [64 if i == step else 8 for i in range(5)]
        quantizer.update(stats)
        if step == 2:
            quantizer.load_state_dict(quantizer.state_dict())
    assert quantizer.started
    assert frames.frame_count == 1


def test_wrong_numbers() -> None:
    for depth, least in ((0, 1), (2, 3), (2, 0)):
        with pytest.raises(ConfigError, match=f"depth is {depth} and least {least}"):
            Residual(LFQ(3), depth, least=least)
    with pytest.raises(ValidationError, match="depth is 2 and least 5"):
        ResidualConfig(layer=VQConfig(dim=2), depth=2, least=5)
