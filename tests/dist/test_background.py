"""Threads of ranks that wait for each other while the training communicates."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.ranks import RankError
from vqclip import dist
from vqclip.errors import CheckpointError


def work_beside_the_training(failing):
    """Return what the background thread met, while the main one sums other tensors."""
    group, found = dist.BackgroundGroup(60.0), []

    def background():
        for number in range(20):
            try:
                with group.raise_on_all_ranks("counting"):
                    if (dist.rank(), number) == (1, failing):
                        raise OSError("no space")
            except (OSError, CheckpointError) as error:
                found.append((number, str(error)))

    thread = threading.Thread(target=background)
    thread.start()
    sums = [float(dist.reduce_(torch.tensor(float(number)))) for number in range(20)]
    thread.join()
    group.close()
    return found, sums


def test_a_failure_is_raised_on_all_ranks_beside_other_collectives(ranks):
    one, other = ranks(2, work_beside_the_training, 7)
    assert one[0] == [(7, "counting failed on rank 1, whose message says why")]
    assert other[0] == [(7, "no space")]
    assert one[1] == other[1] == [2.0 * number for number in range(20)]


def leave_rank_zero_waiting():
    group = dist.BackgroundGroup(5.0)
    if dist.is_main():
        with group.raise_on_all_ranks("waiting for nobody"):
            pass
    group.close()


def test_a_rank_that_does_not_come_is_an_error(ranks):
    with pytest.raises(RankError, match="waiting for nobody failed on rank 0"):
        ranks(2, leave_rank_zero_waiting, timeout=30.0)
