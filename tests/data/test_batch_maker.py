import gc
import os
from types import SimpleNamespace

import pytest
import torch

from vqclip.data import batch_maker
from vqclip.data.batch_maker import LoaderOptions, Rows, make_batches, plan_prefetch
from vqclip.errors import DataError

GIB = 2**30
IMAGES = 4096 * 3 * 224 * 224


class Squares:
    """Batches of 7 squares, and the number of the process that filled each."""

    layout = {"square": ((7,), torch.int64)}

    def fill(self, task):
        rows = range(7 * task.number // task.slices, 7 * (task.number + 1) // task.slices)
        for row in rows:
            task.tensors["square"][row] = (7 * task.step + row) ** 2
        return Rows(task.key, None, None, (os.getpid(),) * len(rows), (), ())

    def join(self, step, tensors, rows):
        return step, tensors["square"].tolist(), [each for some in rows for each in some.lengths]


def test_each_worker_fills_rows_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_maker, "SLICE_ROWS", 2)
    batches = list(make_batches(Squares(), range(3, 8), LoaderOptions(workers=3)))
    assert [step for step, *_ in batches] == [3, 4, 5, 6, 7]
    assert [square for _, squares, _ in batches for square in squares] == [n**2 for n in range(21, 56)]
    for _, _, makers in batches:
        assert [len(set(some)) for some in (makers[:2], makers[2:4], makers[4:], makers)] == [1, 1, 1, 3]
    alone = make_batches(Squares(), range(3, 8), LoaderOptions(workers=0))
    assert [batch[:2] for batch in alone] == [batch[:2] for batch in batches]


def test_a_batch_is_pinned_once_all_parts_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of different batches arrive in any order; without a GPU torch pins nothing, so that is simulated."""
    pinned: list[list[int]] = []
    monkeypatch.setattr(batch_maker, "SLICE_ROWS", 2)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.tolist()) or tensor + 100)

    def out_of_order(function, tasks, *args, **options):
        results = [function(task) for task in tasks]
        made = {number: results[number].pin_memory() for number in (0, 3, 1, 5, 4, 2)}
        yield from (made[number] for number in range(6))

    monkeypatch.setattr(batch_maker, "ordered_map", out_of_order)
    batches = list(make_batches(Squares(), range(2), LoaderOptions(workers=3)))
    squares = [[n**2 for n in range(7 * step, 7 * step + 7)] for step in (0, 1)]
    assert pinned == squares[::-1]
    assert [batch[1] for batch in batches] == [[each + 100 for each in some] for some in squares]


def test_nothing_is_kept_of_batches_that_were_not_read() -> None:
    batches = make_batches(Squares(), range(10), LoaderOptions(workers=1))
    next(batches)
    assert batch_maker._OpenBatch.by_key
    batches.close()
    gc.collect()
    assert not batch_maker._OpenBatch.by_key


@pytest.mark.parametrize(
    ("rows", "size", "workers", "limit", "plan"),
    [
        (128, 2**20, 4, 2 * GIB, (1, 2)),  # small batches: each worker makes its own
        (4096, IMAGES, 4, 2 * GIB, (4, 3)),  # 3 batches of 0.57 GiB
        (4096, IMAGES, 16, 100 * GIB, (16, 32)),
        (4096, IMAGES, 4, 0, (4, 1)),  # one batch, whatever the limit
        (512, IMAGES // 8, 8, 2 * GIB, (4, 8)),
        (1, 0, 2, 0, (1, 1)),
    ],
)
def test_prefetch_is_bounded(rows: int, size: int, workers: int, limit: int, plan: tuple[int, int]) -> None:
    slices, tasks = plan_prefetch(rows, size, workers, 2, limit)
    assert (slices, tasks) == plan
    if size and rows >= workers:
        assert tasks * workers / slices * size <= max(limit, size)


def test_too_little_shared_memory_is_refused_before_a_worker_dies_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs("/dev/shm")
    little = SimpleNamespace(f_bavail=167, f_frsize=1)  # three batches of 56 bytes need one more
    monkeypatch.setattr(os, "statvfs", lambda path: little if path == "/dev/shm" else status)
    assert next(make_batches(Squares(), range(1), LoaderOptions(workers=1, prefetch=1)))
    with pytest.raises(DataError, match=r"3 batches of 0.0 MiB .*/dev/shm has 0.0 MiB free. Lower data.prefetch_gib"):
        next(make_batches(Squares(), range(1), LoaderOptions(workers=1, prefetch=2)))
    assert next(make_batches(Squares(), range(1), LoaderOptions(workers=0)))
