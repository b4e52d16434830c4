"""Optimizer steps with everything that changes a codebook switched on: W processes do what one does."""

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.quantizers.test_contract import CONFIGS
from tests.quantizers.test_distributed import collectives
from tests.ranks import RankPool, for_each
from vqclip import dist
from vqclip.nn.dropout import set_dropout_keys
from vqclip.quantizers import Order, Quantizer, QuantizerConfig, ResidualConfig, VQConfig
from vqclip.quantizers.new_codes import replacements


def busy(config: QuantizerConfig) -> QuantizerConfig:
    """Have codes replaced all the time."""
    if isinstance(config, VQConfig):
        return config.model_copy(update={"decay": 0.8, "dead_below": 0.5})
    return config.model_copy(update={"layer": busy(config.layer)}) if hasattr(config, "layer") else config


FAMILIES = {name: busy(config) for name, config in CONFIGS.items() if name != "vq, not synchronised"}
SPLIT = (7, 0, 5, 4)
"""Samples of each rank."""

State = dict[str, Tensor]


class Masked(nn.Sequential):
    """Hands the mask on to the quantizer."""

    def forward(self, x: Tensor, mask: Tensor):
        linear, quantizer = self
        return quantizer(linear(x), mask)


class Training:
    """A linear layer, a quantizer and Adam, on this rank's part of global batches of 16 samples."""

    def __init__(self, config: QuantizerConfig, split: Sequence[int], micro_batches: int = 1):
        torch.manual_seed(0)
        self.quantizer: Quantizer = config.build().double()
        self.quantizer.set_seed(3)
        # Kept away from the quantizer's own generator: some of them draw their first codes, some do not.
        torch.manual_seed(1)
        self.model = Masked(nn.Linear(6, self.quantizer.dim).double(), self.quantizer)
        self.parallel = dist.wrap_ddp(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.split, self.micro_batches = list(split), micro_batches

    def step(self, number: int) -> State:
        """Take one step; return its losses and metrics."""
        x, mask, target = (part.split(self.split)[dist.rank()] for part in self._batch(number))
        parts = [part.tensor_split(self.micro_batches) for part in (x, mask, target, self._order().places)]
        stats, misfit = None, torch.zeros((), dtype=torch.float64)
        for some, theirs, wanted, places in zip(*parts, strict=True):
            set_dropout_keys(self.model, 3, number, places)
            out = self.parallel(some, theirs)
            stats = out.stats if stats is None else stats + out.stats
            misfit = misfit + (out.vectors * wanted).sum()
        assert stats is not None
        stats = stats.sync(self._order())
        losses = self.quantizer.losses(stats)
        weighted = sum((self.quantizer.loss_weights[k] * v for k, v in losses.items()), torch.zeros(()))
        self.optimizer.zero_grad()
        (dist.world_size() * misfit / 16 + weighted).backward()  # the convention of `vqclip.dist`
        self.optimizer.step()
        self.quantizer.update(stats)
        found = {f"loss/{name}": loss.detach() for name, loss in losses.items()}
        return found | self.quantizer.metrics(stats)

    def _batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 5, 6, generator=generator, dtype=torch.float64)
        mask = torch.rand(16, 5, generator=generator) > 0.3
        return x, mask, torch.randn(16, 5, self.quantizer.dim, generator=generator, dtype=torch.float64)

    def _order(self) -> Order:
        start = sum(self.split[: dist.rank()])
        return Order(torch.arange(start, start + self.split[dist.rank()]), 16)


def trajectory(config: QuantizerConfig, split: Sequence[int], micro_batches: int = 1, steps: int = 7) -> list[State]:
    """Losses, metrics, weights and codes after each step."""
    training = Training(config, split, micro_batches)
    states = []
    for number in range(steps):
        numbers = training.step(number)
        states.append(numbers | {name: value.clone() for name, value in training.model.state_dict().items()})
    return states


def trajectory_of_one_process(config: QuantizerConfig) -> list[State]:
    """A trajectory in which codes have started and are replaced: the comparison is worth something."""
    replaced = []

    def counting(*args: Tensor) -> tuple[Tensor, Tensor]:
        codes, where = replacements(*args)
        replaced.append(int(where.sum()))
        return codes, where

    with mock.patch("vqclip.quantizers.vq.replacements", counting):
        states = trajectory(config, (sum(SPLIT),))
    started = [bool(states[-1][key].sum() > 0) for key in states[0] if key.endswith("sizes")]
    assert all(started)
    assert (sum(replaced) > 0) == bool(started)
    return states


@pytest.fixture(scope="module")
def on_ranks(ranks: RankPool) -> dict[str, list[list[State]]]:
    """The states of each rank, by name of the family."""
    found = ranks(len(SPLIT), for_each, trajectory, [(config, SPLIT, 2) for config in FAMILIES.values()], timeout=240.0)
    return dict(zip(FAMILIES, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_one_process(on_ranks, name: str) -> None:
    """Ranks hold the same bits after every step, and up to rounding what one process does.

    Bug report 1: the mean code distribution of LFQ went through an all_reduce that drops gradients.
    """
    first, *others = on_ranks[name]
    for mine, *theirs in zip(first, *others, strict=True):
        assert all(torch.equal(mine[key], other[key]) for other in theirs for key in mine)
    for mine, expected in zip(first, trajectory_of_one_process(FAMILIES[name]), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


def without_order(name: str, split: Sequence[int]) -> State:
    """Update with the default order, also without a real token on some ranks or on all, and with infinite ones."""
    torch.manual_seed(0)
    quantizer = FAMILIES[name].build().double()
    quantizer.set_seed(3)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        x = torch.randn(sum(split), 5, quantizer.dim, generator=generator, dtype=torch.float64)
        mask = torch.rand(sum(split), 5, generator=generator) > 0.3
        mask[: {4: 16, 9: 10}.get(step, 0)] = False
        if step in (0, 12):
            x[11, mask[11], 1] = torch.inf  # of one rank: no rank moves a code
        mine = [part.split(list(split))[dist.rank()] for part in (x, mask)]
        quantizer.update(quantizer(*mine).stats)
    return dict(quantizer.state_dict())


@pytest.mark.parametrize("name", ["vq", "residual of vq"])
def test_without_an_order_and_without_tokens(ranks: RankPool, name: str) -> None:
    """`ZeroDivisionError` of a batch, or of a stage that dropout left out, in which no rank had a token."""
    expected = without_order(name, (16,))
    assert all(value.isfinite().all() for value in expected.values())
    for found in ranks(2, without_order, name, (10, 6)):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def replacement_rounds(rounds: int) -> list[float]:
    """Rounds of different token counts on every rank; each draws its own, so counts are never the same."""
    config = ResidualConfig(layer=VQConfig(dim=4, codebook_size=32, decay=0.5, dead_below=0.9), depth=4, dropout=True)
    torch.manual_seed(0)
    quantizer = config.build()
    generator = torch.Generator().manual_seed(dist.rank())
    for _ in range(rounds):
        tokens = int(torch.randint(0, 40, (), generator=generator))
        x = torch.randn(tokens, 4, generator=generator)
        mask = torch.rand(tokens, generator=generator) > 0.3
        quantizer.update(quantizer(x, mask).stats.sync())
    return [float(value.double().sum()) for value in quantizer.state_dict().values()]


def test_dead_codes_with_dropout_never_meet_a_shape_mismatch(ranks: RankPool) -> None:
    """Bug report 2: replacement per process met dropout that drew differently on every rank."""
    first, *others = ranks(4, replacement_rounds, 30)
    assert all(other == first for other in others)


def vq_under_ddp(sync_codebook: bool) -> tuple[list[Tensor], list[Tensor], list[str]]:
    training = Training(busy(VQConfig(dim=4, codebook_size=16, sync_codebook=sync_codebook)), (12, 4))
    for number in range(20):
        training.step(number)
    own = training.quantizer(torch.randn(30 + dist.rank(), 4, dtype=torch.float64)).stats
    with collectives() as calls:  # from statistics that are this rank's alone
        training.quantizer.update(own)
    return [p.detach() for p in training.model.parameters()], list(training.model.buffers()), calls


@pytest.mark.parametrize("sync_codebook", [True, False])
def test_vq_trains_under_ddp(ranks: RankPool, sync_codebook: bool) -> None:
    """Bug report 3: synchronisation of the codebook met DDP's own; both settings train, and off is off."""
    (weights, codes, calls), (other_weights, other_codes, _) = ranks(2, vq_under_ddp, sync_codebook)
    assert bool(calls) == sync_codebook
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(codes, other_codes, strict=True)) == sync_codebook
