"""The head over several codebooks: which codes a prediction sees, what it can learn, and how it draws."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from vqclip.errors import ConfigError, ShapeError
from vqclip.lm_vocabulary import CodesEmbedding, CodesHeadConfig

SIZES = (5, 7, 3)
KINDS = ("parallel", "depth")


def head(kind, sizes=SIZES, width=16, **options):
    torch.manual_seed(0)
    small = {"depth_width": 16, "depth_layers": 1, "depth_heads": 2}
    return CodesHeadConfig(kind=kind, codebook_sizes=sizes, width=width, **small | options).build()


def codes(shape=(2, 4), sizes=SIZES):
    draws = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(size, shape, generator=draws) for size in sizes], dim=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_is_predicted_from_earlier_codebooks_alone(kind):
    model, ids, hidden = head(kind), codes(), torch.randn(2, 4, 16)
    before = model.logits(hidden, ids)
    for changed in range(3):
        other = ids.clone()
        other[..., changed] = (other[..., changed] + 1) % SIZES[changed]
        after = model.logits(hidden, other)
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert same == [kind == "parallel" or c <= changed for c in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_of_all_tokens_sum_to_one(kind):
    model, sizes = head(kind), SIZES
    every = torch.cartesian_prod(*[torch.arange(size) for size in sizes])[:, None]
    hidden = torch.randn(1, 1, 16).expand(len(every), 1, 16)
    assert model.nats(hidden, every).sum(dim=(1, 2)).neg().exp().sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_absent_codes_are_not_predicted(kind):
    model, ids, hidden = head(kind), codes(), torch.randn(2, 4, 16)
    ids[1, 2:] = -1
    ids[0, 0, 2] = -1  # a dropped stage
    nats = model.nats(hidden, ids)
    assert ((nats == 0) == (ids < 0)).all()
    assert model(hidden, ids).item() == pytest.approx(nats.sum().item() / (ids >= 0).sum().item())
    assert model(hidden, torch.full_like(ids, -1)) == 0


@pytest.mark.parametrize(("kind", "least"), [("parallel", math.log(4) * 2), ("depth", math.log(4))])
def test_only_depth_learns_that_two_codes_are_equal(kind, least):
    """The second code repeats the first, a uniform draw: half the nats for a head that sees it."""
    torch.manual_seed(0)
    model = head(kind, (4, 4))
    hidden, first = torch.zeros(256, 1, 16), torch.randint(4, (256, 1))
    ids = torch.stack([first, first], dim=-1)
    for _ in range(60):
        loss = model.nats(hidden, ids).sum(dim=(1, 2)).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight.sub_(0.01 * gradient.sign())
    assert loss.item() == pytest.approx(least, abs=0.1)
    drawn = model.sample(hidden[:, 0], seed=0)
    assert ((drawn[:, 0] == drawn[:, 1]).float().mean() > 0.9) == (kind == "depth")


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_keyed_and_follow_the_probabilities(kind):
    model = head(kind).eval()
    hidden = torch.randn(1, 16).expand(4000, 16)
    drawn = model.sample(hidden, seed=1, token=2)
    assert torch.equal(drawn, model.sample(hidden, seed=1, token=2))
    assert not torch.equal(drawn, model.sample(hidden, seed=1, token=3))
    assert not torch.equal(drawn, model.sample(hidden, seed=2, token=2))
    expected = model.logits(hidden[:1, None], drawn[:1, None])[0].softmax(dim=-1).flatten()
    torch.testing.assert_close(drawn[:, 0].bincount(minlength=5) / 4000, expected, atol=0.03, rtol=0)
    likeliest = model.sample(hidden[:2], seed=1, temperature=0)
    assert torch.equal(likeliest[0], likeliest[1])
    assert likeliest[0, 0] == expected.argmax()


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
    expected = rows[ids[..., 0]] + rows[5 + ids[..., 1]] + rows[12 + ids[..., 2]]
    torch.testing.assert_close(embedding(ids), expected)
    ids[0, 0] = -1
    assert (embedding(ids)[0, 0] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_into_one_graph(kind):
    model, ids, hidden = head(kind), codes(), torch.randn(2, 4, 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, ids), model(hidden, ids))


def test_one_codebook_and_many_codes():
    assert head("depth", (6,)).sample(torch.randn(2, 16), seed=0).shape == (2, 1)
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
    with pytest.raises(ShapeError, match=message):
        head("depth").logits(hidden, ids)


def test_wrong_settings_are_told():
    with pytest.raises(ValidationError, match="expected heads that divide"):
        head("depth", depth_heads=3)
    with pytest.raises(ConfigError, match="temperature: got -1"):
        head("depth").sample(torch.zeros(1, 16), seed=0, temperature=-1)
