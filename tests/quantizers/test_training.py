"""Optimizer steps with everything that changes a codebook switched on: W processes do what one does."""

import functools
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.quantizers.test_distributed import collectives
from tests.ranks import RankPool, for_each
from vqclip import dist
from vqclip.nn.dropout import set_dropout_keys
from vqclip.quantizers import (
    BSQConfig,
    FSQConfig,
    LFQConfig,
    Order,
    ProductConfig,
    Quantizer,
    QuantizerConfig,
    ResidualConfig,
    SimVQConfig,
    Stats,
    VQConfig,
)
from vqclip.quantizers.new_codes import replacements

BUSY = {"decay": 0.8, "dead_below": 0.5}
"""Codes are replaced all the time."""

FAMILIES: dict[str, QuantizerConfig] = {
    "fsq": FSQConfig(levels=(5, 4, 3)),
    "lfq": LFQConfig(bits=4, entropy_temperature=1.0),
    "bsq": BSQConfig(bits=4, entropy_temperature=1.0),
    "vq": VQConfig(dim=4, codebook_size=16, **BUSY),
    "vq, cosine": VQConfig(dim=4, codebook_size=16, cosine=True, gradient="straight_through", **BUSY),
    "vq, learned": VQConfig(dim=4, codebook_size=16, learning="gradient", **BUSY),
    "vq, ibq": VQConfig(dim=4, codebook_size=16, cosine=True, learning="ibq", **BUSY),
    "vq, diveq": VQConfig(dim=4, codebook_size=16, learning="diveq", **BUSY),
    "residual of product of vq, ibq": ResidualConfig(
        layer=ProductConfig(layer=VQConfig(dim=2, codebook_size=8, learning="ibq", **BUSY), codebooks=2), depth=2
    ),
    "product of residual of vq, diveq": ProductConfig(
        layer=ResidualConfig(layer=VQConfig(dim=2, codebook_size=8, learning="diveq", **BUSY), depth=2, dropout=True),
        codebooks=2,
    ),
    "simvq": SimVQConfig(dim=4, codebook_size=16),
    "product of simvq, blocks": ProductConfig(layer=SimVQConfig(dim=2, codebook_size=24, blocks=1), codebooks=2),
    "residual of fsq": ResidualConfig(layer=FSQConfig(levels=(5, 4), layout="uniform"), depth=3, dropout=True),
    "residual of vq": ResidualConfig(layer=VQConfig(dim=4, codebook_size=8, **BUSY), depth=3, dropout=True),
    "product of vq": ProductConfig(layer=VQConfig(dim=2, codebook_size=8, **BUSY), codebooks=2),
    "product of residual of vq": ProductConfig(
        layer=ResidualConfig(layer=VQConfig(dim=2, codebook_size=8, **BUSY), depth=2, dropout=True), codebooks=2
    ),
    "residual of vq, shared": ResidualConfig(
        layer=VQConfig(dim=4, codebook_size=16, **BUSY), depth=3, dropout=True, shared=True
    ),
    "product of residual of vq, beam": ProductConfig(
        layer=ResidualConfig(layer=VQConfig(dim=2, codebook_size=8, **BUSY), depth=2, beam=3), codebooks=2
    ),
    "residual of product of lfq": ResidualConfig(
        layer=ProductConfig(layer=LFQConfig(bits=2, entropy_temperature=1.0), codebooks=2), depth=2, dropout=True
    ),
}

SPLITS = {"2, one of them empty": (16, 0), "4 unequal": (7, 1, 5, 3)}
WITH_EMPTY_RANKS = (
    "fsq",
    "lfq",
    "vq",
    "vq, learned",
    "vq, ibq",
    "vq, diveq",
    "residual of vq",
    "product of residual of vq",
)
"""One of each way to gather statistics; the others run on the last split alone."""
CASES = [(name, split) for name in FAMILIES for split in SPLITS if split == "4 unequal" or name in WITH_EMPTY_RANKS]

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

    def step(self, number: int) -> Stats:
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
        return stats

    def _batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 5, 6, generator=generator, dtype=torch.float64)
        mask = torch.rand(16, 5, generator=generator) > 0.3
        return x, mask, torch.randn(16, 5, self.quantizer.dim, generator=generator, dtype=torch.float64)

    def _order(self) -> Order:
        start = sum(self.split[: dist.rank()])
        return Order(torch.arange(start, start + self.split[dist.rank()]), 16)


def trajectory(config: QuantizerConfig, split: Sequence[int], micro_batches: int = 1, steps: int = 7) -> list[State]:
    training = Training(config, split, micro_batches)
    states = []
    for number in range(steps):
        training.step(number)
        states.append({name: value.clone() for name, value in training.model.state_dict().items()})
    return states


WITH_TABLES = [name for name in FAMILIES if "vq" in name and "simvq" not in name]


@pytest.fixture(scope="module")
def alone() -> Callable[[str], list[State]]:
    """The states of one process, in which codes have started and are replaced: the comparison is worth something."""

    @functools.cache
    def states_of(name: str) -> list[State]:
        replaced = []

        def counting(*args: Tensor) -> tuple[Tensor, Tensor]:
            codes, where = replacements(*args)
            replaced.append(int(where.sum()))
            return codes, where

        with mock.patch("vqclip.quantizers.vq.replacements", counting):
            states = trajectory(FAMILIES[name], (16,))
        started = [bool(states[-1][key]) for key in states[0] if key.endswith("has_started")]
        assert all(started)
        assert (sum(replaced) > 0) == bool(started) == (name in WITH_TABLES)
        return states

    return states_of


@pytest.fixture(scope="module")
def on_ranks(ranks: RankPool) -> dict[tuple[str, str], list[list[State]]]:
    """The states of each rank, by names of the family and of the split."""
    found = {}
    for split, shares in SPLITS.items():
        cases = [case for case in CASES if case[1] == split]
        settings = [(FAMILIES[name], shares, 2) for name, _ in cases]
        found |= dict(zip(cases, zip(*ranks(len(shares), for_each, trajectory, settings), strict=True), strict=True))
    return found


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_equals_one_process(on_ranks, alone: Callable[[str], list[State]], case: tuple[str, str]) -> None:
    """Ranks hold the same bits after every step, and up to rounding what one process does."""
    first, *others = on_ranks[case]
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    for mine, theirs in zip(first, alone(case[0]), strict=True):
        for key in mine:
            torch.testing.assert_close(mine[key], theirs[key], rtol=1e-9, atol=1e-9)


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
    training = Training(VQConfig(dim=4, codebook_size=16, sync_codebook=sync_codebook, **BUSY), (12, 4))
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
