"""VQ: the nearest code, the moving means, k-means, and tokens that take the place of dead codes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.quantizers.test_contract import CONFIGS
from tests.ranks import RankPool
from vqclip import dist
from vqclip.errors import ConfigError, ShapeError
from vqclip.io.tensors import module_digest
from vqclip.nn.dropout import GaussianNoise, set_dropout_keys
from vqclip.quantizers import BSQ, VQ, Quantizer, Residual, SimVQ, VQConfig
from vqclip.quantizers.gradients import rotation
from vqclip.quantizers.nearest import nearest
from vqclip.quantizers.new_codes import find_new, kmeans, replacements
from vqclip.quantizers.stats import Draw, Order, Stats, stream
from vqclip.quantizers.vq import _warn_skipped
from vqclip.towers.image import Normalize
from vqclip.train.optim import parameter_groups
from vqclip.train.step import broadcast_module


def clusters(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens around 8 corners of a cube of side 20, with a spread of 0.1; and the corners."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.cartesian_prod(*[torch.tensor([-10.0, 10.0])] * 3)
    which = torch.randint(0, 8, (tokens,), generator=generator)
    return corners[which] + 0.1 * torch.randn(tokens, 3, generator=generator), corners


@pytest.mark.parametrize("learning", ["ema", "gradient", "ibq", "diveq"])
def test_codes_go_where_the_tokens_are(learning: str) -> None:
    torch.manual_seed(0)
    quantizer = VQ(3, 32, learning=learning, dead_below=0.3, decay=0.8)
    optimizer = torch.optim.Adam(quantizer.parameters(), 0.1) if learning != "ema" else None
    for step in range(60):
        x, corners = clusters(400, step)
        out = quantizer(x)
        if optimizer:
            optimizer.zero_grad()
            losses = sum(quantizer.loss_weights[k] * v for k, v in quantizer.losses(out.stats).items())
            (losses + (out.vectors - x).square().mean()).backward()
            optimizer.step()
        quantizer.update(out.stats)
    assert torch.cdist(corners, quantizer.codebook[0]).min(dim=1).values.max() < 0.5


def test_moving_means_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    quantizer = VQ(2, 4, decay=0.9, kmeans=False, dead_below=0).double()
    codes = quantizer.codebook[0].clone()
    x = torch.randn(30, 2, dtype=torch.float64)
    ids = quantizer(x).ids[:, 0]
    quantizer.update(quantizer(x).stats)
    for code in range(4):
        mine = x[ids == code]
        size = 0.9 * 30 / 4 + 0.1 * len(mine)
        total = 0.9 * 30 / 4 * codes[code] + 0.1 * mine.sum(dim=0)
        torch.testing.assert_close(quantizer.codebook[0, code], total / size)


def test_a_dead_code_becomes_a_token_of_the_batch() -> None:
    quantizer = VQ(2, 4, kmeans=False, dead_below=0.5, decay=0.5)
    with torch.no_grad():
        quantizer.codebook[0, 3] = 1000
    x = torch.randn(50, 2)
    for _ in range(2):  # after two steps its moving count is a quarter of the average
        quantizer.update(quantizer(x).stats)
    assert (quantizer.codebook[0, 3] == x).all(dim=-1).any()
    assert quantizer.age[0, 3] == 2


def test_without_tokens_nothing_moves_and_no_code_grows_old() -> None:
    quantizer = VQ(2, 4)
    quantizer.update(quantizer(torch.randn(50, 2)).stats)
    before = {name: value.clone() for name, value in quantizer.state_dict().items()}
    quantizer.update(quantizer(torch.zeros(0, 2)).stats)
    for name, value in quantizer.state_dict().items():
        assert torch.equal(value, before[name] + (name == "step"))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1e30])
@pytest.mark.parametrize(
    "name", ["vq", "vq, plain", "vq, learned", "vq, cosine", "vq, ibq", "vq, not synchronised", "residual of vq"]
)
def test_a_token_that_is_not_finite_moves_no_code(name: str, bad: float, caplog: pytest.LogCaptureFixture) -> None:
    """One inf, such as that of a step that `GradScaler` skips, made a codebook NaN for good."""
    _warn_skipped.cache_clear()
    quantizer = CONFIGS[name].build()
    x = torch.randn(8, 64, quantizer.dim)
    x[[0, 3, 6, 7], 5, 1] = bad  # at the start, which then waits, and when codes move
    for step, tokens in enumerate(x):
        before = {key: value.clone() for key, value in quantizer.state_dict().items()}
        quantizer.update(quantizer(tokens).stats)
        after = quantizer.state_dict()
        assert all(value.isfinite().all() for value in after.values())
        if step in (0, 3, 6, 7) and (bad != 1e30 or name != "vq, cosine"):
            expected = {key: value + 1 if key.endswith("step") else value for key, value in before.items()}
            torch.testing.assert_close(dict(after), expected, rtol=0, atol=1e-6)
        else:
            assert any(not after[key].equal(value) for key, value in before.items() if key.endswith("sizes"))
    first = quantizer.parts()[-1] if len(quantizer.parts()) > 1 else quantizer
    assert isinstance(first, VQ)
    assert first.started
    if bad != 1e30 or name != "vq, cosine":
        assert first.skipped == 4
        assert caplog.text.count("contained NaN or infinity, so that it moved no code") == 1


def started_after_a_broadcast() -> list[bool]:
    found = []
    for first_has_started in (False, True):
        quantizer = VQ(2, 4)
        if (dist.rank() == 0) == first_has_started:
            quantizer.update(quantizer(torch.randn(50, 2)).stats.local())
            assert quantizer.started
        broadcast_module(quantizer)
        found.append(quantizer.started)
    return found


def test_whether_codes_have_started_is_broadcast_with_them(ranks: RankPool) -> None:
    assert ranks(2, started_after_a_broadcast) == [[False, True]] * 2


def test_the_digest_is_of_what_determines_the_outputs() -> None:
    """`skipped` counted in it; statistics of the images, which are no part of the state, must."""
    quantizer, other = VQ(2, 4), VQ(2, 4)
    for x in (torch.randn(50, 2), torch.full((50, 2), torch.nan)):
        quantizer.update(quantizer(x).stats)
    other.load_state_dict(quantizer.state_dict())
    assert module_digest(quantizer) == module_digest(other)
    assert module_digest(Normalize(8, (0.5,) * 3, (0.5,) * 3)) != module_digest(Normalize(8, (0.5,) * 3, (0.4,) * 3))


def test_statistics_of_evaluation_or_from_before_another_state_are_refused() -> None:
    quantizer = VQ(3, 8, dead_below=0.0)
    of_evaluation = quantizer.eval()(torch.randn(9, 3)).stats
    with pytest.raises(ConfigError, match="forward in evaluation mode, expected training mode"):
        quantizer.train().update(of_evaluation)
    before = quantizer(torch.randn(50, 3)).stats
    fresh = quantizer.state_dict()
    fresh = {name: value.clone() for name, value in fresh.items()}
    quantizer.update(before)
    after = quantizer(torch.randn(50, 3)).stats
    with pytest.raises(ShapeError, match="before and after an update"):
        before + after
    quantizer.load_state_dict(fresh)
    with pytest.raises(ConfigError, match="without drawn tokens"):
        quantizer.update(after)


def test_codes_do_not_decay() -> None:
    module = torch.nn.Sequential(VQ(3, 8, learning="gradient"), SimVQ(3, 8), torch.nn.Linear(3, 3))
    decayed = [name for group in parameter_groups(module, 0.1) if group["weight_decay"] for name, _ in group["params"]]
    assert decayed == ["2.weight"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: VQ(3, 8, decay=1.0), "decay is 1.0, expected a number from 0 to less than 1"),
        (lambda: VQ(3, 8, dead_below=-1.0), "dead_below is -1.0"),
        (lambda: VQ(3, 1), "codebook_size 1"),
        (lambda: VQ(1, 8, cosine=True), "VQ with cosine: got 1 channel, .* at least 2"),
        (lambda: BSQ(1), "BSQ: got 1 channel, .* at least 2"),
        (lambda: VQ(3, 8, learning="both"), "learning is 'both'"),
        (lambda: VQ(3, 8, loss_weights={"codebook": 1.0}), "codebook, but with learning: ema"),
        (lambda: VQ(3, 8, learning="gradient", loss_weights={"codebook": 0.0}), "nothing would move the codes"),
        (lambda: VQ(3, 8, learning="ibq", sync_codebook=False), "learning: ibq, but DDP averages"),
        (lambda: VQConfig(dim=3, learning="diveq", gradient="straight_through"), "learning: diveq, .* leave it out"),
        (lambda: VQConfig(dim=3, learning="ibq", noise_variance=0.1), "noise_variance is 0.1 with learning: ibq"),
        (lambda: SimVQ(3, 8, loss_weights={"codebook": 0.0}), "only that loss moves the codes"),
        (lambda: VQ(3, 8, learning="gradient", sync_codebook=False), "DDP averages the gradients of codes"),
    ],
)
def test_wrong_settings(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_blocks_start_as_simvq_and_then_move_codes_that_no_vector_has() -> None:
    torch.manual_seed(0)
    plain = SimVQ(4, 400)
    torch.manual_seed(0)
    quantizer = SimVQ(4, 400, blocks=2)
    x = torch.randn(150, 4)
    before = quantizer.codes().detach().clone()
    assert torch.equal(before, plain.codes())
    optimizer = torch.optim.Adam(quantizer.projector.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        quantizer.losses(quantizer(x).stats)["codebook"].backward()
        optimizer.step()
    assert (quantizer.codes() != before).any(dim=-1).all()
    assert all((each.grad != 0).any() for each in quantizer.projector.parameters())


def test_frozen_codes_need_no_update(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vqclip.quantizers.base.MAX_FORWARDS_WITHOUT_UPDATE", 2)
    quantizer = VQ(4, 8, learning="gradient", kmeans=False, dead_below=0).requires_grad_(False)
    for _ in range(4):
        quantizer(torch.randn(5, 4))
    assert not caplog.records


@pytest.mark.parametrize(("middle", "spread", "far"), [(100, 0.1, 100), (0, 1, 3e3), (0, 1, 1e5)])
def test_nearest_far_from_the_origin_or_beside_a_code_far_out(middle: float, spread: float, far: float) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = middle + spread * torch.randn(1, 64, 8, generator=generator)
    codes[0, 0] = far
    x = middle + spread * torch.randn(2000, 1, 8, generator=generator)
    exact = torch.cdist(x[:, 0].double(), codes[0].double()).argmin(dim=1)
    assert (nearest(x, codes)[:, 0] != exact).double().mean() < (1e-3 if middle else 1e-9)


def test_the_rotation_turns_gradients_with_the_vector() -> None:
    x, q = torch.randn(2, 20, 1, 5, dtype=torch.float64)
    x.requires_grad_()
    upstream = torch.randn(20, 1, 5, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(rotation(x, q), x, upstream)
    scale = (q.norm(dim=-1) / x.norm(dim=-1)).squeeze(-1)
    # Its angle to the vector is what the upstream gradient's to the code is, and so is its length, but for the scale.
    torch.testing.assert_close((gradient * x).sum(-1), (upstream * q).sum(-1))
    torch.testing.assert_close(gradient.norm(dim=-1).squeeze(-1), upstream.norm(dim=-1).squeeze(-1) * scale)


def require_gradients(quantizer: Quantizer, x: Tensor, upstream: Tensor, vectors: Tensor, codes: list[Tensor]) -> None:
    """Compare the gradients of vectors made by hand, at the input and at the codes."""
    expected = torch.autograd.grad(vectors, [x, *codes], upstream)
    found = torch.autograd.grad(quantizer(x).vectors, [x, *quantizer.parameters()], upstream)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat(found[1:]), torch.stack(expected[1:]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("cosine", "depth"), [(True, 1), (False, 1), (False, 2)])
def test_ibq_has_the_gradient_of_the_paper(cosine: bool, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paper's inner products where codes have equal length; token by token, as large codebooks need it."""
    monkeypatch.setattr("vqclip.quantizers.gradients.CHUNK", 1)
    stages = [VQ(5, 8, learning="ibq", cosine=cosine, kmeans=False).double() for _ in range(depth)]
    quantizer = Residual(stages[0], depth).double()
    x, upstream = torch.randn(2, 200, 5, dtype=torch.float64)
    x.requires_grad_()
    left, vectors, codebooks = F.normalize(x, dim=-1) if cosine else x, 0, []
    for stage in quantizer.stages:
        codebooks.append(stage.codebook[0].detach().clone().requires_grad_())
        codes = F.normalize(codebooks[-1], dim=-1) if cosine else codebooks[-1]
        soft = ((left @ codes.T) if cosine else -torch.cdist(left, codes).square() / 2).softmax(dim=-1)
        hard = F.one_hot(soft.argmax(dim=-1), 8).to(soft)
        vectors = vectors + (hard + soft - soft.detach()) @ codes
        left = left - (hard @ codes).detach()
    require_gradients(quantizer, x, upstream, vectors, codebooks)
    of_codes = torch.autograd.grad(quantizer(x).vectors, [*quantizer.parameters()], upstream)
    assert (of_codes[0] != 0).all(), "every code has a gradient"


def test_ibq_has_the_losses_of_the_paper_and_their_gradients() -> None:
    quantizer = VQ(5, 8, learning="ibq", kmeans=False).double()
    x = torch.randn(50, 5, dtype=torch.float64, requires_grad=True)
    codes = quantizer.codebook[0].detach().clone().requires_grad_()
    soft = (-torch.cdist(x, codes).square() / 2).softmax(dim=-1)
    hard = F.one_hot(soft.argmax(dim=-1), 8).to(soft)
    assert quantizer.loss_weights == {"commitment": 1.0, "codebook": 0.25, "index": 1.0}
    expected = {
        "commitment": (x - (hard @ codes).detach()).square().mean(),
        "codebook": (x.detach() - hard @ codes).square().mean(),
        "index": (x - (hard + soft - soft.detach()) @ codes).square().mean(),
    }
    for name, loss in quantizer.losses(quantizer(x).stats).items():
        torch.testing.assert_close(loss, expected[name])
        for mine, theirs in ((x, x), (quantizer.codebook, codes[None])):
            pair = [
                torch.autograd.grad(each, wrt, retain_graph=True, materialize_grads=True, allow_unused=True)[0]
                for each, wrt in ((loss, mine), (expected[name], codes if theirs is not x else x))
            ]
            torch.testing.assert_close(pair[0].view_as(pair[1]), pair[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ibq_compiled_under_autocast_has_the_gradient_of_float32(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    quantizer = VQ(5, 8, learning="ibq", kmeans=False)
    x, upstream = torch.randn(2, 200, 5)
    x.requires_grad_()
    found = []
    for run, enabled in ((quantizer, False), (torch.compile(quantizer, fullgraph=True, backend="aot_eager"), True)):
        with torch.autocast("cpu", dtype, enabled=enabled):
            out = run(x)
            loss = (out.vectors * upstream).sum() + sum(quantizer.losses(out.stats).values())
        found.append(torch.autograd.grad(loss, [x, quantizer.codebook]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("noisy", [True, False])
def test_diveq_has_the_gradient_of_the_paper(depth: int, noisy: bool) -> None:
    """And an error that the noise turns by a few degrees; without keys by none."""
    variance = 1e-3 if depth == 1 else 2e-3
    layer = VQ(5, 8, learning="diveq", kmeans=False, noise_variance=None if depth == 1 else variance)
    quantizer = Residual(layer, depth).double()
    x, upstream = torch.randn(2, 40, 5, 5, dtype=torch.float64)
    x.requires_grad_()
    noise = torch.zeros(())
    if noisy:
        set_dropout_keys(quantizer, 1, 2, torch.arange(40) + 7)
        noise = quantizer.stages[0].noise(x)
        assert abs(noise.std() ** 2 / variance - 1) < 0.2
        assert abs(noise.mean()) < 0.003
    codebooks = [stage.codebook[0].detach().clone().requires_grad_() for stage in quantizer.stages]
    ids = quantizer(x).ids.unbind(-1)
    error = sum(codes[each] for codes, each in zip(codebooks, ids, strict=True)) - x
    vectors = x + error.norm(dim=-1, keepdim=True) * F.normalize(error + noise, dim=-1).detach()
    assert (torch.equal(vectors, quantizer(x).vectors) or (vectors - quantizer(x).vectors).abs().max() < 1e-9) != noisy
    require_gradients(quantizer, x, upstream, vectors, codebooks)


def test_noise_depends_on_the_place_of_the_sample_and_not_on_padding() -> None:
    noise, x = GaussianNoise(1.0), torch.zeros(4 * 6, 2, 3, dtype=torch.float64)
    holder = torch.nn.Sequential(noise)
    set_dropout_keys(holder, 0, 5, torch.arange(4))
    whole = noise(x).view(4, 6, 2, 3)
    assert len(whole.unique()) == whole.numel()
    set_dropout_keys(holder, 0, 5, torch.tensor([3, 1]))
    assert torch.equal(noise(x[: 2 * 4]).view(2, 4, 2, 3), whole[[3, 1], :4])
    set_dropout_keys(holder, 0, 6, torch.arange(4))
    assert not torch.equal(noise(x).view(4, 6, 2, 3), whole)
    with pytest.raises(ShapeError, match="got 23 rows with the keys of 4 samples, expected the same number of tokens"):
        noise(x[:23])
    assert noise.eval()(x) is None


def test_a_compiled_search_computes_a_limited_number_of_scores(monkeypatch) -> None:
    """As many at a time as an eager one, with its ids; the backend runs the graph as it is."""
    monkeypatch.setattr("vqclip.quantizers.nearest.CHUNK", 64 * 2 * 128)
    x, codes = torch.randn(300, 2, 4), torch.randn(2, 128, 4)
    expected, shapes, product = nearest(x, codes), [], torch.baddbmm

    def recording(*args, **kwargs):
        shapes.append(tuple((result := product(*args, **kwargs)).shape))
        return result

    monkeypatch.setattr(torch, "baddbmm", recording)
    assert torch.equal(torch.compile(nearest, fullgraph=True, backend="eager")(x, codes), expected)
    assert shapes == [(2, rows, 128) for rows in (64, 64, 64, 64, 44)]


def drawn(count: int, keep: torch.Tensor, step: int = 0, flat: bool = False) -> list[int]:
    """The numbers of the tokens that `count` draws from samples ``(B, T)`` yield."""
    samples = len(keep)
    vectors = torch.arange(1.0, 1 + keep.numel()).view(-1, 1, 1)
    draw = Draw(stream(3, torch.tensor(step)), count, vectors, keep.flatten())
    sums = Stats({}, {"x": draw}).sync(None if flat else Order(torch.arange(samples), samples))
    present = sums["x/present"].flatten() > 0
    return sums["x/vectors"].flatten()[present].long().sub(1).tolist()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 16, 40, 200])
@pytest.mark.parametrize(("samples", "tokens"), [(1, 30), (5, 6), (30, 1)])
def test_no_token_is_drawn_twice(count: int, samples: int, tokens: int, flat: bool) -> None:
    keep = torch.rand(samples, tokens, generator=torch.Generator().manual_seed(count)) < 0.7
    real = keep.flatten().nonzero().flatten().tolist()
    for step in range(5):
        found = drawn(count, keep, step, flat)
        assert len(set(found)) == len(found) <= count
        assert set(found) <= set(real)
        if flat or count == 200:
            assert len(found) == min(count, len(real))


@pytest.mark.parametrize(("samples", "tokens", "count"), [(1, 24, 6), (24, 1, 6), (5, 5, 12)])
def test_every_token_has_the_same_chance(samples: int, tokens: int, count: int) -> None:
    rounds, size = 500, samples * tokens
    found = torch.tensor([drawn(count, torch.ones(samples, tokens).bool(), step) for step in range(rounds)])
    chance = count / size
    deviation = (found.flatten().bincount(minlength=size) - rounds * chance) / (rounds * chance * (1 - chance)) ** 0.5
    assert deviation.abs().max() < 4.5  # of standard deviations: a fair draw exceeds it once in 6,000 runs


def fresh(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_token_that_equals_a_code_or_another_token_takes_no_place() -> None:
    codes = fresh(1, 8, 3)
    tokens = torch.cat((codes[:, [2, 5]], fresh(1, 3, 3, seed=1).repeat(1, 4, 1)), dim=1)
    tokens = tokens * (1 + 1e-7 * fresh(1, 14, 1, seed=2))  # as it comes from another process
    present, dead = torch.ones(14).bool(), torch.ones(1, 8).bool()
    new, replaced = replacements(codes, dead, tokens, present)
    assert replaced.sum() == 3
    assert torch.cdist(new, new).add(torch.eye(8)).min() > 1e-3
    assert not replacements(codes, dead, tokens, ~present)[1].any()


@pytest.mark.parametrize(("width", "offset"), [(1, 0.0), (16, 10.0), (64, 0.0), (64, 10.0)])
def test_the_same_among_thousands_is_found(width: int, offset: float) -> None:
    """Off the middle as well, where a third vector comes between two on a line."""
    once = offset + fresh(1, 4096, width)
    if width == 1:
        once = torch.linspace(1, 2, 4096).view(1, -1, 1)
    again = once * (1 + 1e-7 * fresh(1, 4096, 1, seed=1))
    tokens = torch.cat((once, again), dim=1)[:, torch.randperm(8192, generator=torch.Generator().manual_seed(2))]
    found = find_new(tokens, torch.ones(8192).bool(), tokens[:, :0])
    assert found.sum() == 4096


@pytest.mark.parametrize("distinct", [5, 10])
def test_rounding_does_not_decide_where_codes_outnumber_tokens(distinct: int) -> None:
    """K-means, too, makes no two codes of one token, which another number of processes rounds differently."""
    x = fresh(1, distinct, 4).repeat(6, 1, 1).flatten(0, 1)
    noise = 1 + 6e-8 * fresh(len(x), 1, seed=1)
    _, members, placed = kmeans(x[None], 16)
    assert placed.sum() == distinct
    assert (members[placed] == 6).all()
    both = [VQ(4, 16, decay=0.8, dead_below=0.5) for _ in range(2)]
    both[1].load_state_dict(both[0].state_dict())
    for _ in range(5):
        for quantizer, tokens in zip(both, (x, x * noise), strict=True):
            quantizer.update(quantizer(tokens).stats)
        torch.testing.assert_close(both[0].sizes, both[1].sizes)
        torch.testing.assert_close(both[0].codebook, both[1].codebook)
