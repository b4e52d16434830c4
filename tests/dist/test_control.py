"""Flags, seeds and JSON between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d

from tests.ranks import RankError
from vqclip import dist
from vqclip.errors import DistributedError


def flags():
    r = dist.rank()
    return [dist.any_rank(flag) for flag in (False, r == 1, torch.tensor(r == 0), True)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_rank(ranks, world_size):
    assert ranks(world_size, flags) == [[False, True, True, True]] * world_size


def seeds():
    before = torch.get_rng_state()
    drawn = [dist.shared_seed(), dist.shared_seed()]
    return drawn, torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("world_size", [2, 4])
def test_shared_seed_is_shared_fresh_and_touches_no_generator(ranks, world_size):
    results = ranks(world_size, seeds)
    assert all(r == results[0] for r in results)
    (first, second), untouched = results[0]
    assert first != second
    assert 0 <= first < 2**63
    assert untouched


def messages():
    r = dist.rank()
    value = {"rank": r, "name": "é" * (10 * r), "list": (r, None, True, 0.1)}
    return dist.broadcast_json(value), dist.gather_json(value)


def expected(r):
    return {"rank": r, "name": "é" * (10 * r), "list": [r, None, True, 0.1]}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_json(ranks, world_size):
    for broadcast, gathered in ranks(world_size, messages):
        assert broadcast == expected(0)
        assert gathered == [expected(r) for r in range(world_size)]


def unwritable(how):
    value = object() if dist.rank() == 0 else 1
    try:
        dist.gather_json(value) if how == "gather" else dist.broadcast_json(value)
    except DistributedError as error:
        return str(error)


@pytest.mark.parametrize("how", ["gather", "broadcast"])
def test_a_value_that_json_cannot_hold_is_refused_on_every_rank(ranks, how):
    for message in ranks(2, unwritable, how):
        assert "got a value that JSON cannot hold (object:" in message


def test_one_process():
    assert dist.any_rank(True)
    assert not dist.any_rank(torch.tensor(False))
    assert dist.broadcast_json({"a": (1,)}) == {"a": [1]}
    assert dist.gather_json(3) == [3]
    assert dist.shared_seed() != dist.shared_seed()
    dist.barrier()
