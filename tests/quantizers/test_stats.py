from __future__ import annotations

import dataclasses

import pytest
import torch

from vqclip.errors import ShapeError
from vqclip.quantizers import LFQ, VQ, Order, Stats, sync


def test_reads_like_a_mapping_of_sums() -> None:
    stats = Stats({"tokens": torch.tensor(3)})
    assert list(stats) == ["tokens"]
    assert stats["tokens"] == 3
    assert "codes" not in stats
    assert dict(stats) == stats.sums
    with pytest.raises(TypeError):
        stats["tokens"] = torch.tensor(4)


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


def test_detach_cuts_the_gradient() -> None:
    stats = LFQ(3)(torch.randn(4, 3, requires_grad=True)).stats
    assert stats["token_entropy"].requires_grad
    assert not any(total.requires_grad for total in dict(stats.detach()).values())


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
