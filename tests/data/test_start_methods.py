"""Workers that are forked, forked from a server, or spawned."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from tests.data.loading import SIZE, global_batches, open_data, same
from tests.data.making import caption_shards
from vqclip.data import CaptionShardsConfig, DataConfig, batch_maker, workers
from vqclip.errors import DataError

METHODS = ("fork", "forkserver", "spawn")
FORK_AND_SLOW_ONES = ["fork", *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS[1:])]
WINDOWED = {"kind": "windowed", "chunk": 3, "window": 2}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["full", WINDOWED])
@pytest.mark.parametrize("method", METHODS)
def test_batches_do_not_depend_on_the_start_method(
    folder: Path, method, order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_maker, "SLICE_ROWS", 2)
    expected = global_batches(open_data(folder, order=order), 0, 7, 1)
    for count in (0, 1, 5):
        data = open_data(folder, workers=count, start_method=method, order=order)
        assert same(global_batches(data, 0, 7, 2), expected)
        assert same(global_batches(data, 5, 7, 1), expected[5:])


@pytest.mark.parametrize("method", FORK_AND_SLOW_ONES)
def test_workers_and_their_server_outlive_stop_signals(folder: Path, method) -> None:
    batches = open_data(folder, workers=2, start_method=method).batches(0, 30)
    first = [next(batches), next(batches)]  # one of each worker, which has prepared itself then
    others = [forkserver._forkserver._forkserver_pid] if method == "forkserver" else []
    for process in [each.pid for each in multiprocessing.active_children()] + others:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(process, number)
    assert len([*first, *batches]) == 30


def die(captions: list[str]) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize("method", FORK_AND_SLOW_ONES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dead_worker_is_noticed_soon(tmp_path: Path, method) -> None:
    config = DataConfig(
        sources=(CaptionShardsConfig(path=str(caption_shards(tmp_path, (9,)))),), workers=2, start_method=method
    )
    batches = config.build(image_size=SIZE, tokenize=die, batch_size=4, seed=0).batches(0, 9)
    start = time.monotonic()
    with pytest.raises(DataError, match=r"a data worker died \(.*killed for memory\? Fewer data.workers"):
        next(batches)
    assert time.monotonic() - start < 60  # importing torch takes most of it; data.timeout_s is 240
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("available", "current", "expected"),
    [
        (["fork", "spawn", "forkserver"], None, "fork"),
        (["fork", "spawn", "forkserver"], "fork", "fork"),
        (["fork", "spawn", "forkserver"], "spawn", "spawn"),
        (["forkserver", "fork", "spawn"], None, "fork"),  # Python 3.14
        (["forkserver", "fork", "spawn"], "forkserver", "fork"),
        (["forkserver", "fork", "spawn"], "spawn", "spawn"),
    ],
)
def test_workers_are_forked_unless_the_program_chooses(
    available, current, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: available)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: current)
    assert workers._default_method() == expected
