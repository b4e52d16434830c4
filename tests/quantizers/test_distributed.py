"""Statistics of several ranks: when they meet, in how many collectives, and that a rank alone never waits."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as c10d
from torch import Tensor

from tests.quantizers.test_contract import CONFIGS
from tests.ranks import RankPool
from vqclip import dist
from vqclip.dist._torch_versions import ALL_GATHER, REDUCE_SCATTER
from vqclip.errors import ShapeError
from vqclip.quantizers import LFQ, VQ, Order, QuantizerConfig, Stats, sync


def global_batch(dim: int, samples: int = 16) -> tuple[Tensor, Tensor]:
    """The same on every rank: tokens ``(16, 5, dim)`` in float64 and a ragged mask."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 5, dim, generator=generator, dtype=torch.float64)
    mask = torch.rand(samples, 5, generator=generator) > 0.3
    return x, mask


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of torch's collectives that are called within the block."""
    calls: list[str] = []
    names = {"all_reduce", ALL_GATHER, "all_gather", "broadcast", REDUCE_SCATTER, "barrier", "batch_isend_irecv"}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            original = getattr(c10d, name)
            patch.setattr(c10d, name, lambda *args, _n=name, _f=original, **kw: calls.append(_n) or _f(*args, **kw))
        yield calls


def forwards_alone(names: Sequence[str]) -> dict[str, list[bool]]:
    """Use quantizers on rank 0 in every way that needs no other rank; rank 1 does nothing and leaves."""
    return {name: forward_alone(CONFIGS[name]) for name in names} if dist.rank() == 0 else {}


def forward_alone(config: QuantizerConfig) -> list[bool]:
    quantizer = config.build()
    x, mask = global_batch(quantizer.dim)
    done = []
    for training in (True, False):
        quantizer.train(training)
        out = quantizer(x.requires_grad_(), mask)
        out.vectors.sum().backward()
        with torch.no_grad():
            out = quantizer(x, mask)
        quantizer.encode(x)
        quantizer.continuous(x)
        if quantizer.codebook_sizes:
            quantizer.decode(out.ids)
        quantizer.metrics(out.stats)
        quantizer.losses(out.stats.local() if training else out.stats)
        done.append(training)
    return done


def test_rank_zero_alone_never_waits(ranks: RankPool) -> None:
    """Bug report 4: a forward on rank 0 alone, in train and eval, waited for the others."""
    assert ranks(2, forwards_alone, list(CONFIGS), timeout=60.0) == [{name: [True, False] for name in CONFIGS}, {}]


def synced_together() -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], list[str]]:
    stats = []
    for config in CONFIGS.values():
        torch.manual_seed(0)
        quantizer = config.build()  # with the same codes on every rank
        x, mask = global_batch(quantizer.dim)
        stats.append(quantizer(x[dist.rank() :: 2], mask[dist.rank() :: 2]).stats)
    order = Order(torch.arange(dist.rank(), 16, 2), 16)
    with collectives() as first:
        together = sync(stats, order)
    with collectives() as second:
        assert all(a is b for a, b in zip(sync(together, order), together, strict=True))
    assert second == [], "statistics of all ranks are reduced again"
    later = sync(stats, order, histograms=False)
    for mine, partly, whole in zip(stats, later, together, strict=True):
        assert partly.histograms == mine.histograms
        assert all(torch.equal(partly[name], whole[name]) for name in partly.sums)
    with collectives() as third:
        assert all(torch.equal(a[n], b[n]) for a, b in zip(sync(later), together, strict=True) for n in b)
    assert third == ["all_reduce"]
    return [dict(entry) for entry in together], [dict(entry.sync(order)) for entry in stats], first


def test_all_statistics_travel_in_one_collective(ranks: RankPool) -> None:
    for together, apart, calls in ranks(2, synced_together):
        assert calls == ["all_reduce"]
        for a, b in zip(together, apart, strict=True):
            assert a.keys() == b.keys()
            for name in a:
                assert torch.equal(a[name], b[name])
                assert a[name].dtype == b[name].dtype
                assert a[name].shape == b[name].shape


def test_addition() -> None:
    a, b = Stats({"tokens": torch.tensor(3)}), Stats({"tokens": torch.tensor(4)})
    assert (a + b)["tokens"] == 7
    assert a["tokens"] == 3
    with pytest.raises(ShapeError, match="different quantizers"):
        a + Stats({"other": torch.tensor(1)})
    with pytest.raises(ShapeError, match="all ranks"):
        a + b.local()
    with pytest.raises(TypeError):
        a + 3


def test_one_process_is_all_ranks() -> None:
    stats = LFQ(3)(torch.randn(4, 3, requires_grad=True)).stats
    (synced,) = sync([stats])
    assert synced.is_global
    assert all(synced[name] is stats[name] for name in stats)
    assert stats.sync().is_global
    of_one_rank = dataclasses.replace(synced, histograms={"codes": torch.ones(1, 8, dtype=torch.int64)})
    with pytest.raises(ShapeError, match="sums over all ranks with histograms of one"):
        LFQ(3).metrics(of_one_rank.local())


def test_an_order_of_other_samples_is_refused() -> None:
    quantizer = VQ(3, 4)
    stats = quantizer(torch.randn(1, 5, 3)).stats + quantizer(torch.randn(1, 6, 3)).stats
    with pytest.raises(ShapeError, match="11 tokens with an order of 2 samples"):
        stats.sync(Order(torch.arange(2), 2))
    with pytest.raises(ShapeError, match="11 tokens with an order of 0 samples"):
        stats.sync(Order(torch.arange(0), 3))
