"""Heads over several codebooks: which codes a prediction sees, what it can learn, and how it draws."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from vqclip.errors import ConfigError, ShapeError
from vqclip.lm_vocabulary import CodesEmbedding, CodesHeadConfig, MaskedBitsHeadConfig

SIZES = (4, 8, 2)
KINDS = ("parallel", "depth", "bits")


def head(kind, sizes=SIZES, width=16, **options):
    torch.manual_seed(0)
    if kind == "bits":
        small = {"inner_width": 32, "layers": 1, "steps": 6}
        return MaskedBitsHeadConfig(codebook_sizes=sizes, width=width, **small | options).build()
    small = {"depth_width": 16, "depth_layers": 1, "depth_heads": 2}
    return CodesHeadConfig(kind=kind, codebook_sizes=sizes, width=width, **small | options).build()


def codes(shape=(2, 4), sizes=SIZES):
    draws = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(size, shape, generator=draws) for size in sizes], dim=-1)


@pytest.mark.parametrize("kind", ["parallel", "depth"])
def test_a_code_is_predicted_from_earlier_codebooks_alone(kind):
    model, ids, hidden = head(kind), codes(), torch.randn(2, 4, 16)
    before = model.logits(hidden, ids)
    for changed in range(3):
        other = ids.clone()
        other[..., changed] = (other[..., changed] + 1) % SIZES[changed]
        after = model.logits(hidden, other)
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert same == [kind == "parallel" or c <= changed for c in range(3)]


def every_token(sizes):
    return torch.cartesian_prod(*[torch.arange(size) for size in sizes])


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        ("parallel", SIZES, {}),
        ("depth", SIZES, {}),
        *[("bits", SIZES, {"steps": steps}) for steps in (1, 2, 4, 100)],
        *[("bits", (12, 12), {"levels": (4, 3), "steps": steps}) for steps in (1, 3, 4)],
    ],
)
def test_probabilities_of_all_tokens_sum_to_one(kind, sizes, options):
    model, every = head(kind, sizes, **options).eval(), every_token(sizes)
    hidden = torch.randn(16)
    nats = model.nats(hidden.expand(len(every), 1, 16), every[:, None]).sum(dim=(1, 2))
    assert nats.neg().exp().sum().item() == pytest.approx(1, abs=1e-5)
    drawn = model.sample(hidden.expand(20_000, 16), seed=0)
    places = (drawn[:, None] == every).all(dim=-1).float()
    assert (places.sum(dim=1) == 1).all()
    # The loss is that of what is drawn: the mean over draws is the entropy, within five standard errors.
    error = 5 * nats.std().item() / 20_000**0.5
    assert (places @ nats).mean().item() == pytest.approx((nats.neg().exp() @ nats).item(), abs=error)


@pytest.mark.parametrize("kind", KINDS)
def test_absent_codes_are_not_predicted(kind):
    model, ids, hidden = head(kind).eval(), codes(), torch.randn(2, 4, 16)
    ids[1, 2:] = -1
    ids[0, 0, 2] = -1  # a dropped stage
    nats = model.nats(hidden, ids)
    assert ((nats == 0) == (ids < 0)).all()
    if kind != "bits":
        assert model(hidden, ids).item() == pytest.approx(nats.sum().item() / (ids >= 0).sum().item())
    assert model(hidden, torch.full_like(ids, -1), *[0] * (kind == "bits")) == 0


def test_the_training_loss_of_bits_is_a_keyed_estimate_of_the_nats():
    """For a head that does not read bits, the loss is the same in any order."""
    model, ids, hidden = head("bits", masks="random").eval(), codes((4, 50)), torch.randn(4, 50, 16)
    ids[2, 10:], ids[0, :, 1] = -1, -1
    torch.nn.init.zeros_(model.digits_in.weight)
    each = torch.stack([model(hidden, ids, seed) for seed in range(50)])
    expected = model.nats(hidden, ids).sum() / (ids >= 0).sum()
    torch.testing.assert_close(each.mean(), expected, rtol=0, atol=(5 * each.std() / 50**0.5).item())
    assert each[3] == model(hidden, ids, 3) != each[4]


def test_bits_are_hidden_from_any_on_or_at_random():
    """One token of 6 bits: 6 losses, or one of each of the sets that are not all of them."""
    for masks, count in (("first", range(6, 7)), ("random", range(20, 64))):
        model, ids, hidden = head("bits", masks=masks).eval(), codes((1, 1)), torch.randn(1, 1, 16)
        assert len({round(model(hidden, ids, seed).item(), 5) for seed in range(200)}) in count


@pytest.mark.parametrize(
    ("kind", "options", "learns"),
    [("parallel", {}, False), ("depth", {}, True), ("bits", {}, True), ("bits", {"steps": 1}, False)],
)
def test_only_heads_that_see_earlier_codes_learn_that_two_are_equal(kind, options, learns):
    """The second code repeats the first, a uniform draw: half the nats for a head that sees it."""
    torch.manual_seed(0)
    model = head(kind, (4, 4), **options)
    hidden, first = torch.zeros(256, 1, 16), torch.randint(4, (256, 1))
    ids = torch.stack([first, first], dim=-1)
    losses = []
    for step in range(200 if kind == "bits" else 60):
        losses.append(model(hidden, ids, *[step] * (kind == "bits")))
        gradients = torch.autograd.grad(2 * losses[-1], list(model.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight.sub_((0.003 if kind == "bits" else 0.01) * gradient.sign())
    least = math.log(4) * (1 if learns else 2)
    assert model.nats(hidden, ids).sum(dim=(1, 2)).mean().item() == pytest.approx(least, abs=0.1)
    if kind == "bits":  # hidden bits are not read in training either, or this would be nearly 0
        # Of bits a0 b0 a1 b1 0 to 3 are known; of the others 4 of 4, 2 of 3, 2 of 2 and 0 of 1 are uncertain.
        bits = (4 + 4 * 2 / 3 + 4 + 0) / 4
        assert 2 * torch.stack(losses[-40:]).mean().item() == pytest.approx(bits * math.log(2), abs=0.2)
    drawn = model.sample(hidden[:, 0], seed=0)
    assert ((drawn[:, 0] == drawn[:, 1]).float().mean() > 0.9) == learns


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_keyed(kind):
    model, hidden = head(kind).eval(), torch.randn(1, 16).expand(400, 16)
    drawn = model.sample(hidden, seed=1, token=2)
    assert torch.equal(drawn, model.sample(hidden, seed=1, token=2))
    assert not torch.equal(drawn, model.sample(hidden, seed=1, token=3))
    assert not torch.equal(drawn, model.sample(hidden, seed=2, token=2))
    every = every_token(SIZES)
    p = model.nats(hidden[: len(every), None], every[:, None]).sum(dim=(1, 2)).neg().exp().view(SIZES).sum(dim=(1, 2))
    likeliest = model.sample(hidden[:2], seed=1, temperature=0)
    assert torch.equal(likeliest[0], likeliest[1])
    assert kind == "bits" or likeliest[0, 0] == p.argmax()


@pytest.mark.parametrize("kind", KINDS)
def test_guidance_moves_from_the_second_half_to_the_first_and_beyond(kind):
    model, (given, free) = head(kind).eval(), torch.randn(2, 300, 16)
    both = torch.cat([given, free])
    assert torch.equal(model.sample(both, seed=1, guidance=0), model.sample(free, seed=1))
    assert torch.equal(model.sample(both, seed=1, guidance=1 + 1e-9), model.sample(given, seed=1))

    def nats(states, guidance):
        drawn = model.sample(both, seed=1, guidance=guidance)
        return model.nats(states[:, None], drawn[:, None]).sum() - model.nats(free[:, None], drawn[:, None]).sum()

    assert nats(given, 4) < nats(given, 1 + 1e-9) < nats(given, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_feeds_every_token_back(kind):
    model, seen = head(kind).eval(), []

    def hidden_after(ids):
        seen.append(ids)
        return torch.ones(3, 16) * ids.shape[1]

    made = model.generate(hidden_after, samples=3, tokens=4, seed=0)
    assert made.shape == (3, 4, 3)
    assert all(torch.equal(ids, made[:, :t]) for t, ids in enumerate(seen))
    assert torch.equal(made, model.generate(hidden_after, samples=3, tokens=4, seed=0))


def test_embedding_sums_its_codes_and_leaves_absent_ones_out():
    torch.manual_seed(0)
    embedding, ids = CodesEmbedding(SIZES, 8), codes()
    rows = embedding.table.weight
    expected = rows[ids[..., 0]] + rows[4 + ids[..., 1]] + rows[12 + ids[..., 2]]
    torch.testing.assert_close(embedding(ids), expected)
    ids[0, 0] = -1
    assert (embedding(ids)[0, 0] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_into_one_graph(kind):
    model, ids, hidden = head(kind), codes(), torch.randn(2, 4, 16)
    seed = [3] * (kind == "bits")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, ids, *seed), model(hidden, ids, *seed))
    compiled = torch.compile(model.nats, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, ids), model.nats(hidden, ids))


@pytest.mark.parametrize("masks", ["first", "random"])
def test_padding_changes_no_hidden_digit(masks):
    model, ids, hidden = head("bits", masks=masks), codes(), torch.randn(2, 4, 16)
    padded = model(F.pad(hidden, (0, 0, 0, 2)), F.pad(ids, (0, 0, 0, 2), value=-1), 5)
    torch.testing.assert_close(padded, model(hidden, ids, 5))
    assert model(hidden, ids, 6) != model(hidden, ids, 5)


def test_impossible_values_are_never_drawn():
    model = head("bits", (12,) * 3, levels=(4, 3)).eval()
    for temperature, guidance in ((1e6, 1.0), (1e6, 3.0)):
        drawn = model.sample(torch.randn(200, 16), seed=0, temperature=temperature, guidance=guidance)
        assert drawn.min() == 0
        assert drawn.max() == 11


def test_one_codebook_and_many_codes():
    assert head("depth", (6,)).sample(torch.randn(2, 16), seed=0).shape == (2, 1)
    model = head("bits", (2**63,) * 2).eval()
    drawn = model.sample(torch.randn(64, 16), seed=0)
    assert (drawn >= 0).all()
    assert drawn.max() > 2**62
    assert (model.nats(torch.randn(64, 1, 16), drawn[:, None]).sum(dim=-1) > 63).all()
    with pytest.raises(ShapeError, match=r"rows: got 4294967296 .* Product of smaller codebooks"):
        head("parallel", (2**32,))


@pytest.mark.parametrize(
    ("hidden", "ids", "message"),
    [
        (torch.zeros(2, 4, 15), codes(), r"hidden: got shape \(2, 4, 15\), expected \(2, 4, 16\)"),
        (torch.zeros(2, 3, 16), codes(), r"hidden: got shape \(2, 3, 16\)"),
        (torch.zeros(2, 4, 16), codes() + 5, r"ids.*expected codebook"),
        (torch.zeros(2, 4, 16), codes()[..., :2], "expected .B, N, 3."),
    ],
)
def test_wrong_shapes_are_told(hidden, ids, message):
    for kind in KINDS:
        with pytest.raises(ShapeError, match=message):
            head(kind).nats(hidden, ids)


def test_wrong_settings_are_told():
    with pytest.raises(ValidationError, match="expected heads that divide"):
        head("depth", depth_heads=3)
    with pytest.raises(ValidationError, match="levels null, which is bits, for a codebook of 12 codes"):
        head("bits", (4, 12))
    with pytest.raises(ValidationError, match=r"levels \[4, 2\], of 8 codes, for a codebook of 12"):
        head("bits", (12,), levels=(4, 2))
    with pytest.raises(ShapeError, match="rows: got"):
        head("bits", (1000**3,) * 2000, levels=(1000,) * 3)
    for shape, guidance, expected in (((1, 16), 2, "(2B, 16)"), ((2, 15), 1, "(B, 16)"), ((2, 1, 16), 1, "(B, 16)")):
        with pytest.raises(ShapeError, match=re.escape(f"hidden: got shape {shape}, expected {expected}")):
            head("bits").sample(torch.zeros(shape), seed=0, guidance=guidance)
    with pytest.raises(ConfigError, match="temperature: got -1"):
        head("depth").sample(torch.zeros(1, 16), seed=0, temperature=-1)
