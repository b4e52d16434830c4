from __future__ import annotations

import pytest
import torch

from vqclip.errors import DataError, DistributedError
from vqclip.evaluation.share import Share


def parts_come_together(count):
    share = Share.of_this_process(distributed=True)
    mine = list(share.of(count))
    rows = share.gather_rows(torch.tensor(mine, dtype=torch.float32)[:, None].expand(-1, 2))
    return rows[:, 0].tolist(), share.gather_items([str(item) for item in mine])


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_parts_come_together_in_order(ranks, count):
    for rows, items in ranks(3, parts_come_together, count):
        assert rows == list(range(count))
        assert items == [str(item) for item in range(count)]


def fails_on_rank_one():
    share = Share.of_this_process(distributed=True)
    try:
        with share.together():
            if share.rank == 1:
                raise DataError("shard 7 is broken")
    except (DataError, DistributedError) as error:
        return type(error).__name__, str(error)


def test_what_fails_on_one_rank_fails_on_all(ranks):
    first, second = ranks(2, fails_on_rank_one)
    assert second == ("DataError", "shard 7 is broken")
    assert first == ("DistributedError", "evaluation stopped, because rank 1 failed: DataError: shard 7 is broken")


def make_in_turn(folder):
    share = Share.of_this_process(distributed=True)

    def make():
        made = [path.name for path in folder.iterdir()]
        (folder / str(share.rank)).touch()
        return made

    return share.first_on_one(make)


def test_rank_0_makes_first(ranks, tmp_path):
    made = ranks(2, make_in_turn, tmp_path)
    assert made == [[], ["0"]]


def only_rank_zero():
    share = Share.of_this_process(distributed=False)
    if Share.of_this_process(distributed=True).rank == 0:
        with share.together():
            return share.gather_rows(torch.ones(2, 1)).tolist(), share.gather_items([1]), share.first_on_one(lambda: 5)
    return None


def test_alone_there_is_no_collective(ranks):
    assert ranks(2, only_rank_zero, timeout=20.0) == [([[1.0], [1.0]], [1], 5), None]
