"""Flags, seeds and JSON between ranks; their machines; their background threads."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.ranks import RankError, for_each
from vqclip import dist
from vqclip.errors import CheckpointError, DistributedError


def flags():
    r = dist.rank()
    return [dist.any_rank(flag) for flag in (False, r == 1, torch.tensor(r == 0), True)]


def test_any_rank(ranks):
    assert ranks(4, flags) == [[False, True, True, True]] * 4


def seeds():
    before = torch.get_rng_state()
    drawn = [dist.shared_seed(), dist.shared_seed()]
    return drawn, torch.equal(before, torch.get_rng_state())


def test_shared_seed_is_shared_fresh_and_touches_no_generator(ranks):
    results = ranks(4, seeds)
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


@pytest.mark.parametrize("world_size", [1, 4])
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


def test_a_value_that_json_cannot_hold_is_refused_on_every_rank(ranks):
    for message in itertools.chain(*ranks(2, for_each, unwritable, [("gather",), ("broadcast",)])):
        assert "got a value that JSON cannot hold (object:" in message


def on_nodes(groups: list[str | None]) -> tuple[int, ...]:
    with pytest.MonkeyPatch.context() as patch:
        if group := groups[dist.rank()]:
            patch.setenv("GROUP_RANK", group)
        else:
            patch.delenv("GROUP_RANK", raising=False)
        return dist.nodes()


def test_nodes_are_those_of_torchrun_or_machines(ranks) -> None:
    assert dist.nodes() == (0,)
    assert ranks(3, on_nodes, [None, None, None]) == [(0, 0, 0)] * 3
    assert ranks(3, on_nodes, ["7", "0", "7"]) == [(0, 1, 0)] * 3


def work_beside_the_training(failing):
    """Return what the background thread met, while the main one sums other tensors."""
    group = dist.BackgroundGroup(60.0)

    def background():
        found = []
        for number in range(20):
            try:
                with group.raise_on_all_ranks("counting"):
                    if (dist.rank(), number) == (1, failing):
                        raise OSError("no space")
            except (OSError, CheckpointError) as error:
                found.append((number, str(error)))
        return found

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(background)
        sums = [float(dist.reduce_(torch.tensor(float(number)))) for number in range(20)]
    group.close()
    return found.result(), sums


def test_a_failure_is_raised_on_all_ranks_beside_other_collectives(ranks):
    one, other = ranks(2, work_beside_the_training, 7)
    assert one[0] == [(7, "counting failed on rank 1, whose message says why")]
    assert other[0] == [(7, "no space")]
    assert one[1] == other[1] == [2.0 * number for number in range(20)]


def leave_rank_zero_waiting():
    group = dist.BackgroundGroup(5.0)
    dist.barrier()  # both are connected
    if dist.is_main():
        with group.raise_on_all_ranks("waiting for nobody"):
            pass
    group.close()


def test_a_rank_that_does_not_come_is_an_error(ranks):
    with pytest.raises(RankError, match="waiting for nobody failed on rank 0"):
        ranks(2, leave_rank_zero_waiting, timeout=30.0)
