"""The pool of ranks itself: it must not hang, and must tell what went wrong."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError


def rank_and_sum(x):
    x = x + dist.get_rank()
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def die_on_rank_one():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def hang_on_rank_one():
    if dist.get_rank() == 1:
        time.sleep(600)


def environment():
    return dist.is_initialized(), os.environ["RANK"], os.environ["WORLD_SIZE"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_returns_its_result(ranks, world_size):
    results = ranks(world_size, rank_and_sum, torch.zeros(2))
    total = float(sum(range(world_size)))
    assert [r[:2] for r in results] == [(rank, world_size) for rank in range(world_size)]
    assert all(r[2].tolist() == [total, total] for r in results)


def test_without_init_only_the_environment_is_set(ranks):
    assert ranks(2, environment, init=False) == [(False, "0", "2"), (False, "1", "2")]


def test_an_exception_arrives_with_its_traceback_and_the_pool_lives_on(ranks):
    pids = ranks(2, os.getpid)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: Traceback.*fail_on_rank_one.*rank one says no"):
        ranks(2, fail_on_rank_one)
    assert ranks(2, os.getpid) == pids


def test_a_dead_rank_is_reported_and_replaced(ranks):
    with pytest.raises(RankError, match="rank 1 of 2: the process died with exit code -9") as error:
        ranks(2, die_on_rank_one)
    assert error.value.results == {0: 0}
    assert [r[0] for r in ranks(2, rank_and_sum, torch.zeros(1))] == [0, 1]


def init_on_rank_zero_alone():
    if os.environ["RANK"] == "0":
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))


@pytest.mark.slow
def test_after_a_group_that_could_not_be_formed_the_next_one_can(ranks):
    with pytest.raises(RankError, match="rank 0 of 2"):
        ranks(2, init_on_rank_zero_alone, init=False)
    assert [r[0] for r in ranks(2, rank_and_sum, torch.zeros(1))] == [0, 1]


@pytest.mark.slow
def test_a_hung_rank_is_killed(ranks, monkeypatch):
    monkeypatch.setattr("tests.ranks.GRACE_S", 0.5)
    with pytest.raises(RankError, match="rank 1 of 2: did not finish in time"):
        ranks(2, hang_on_rank_one, timeout=3.0)
    assert [r[0] for r in ranks(2, rank_and_sum, torch.zeros(1))] == [0, 1]
