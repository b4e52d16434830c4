"""Several codebooks side by side, several stages one after another, and the prefixes of their ids."""

import itertools

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from vqclip.errors import ConfigError, ShapeError
from vqclip.quantizers import (
    BSQ,
    FSQ,
    LFQ,
    VQ,
    Identity,
    Prefix,
    Product,
    ProductConfig,
    Quantizer,
    Residual,
    ResidualConfig,
    SimVQ,
    VQConfig,
)


@pytest.mark.parametrize("layer", [FSQ((8, 5, 5)), LFQ(5, entropy_temperature=2.0)], ids=["fsq", "lfq"])
def test_equals_one_layer_a_codebook(layer: Quantizer) -> None:
    product = Product(layer, codebooks=3)
    x = torch.randn(4, 6, product.dim, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(4, 6) > 0.3
    out = product(x, mask)
    parts = [layer(part, mask) for part in x.chunk(3, dim=-1)]
    assert torch.equal(out.vectors, torch.cat([part.vectors for part in parts], dim=-1))
    assert torch.equal(out.ids, torch.cat([part.ids for part in parts], dim=-1))
    assert product.codebook_sizes == layer.codebook_sizes * 3
    assert product.bits == pytest.approx(3 * layer.bits)
    losses, apart = product.losses(out.stats), [layer.losses(part.stats) for part in parts]
    assert product.loss_weights == layer.loss_weights
    for name, loss in losses.items():
        expected = torch.stack([losses[name] for losses in apart]).mean()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        gradients = (torch.autograd.grad(y, x, retain_graph=True) for y in (loss, expected))
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    metrics = product.metrics(out.stats)
    for codebook, part in enumerate(parts):
        for name in ("usage", "perplexity"):
            torch.testing.assert_close(metrics[f"{codebook}/{name}"], layer.metrics(part.stats)[name])


def test_every_codebook_has_codes_of_its_own() -> None:
    product = Product(VQ(2, 8), codebooks=3)
    assert len(product.layer.codebook.flatten(0, 1).unique(dim=0)) == 24
    assert Product(Product(VQ(2, 8), codebooks=3), codebooks=2).layer.layer.codebook.shape == (6, 8, 2)
    x = torch.randn(5, 6)
    for part, ids in enumerate(product(x).ids.unbind(-1)):
        distances = torch.cdist(x[:, 2 * part : 2 * part + 2], product.layer.codebook[part])
        assert torch.equal(ids, distances.argmin(dim=-1))


def test_nested_quantizers_have_a_bound() -> None:
    half = Product(FSQ((4,), "uniform"), codebooks=2**15)
    assert len(Product(half, codebooks=2).codebook_sizes) == 2**16
    with pytest.raises(ConfigError, match=r"Product: got 98304 codebooks and 98304 channels .* at most 65536 of each"):
        Product(half, codebooks=3)
    with pytest.raises(ConfigError, match="Residual: got 98304 codebooks and 32768 channels a token"):
        Residual(half, depth=3)
    nested = Residual(Product(Residual(VQ(2, 2), depth=16), codebooks=2), depth=16)
    with pytest.raises(ConfigError, match="Residual: got 512 stages, nested ones counted; expected at most 256"):
        Residual(nested, depth=2)
    with pytest.raises(ConfigError, match="Product: got 0 codebooks and 131072 channels"):
        Product(Identity(2**16), codebooks=2)


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


@pytest.mark.parametrize("shared", [False, True])
def test_a_wide_search_finds_the_nearest_sum(shared: bool) -> None:
    x = torch.randn(300, 2, 3, generator=torch.Generator().manual_seed(0))
    errors = []
    for beam in (1, 3, 5):
        torch.manual_seed(0)
        quantizer = Residual(VQ(3, 5, kmeans=False), 3, shared=shared, beam=beam)
        errors.append((x - quantizer.decode(quantizer.encode(x))).square().sum(dim=-1))
    exhaustive = Residual(VQ(3, 5, kmeans=False), 3, shared=shared, beam=25)
    exhaustive.load_state_dict(quantizer.state_dict())
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    least = torch.cdist(x.flatten(0, 1), quantizer.decode(every)).min(dim=1).values.square().view(300, 2)
    found = (x - exhaustive(x).vectors).square().sum(dim=-1)
    torch.testing.assert_close(found, least, rtol=1e-4, atol=1e-5)
    assert errors[0].mean() > errors[1].mean() > errors[2].mean() >= least.mean() - 1e-5


def test_a_shared_codebook_learns_from_every_stage() -> None:
    torch.manual_seed(0)
    quantizer = Residual(VQ(2, 8, decay=0.9, kmeans=False, dead_below=0), 3, shared=True).double()
    assert [name for name in quantizer.state_dict() if name.endswith("codebook")] == ["layers.0.codebook"]
    before = quantizer.stages[0].codebook[0].clone()
    x = torch.randn(40, 2, dtype=torch.float64)
    out = quantizer(x)
    quantizer.update(out.stats)
    left, counts, sums = x, torch.zeros(8), torch.zeros(8, 2, dtype=torch.float64)
    for ids in out.ids.unbind(-1):
        counts += ids.bincount(minlength=8)
        sums.index_add_(0, ids, left)
        left = left - before[ids]
    sizes = 0.9 * 15 + 0.1 * counts
    expected = (0.9 * 15 * before + 0.1 * sums) / sizes[:, None]
    torch.testing.assert_close(quantizer.stages[2].codebook[0], expected)


def test_dead_codes_of_a_shared_codebook_become_what_any_stage_quantizes() -> None:
    quantizer = Residual(VQ(2, 8, decay=0.5, kmeans=False, dead_below=0.9), 2, shared=True)
    x = torch.randn(100, 2)
    before = quantizer.stages[0].codebook[0].clone()
    ids = quantizer(x).ids
    left = x - before[ids[:, 0]]
    quantizer.update(quantizer(x).stats)
    places = [torch.cdist(quantizer.stages[0].codebook[0], tokens).min(dim=1).values == 0 for tokens in (x, left)]
    assert all(place.any() for place in places)


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


def test_what_cannot_be_refined_is_refused() -> None:
    for layer in (FSQ((4, 4)), FSQ((4, 4), "symmetric"), Identity(4), VQ(4, 8, cosine=True)):
        for each in (layer, Product(layer, 2)):
            with pytest.raises(ConfigError, match=f"codes of this {type(each).__name__} cannot be refined"):
                Residual(each, 2)


def test_more_stages_than_float32_has_digits_are_refused() -> None:
    with pytest.raises(ConfigError, match="depth is 23, expected at most 8"):
        Residual(FSQ((8, 8), "uniform"), 23)
    assert errors_by_depth(Residual(FSQ((8, 8), "uniform"), 8), torch.randn(100, 2))[-1] < 1e-12
    with pytest.raises(ConfigError, match="at most 24"):
        Residual(LFQ(3), 25)
    with pytest.raises(ConfigError, match="depth is 2, expected at most 1"):
        Residual(Residual(FSQ((8, 8), "uniform"), 5), 2)
    Residual(SimVQ(3, 4), 100)


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
    with pytest.raises(ConfigError, match="codebooks is 0"):
        Product(FSQ((4,)), codebooks=0)
    for depth, least in ((0, 1), (2, 3), (2, 0)):
        with pytest.raises(ConfigError, match=f"depth is {depth} and least {least}"):
            Residual(LFQ(3), depth, least=least)
    for layer, beam in ((LFQ(3), 2), (VQ(3, 4), 0)):
        with pytest.raises(ConfigError, match=f"beam is {beam}, expected 1, or more where the layer is VQ or SimVQ"):
            Residual(layer, 2, beam=beam)
    with pytest.raises(ConfigError, match="beam is 2 with dropout"):
        Residual(VQ(3, 4), 2, dropout=True, beam=2)
    for layer in (FSQ((4,), "uniform"), Product(LFQ(3), 2)):
        with pytest.raises(ConfigError, match="shared is True, .* no codebook to share; expected a .*VQ or SimVQ"):
            Residual(layer, 2, shared=True)
    with pytest.raises(ValidationError, match="no codebook to share"):
        ResidualConfig(layer={"kind": "product", "codebooks": 2, "layer": {"kind": "bsq"}}, depth=2, shared=True)
    assert ResidualConfig(layer=ProductConfig(layer=VQConfig(dim=2), codebooks=2), depth=2, shared=True).build().shared


def nested():
    return Product(Residual(Product(LFQ(3), 2), 3), 4)


def test_columns_of_nested_quantizers_by_hand():
    """Part by part, stage by stage, codebook by codebook."""
    quantizer = nested()
    assert quantizer.extent == Prefix(stages=3, codebooks=8)
    assert quantizer.places[:8] == ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 2), (0, 3))
    assert quantizer.columns(stages=1) == [0, 1, 6, 7, 12, 13, 18, 19]
    assert quantizer.columns(codebooks=3) == [0, 1, 2, 3, 4, 5, 6, 8, 10]
    assert quantizer.columns(2, 1) == [0, 2]
    assert quantizer.columns() == list(range(24))
    assert Residual(Residual(LFQ(3), 2), 3).columns(stages=4) == [0, 1, 2, 3]
    in_channel_order = Product(Product(FSQ((3,)), codebooks=2), codebooks=2)
    assert in_channel_order(torch.tensor([[-5.0, 0.0, 5.0, -5.0]])).ids.tolist() == [[0, 1, 2, 0]]


@pytest.mark.parametrize("learning", ["ema", "gradient", "ibq", "diveq"])
def test_first_stages_have_the_gradient_of_a_quantizer_of_their_own(learning):
    torch.manual_seed(0)
    x, mask = torch.randn(20, 12, requires_grad=True), torch.arange(20) % 3 > 0
    deep, alone = (Product(Residual(VQ(3, 8, learning, kmeans=False), depth), 4) for depth in (4, 2))
    shared = {name: each for name, each in deep.state_dict().items() if name in alone.state_dict()}
    alone.load_state_dict(shared)
    found, expected = deep.first_stages(x, 2, mask), alone(x, mask).vectors
    assert torch.equal(found, expected)
    assert torch.equal(found, deep.decode(deep.truncate(deep.encode(x, mask), 2)))
    weights = [[x, *quantizer.parameters()] for quantizer in (deep, alone)]
    grads = [
        torch.autograd.grad((out * torch.arange(12)).sum(), each, allow_unused=True)
        for out, each in zip((found, expected), weights, strict=True)
    ]
    assert grads[1][0].abs().sum() > 0
    for mine, theirs in zip(*grads, strict=False):
        assert mine is theirs is None or torch.equal(mine, theirs)
    assert all(each is None for each in grads[0][len(grads[1]) :])  # no code of a later stage


def test_first_stages_of_nested_stages():
    torch.manual_seed(0)
    x = torch.randn(30, 3)
    quantizer = Residual(Residual(LFQ(3), 2), 3, dropout=True).train()
    whole = quantizer.encode(x)
    for stages in range(1, 7):
        assert torch.equal(quantizer.first_stages(x, stages), quantizer.decode(quantizer.truncate(whole, stages)))
    with pytest.raises(ConfigError, match="stages: got 7, expected 1 to 6"):
        quantizer.first_stages(x, 7)
    with pytest.raises(ConfigError, match="got 1 for a FSQ of one stage; expected null, or a Residual"):
        FSQ((4, 4)).require_first_stages(1)
    with pytest.raises(ConfigError, match="got 1 for a Residual with beam"):
        Product(Residual(VQ(3, 8), 2, beam=2), 2).require_first_stages(1)


def test_left_out_codebooks_are_zero():
    torch.manual_seed(0)
    quantizer = Product(VQ(3, 16), 4).eval()
    out = quantizer(torch.randn(7, 12))
    kept = quantizer.truncate(out.ids.to(torch.uint8), codebooks=3)
    assert kept.dtype == torch.int64
    assert torch.equal(quantizer.decode(kept)[:, :9], out.vectors[:, :9])
    assert (quantizer.decode(kept)[:, 9:] == 0).all()


def test_a_prefix_that_does_not_exist_is_refused():
    for stages, codebooks, told in (
        (0, 1, "stages: got 0, expected 1 to 3"),
        (1, 9, "codebooks: got 9, expected 1 to 8"),
        (1.5, 1, "stages: got 1.5"),
        (1, True, "got True"),
    ):
        with pytest.raises(ConfigError, match=told):
            nested().columns(stages, codebooks)
    with pytest.raises(ConfigError, match="Identity has no codes"):
        Identity(4).columns(1, 1)
    with pytest.raises(ShapeError, match="one id per codebook"):
        nested().truncate(torch.zeros(2, 3, dtype=torch.int64), 1)
