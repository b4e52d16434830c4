from __future__ import annotations

import torch

from tests.evaluation.made import image_folder
from tests.ranks import for_each
from vqclip.data import FolderConfig
from vqclip.evaluation.partition import RankPartition


def some_left_out(left_out):
    partition = RankPartition.create(distributed=True)
    mine = [item for item in partition.indices(9) if item not in left_out]
    rows = partition.gather_rows(torch.tensor(mine, dtype=torch.float32)[:, None])
    return rows[:, 0].tolist(), partition.gather_items(mine)


def test_rows_and_items_agree_where_some_are_left_out(ranks):
    cases = [(), (0,), (1, 4), (0, 3, 6), tuple(range(1, 9)), tuple(range(9))]
    for found in ranks(3, for_each, some_left_out, [(left_out,) for left_out in cases]):
        for left_out, (rows, items) in zip(cases, found, strict=True):
            assert rows == items
            assert items == list(range(9)) or left_out
            assert sorted(items) == [item for item in range(9) if item not in left_out]


def only_rank_zero(folder):
    partition = RankPartition.create(distributed=False)
    if RankPartition.create(distributed=True).rank == 0:
        with partition.raise_on_all_ranks():
            rows, items = partition.gather_rows(torch.ones(2, 1)).tolist(), partition.gather_items([1])
        return rows, items, len(partition.open(FolderConfig(path=image_folder(folder / "images"))))
    return None


def test_alone_there_is_no_collective(ranks, tmp_path):
    assert ranks(2, only_rank_zero, tmp_path, timeout=20.0) == [([[1.0], [1.0]], [1], 4), None]
