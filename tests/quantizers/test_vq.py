from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.quantizers.test_contract import CONFIGS
from tests.ranks import RankPool
from vqclip import dist
from vqclip.errors import ConfigError, ShapeError
from vqclip.io.tensors import module_digest
from vqclip.quantizers import BSQ, VQ, ResidualConfig, SimVQ, SimVQConfig, VQConfig, VQLossWeights
from vqclip.quantizers.vq import _warn_skipped
from vqclip.towers.image import Normalize
from vqclip.train.optim import parameter_groups
from vqclip.train.step import broadcast_module
from vqclip.train.tasks.base import Task


def clusters(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens around 8 corners of a cube of side 20, with a spread of 0.1; and the corners."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.cartesian_prod(*[torch.tensor([-10.0, 10.0])] * 3)
    which = torch.randint(0, 8, (tokens,), generator=generator)
    return corners[which] + 0.1 * torch.randn(tokens, 3, generator=generator), corners


@pytest.mark.parametrize("learning", ["ema", "gradient"])
def test_codes_go_where_the_tokens_are(learning: str) -> None:
    torch.manual_seed(0)
    quantizer = VQ(3, 32, learning=learning, dead_below=0.3, decay=0.8)
    optimizer = torch.optim.Adam(quantizer.parameters(), 0.1) if learning == "gradient" else None
    for step in range(60):
        x, corners = clusters(400, step)
        out = quantizer(x)
        if optimizer:
            optimizer.zero_grad()
            sum(quantizer.loss_weights[k] * v for k, v in quantizer.losses(out.stats).items()).backward()
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
    "name", ["vq", "vq, plain", "vq, learned", "vq, cosine", "vq, not synchronised", "residual of vq"]
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


def test_kmeans_waits_for_tokens() -> None:
    quantizer = VQ(2, 4)
    quantizer.update(quantizer(torch.zeros(0, 2)).stats)
    assert not quantizer.started
    quantizer.update(quantizer(torch.randn(50, 2)).stats)
    assert quantizer.started


def test_a_loaded_codebook_is_not_started_again() -> None:
    trained, other = VQ(2, 4), VQ(2, 4)
    trained.update(trained(torch.randn(50, 2)).stats)
    for mine, theirs in zip(other.buffers(), trained.buffers(), strict=True):
        mine.copy_(theirs)  # not by load_state_dict
    before = other.codebook.clone()
    other.update(other(torch.randn(50, 2)).stats)
    assert (other.codebook - before).abs().max() < 1


def test_a_codebook_stored_as_started_is_not_started_again() -> None:
    """The first update of codes without k-means, loaded before they were trained, replaced them all."""
    stored = VQ(2, 4, kmeans=False)
    loaded, fresh = VQ(2, 4), VQ(2, 4).state_dict()
    loaded.load_state_dict(stored.state_dict())
    assert loaded.started
    for _ in range(2):
        x = torch.randn(50, 2)
        for each in (stored, loaded):
            each.update(each(x).stats)
    torch.testing.assert_close(loaded.state_dict(), stored.state_dict(), rtol=0, atol=0)
    loaded.load_state_dict(fresh)
    assert not loaded.started


def started_after_a_broadcast() -> list[bool]:
    found = []
    for first_has_started in (False, True):
        quantizer = VQ(2, 4, kmeans=(dist.rank() == 0) != first_has_started)
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


def test_a_step_of_training_restores_the_codebook_alone() -> None:
    quantizer = ResidualConfig(layer=VQConfig(dim=5, codebook_size=16), depth=2).build()
    task = mock.Mock(quantizers=lambda: {"image": quantizer})
    with mock.patch.object(VQ, "has_started", None):
        found = Task.tensors_to_update(task)
    stored = [value for name, value in quantizer.state_dict().items() if not name.endswith("has_started")]
    assert sorted(each.data_ptr() for each in found) == sorted(each.data_ptr() for each in stored)


def test_statistics_of_evaluation_are_refused() -> None:
    quantizer = VQ(2, 4, kmeans=False, dead_below=0)
    stats = quantizer.eval()(torch.randn(9, 2)).stats
    with pytest.raises(ConfigError, match="forward in evaluation mode, expected training mode"):
        quantizer.train().update(stats)


def test_orthogonality_of_codes_without_direction() -> None:
    quantizer = VQ(4, 4, learning="gradient", kmeans=False, loss_weights={"orthogonality": 1.0})
    with torch.no_grad():
        quantizer.codebook.copy_(torch.eye(4).index_fill(0, torch.tensor([0]), 0.0))
    assert quantizer.losses(quantizer(torch.randn(9, 4)).stats)["orthogonality"] == 0


def test_codes_are_float32_whatever_the_default() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        made = [VQ(3, 8), VQ(3, 8, learning="gradient"), SimVQ(3, 8)]
    finally:
        torch.set_default_dtype(before)
    for quantizer in made:
        assert all(t.dtype == torch.float32 for t in quantizer.state_dict().values() if t.is_floating_point())


def test_statistics_from_before_another_state_are_refused() -> None:
    quantizer = VQ(3, 8, dead_below=0.0)
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
    module = torch.nn.ModuleDict(
        {"vq": VQ(3, 8, learning="gradient"), "sim": SimVQ(3, 8), "linear": torch.nn.Linear(3, 3)}
    )
    decayed = [name for group in parameter_groups(module, 0.1) if group["weight_decay"] for name, _ in group["params"]]
    assert decayed == ["linear.weight"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: VQ(3, 8, decay=1.0), "decay is 1.0, expected a number from 0 to less than 1"),
        (lambda: VQ(3, 8, dead_below=-1.0), "dead_below is -1.0"),
        (lambda: VQ(3, 1), "codebook_size 1"),
        (lambda: VQ(1, 8, cosine=True), "VQ with cosine: got 1 channel, .* at least 2"),
        (lambda: BSQ(1), "BSQ: got 1 channel, .* at least 2"),
        (lambda: VQ(3, 8, learning="both"), "learning is 'both'"),
        (lambda: VQ(3, 8, gradient="none"), "gradient is 'none'"),
        (lambda: VQ(3, 8, diversity_temperature=0.0), "diversity_temperature is 0.0"),
        (lambda: VQ(3, 8, loss_weights={"codebook": 1.0}), r"\['codebook'\], but with learning: ema"),
        (lambda: VQ(3, 8, loss_weights={"nonsense": 1.0}), "no loss is named"),
        (lambda: VQ(3, 8, learning="gradient", loss_weights={"codebook": 0.0}), "nothing would move the codes"),
        (lambda: SimVQ(3, 8, loss_weights={"codebook": 0.0}), "only that loss moves the codes"),
        (lambda: VQ(3, 8, learning="gradient", sync_codebook=False), "DDP averages the gradients of codes"),
        (lambda: VQ(3, 8, sync_codebook=False, loss_weights={"diversity": 1.0}), "a weight for diversity"),
    ],
)
def test_wrong_settings(build, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_weights_of_the_configuration() -> None:
    assert VQConfig(dim=3).build().loss_weights == {"commitment": 0.25}
    learned = VQConfig(dim=3, learning="gradient", loss_weights=VQLossWeights(diversity=0.5))
    assert learned.build().loss_weights == {"commitment": 0.25, "codebook": 1.0, "diversity": 0.5}
    assert VQ(3, 8, learning="gradient", loss_weights={"commitment": 0.5}).loss_weights["codebook"] == 1
    assert SimVQConfig(dim=3).build().loss_weights == {"commitment": 0.25, "codebook": 1.0}


def test_a_functional_call_takes_the_state_dict() -> None:
    quantizer, x = VQ(4, 8, kmeans=False), torch.randn(5, 4)
    state = {name: each.clone() for name, each in quantizer.state_dict().items()}
    expected = quantizer(x).ids
    quantizer.codebook.zero_()
    assert torch.equal(torch.func.functional_call(quantizer, state, x).ids, expected)


def test_frozen_codes_need_no_update(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vqclip.quantizers.base.MAX_FORWARDS_WITHOUT_UPDATE", 2)
    quantizer = VQ(4, 8, learning="gradient", kmeans=False, dead_below=0).requires_grad_(False)
    for _ in range(4):
        quantizer(torch.randn(5, 4))
    assert not caplog.records
