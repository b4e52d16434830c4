"""Bad samples, and workers that fail."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from tests.data.loading import SIZE, open_data
from tests.data.making import caption_members, caption_shards, encode, pixels, write_tar
from vqclip.data import CaptionShardsConfig, DataConfig, TrainData, batch_maker, workers
from vqclip.data.batch import allowed_bad
from vqclip.data.workers import explain_worker_deaths
from vqclip.errors import ConfigError, DataError, DistributedError

FORK_AND_SLOW_ONES = ["fork", *(pytest.param(each, marks=pytest.mark.slow) for each in ("forkserver", "spawn"))]


def spoilt_data(folder: Path, **options) -> TrainData:
    options = {"max_bad_fraction": 0.1, **options}
    return open_data(folder, sources=(CaptionShardsConfig(path=str(folder)),), **options)


def test_a_few_bad_samples_of_small_data_stop_nothing(tmp_path: Path) -> None:
    """A tenth at most, or one, in each pass over the data; a substitute that is bad too does not count again."""
    for size, count in ((20, 2), (20, 3), (5, 1), (5, 2)):
        folder = tmp_path / f"{size}, {count}"
        members = caption_members(0, size) | {f"{number:09d}.jpg": b"" for number in range(count)}
        write_tar(folder / "0.tar", members)
        data = spoilt_data(folder, batch_size=5, max_bad_fraction=0.01)
        if count <= max(size // 10, 1):
            list(data.batches(0, 100 * size // 5))
            assert data.replaced == 100 * count
        else:
            message = r"\d+ bad samples among \d+: more than .* allows. Repair or remove them"
            with pytest.raises(DataError, match=message):
                list(data.batches(0, 100 * size // 5))
    sizes = {(0.01, 35): 3, (0.01, 303): 10, (0.01, 5000): 50, (0.2, 9): 1, (0.0, 300): 0, (0.01, 5): 1, (0.01, 1): 0}
    assert {given: allowed_bad(*given) for given in sizes} == sizes


@pytest.mark.parametrize(("sizes", "count"), [((1500,), 15), ((1500,), 30), ((500, 400), 10)])
def test_as_many_bad_samples_as_allowed_stop_no_larger_data(tmp_path: Path, sizes: tuple[int, ...], count: int) -> None:
    """The share of those seen so far is by chance above that of all, nearly always at some step of an epoch."""
    image, sources = encode(pixels(0)), []
    for source, size in enumerate(sizes):
        members = dict[str, bytes]()
        for number in range(size):
            is_bad = source == 0 and number < count
            members |= {f"{number:09d}.jpg": b"" if is_bad else image, f"{number:09d}.txt": b"a caption"}
        write_tar(tmp_path / str(source) / "0.tar", members)
        sources.append(CaptionShardsConfig(path=str(tmp_path / str(source)), weight=1 / (1 + source)))
    data = open_data(tmp_path, sources=tuple(sources), batch_size=20, max_bad_fraction=0.01)
    with pytest.raises(DataError) if count > 15 else contextlib.nullcontext():
        list(data.batches(37, 147))  # from the middle of a pass to that of another
        assert data.replaced > count


def test_nothing_but_bad_samples(tmp_path: Path) -> None:
    members = {f"{n}.{kind}": b"x" for n in range(5) for kind in ("jpg", "txt")}
    write_tar(tmp_path / "0.tar", members)
    with pytest.raises(DataError, match="31 substitutes for it cannot be used either"):
        list(spoilt_data(tmp_path, batch_size=5).batches(0, 1))


def test_a_batch_of_more_than_an_epoch_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="train.batch_size: got 18, more than the 17 samples of an epoch of data.sou"):
        open_data(folder, sources=(CaptionShardsConfig(path=str(folder)),), batch_size=18)


# ---- failures of the machinery


def explode(captions: list[str]) -> torch.Tensor:
    raise KeyError("boom")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return caption_shards(tmp_path, (9, 8))


@pytest.fixture
def new_workers() -> Callable[[], list[int]]:
    """The ids of child processes that were started within the test."""
    before = {each.pid for each in multiprocessing.active_children()}
    return lambda: [each.pid for each in multiprocessing.active_children() if each.pid not in before]


def failing(folder: Path, function, **options) -> TrainData:
    config = DataConfig(sources=(CaptionShardsConfig(path=str(folder)),), **{"workers": 1, **options})
    return config.build(size=SIZE, tokenize=function, batch_size=4, seed=0)


def test_errors_in_workers_keep_their_traceback(folder: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)KeyError: 'boom'.*in explode"):
        next(failing(folder, explode).batches(0, 1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_while_its_reader_computes_is_explained(folder: Path, new_workers) -> None:
    """torch raises its error in the middle of the computation, which may wrap it, as a collective does."""
    batches = spoilt_data(folder, workers=2).batches(0, 1000)
    next(batches)
    with pytest.raises(DataError, match=r"a data worker died \(.*Fewer data.workers"), explain_worker_deaths():  # noqa: PT012
        try:
            os.kill(new_workers()[-1], signal.SIGKILL)
            time.sleep(30)
        except RuntimeError as error:
            raise DistributedError("any_rank failed") from error
    batches.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("batches", [1, 9])  # while the workers are started, and later
def test_a_limit_of_open_files_is_explained_and_ends_the_workers(folder: Path, new_workers, batches, monkeypatch):
    allocate, left = batch_maker._allocate, iter(range(batches))

    def fail_at_last(*args) -> torch.Tensor:
        if next(left, None) is None:
            raise RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Too many open files")
        return allocate(*args)

    monkeypatch.setattr(batch_maker, "_allocate", fail_at_last)
    with pytest.raises(DataError, match="Too many open files.*Fewer data.workers need fewer"):
        list(spoilt_data(folder, workers=2).batches(0, 1000))
    for worker in multiprocessing.active_children():
        worker.join(10)
    # torch's handler of SIGCHLD may raise in the middle of `join`, which then never learns that the worker has ended.
    assert not [worker for worker in new_workers() if Path(f"/proc/{worker}").exists()]


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="^of the step$"), explain_worker_deaths():
        raise RuntimeError("of the step")


READER = """
import multiprocessing, os, signal, sys, time
from vqclip.data.workers import ordered_map

def answer(number):
    time.sleep(number // 8 * 1000)  # stuck soon, as storage may be
    return number

if __name__ == "__main__":
    method, end = sys.argv[1:]
    multiprocessing.set_start_method(method, force=True)
    function, workers = (str, 2) if end == "failed reader" else (answer, 1)
    results = ordered_map(function, range(1000), workers, timeout_s=2.0 if method == "fork" else 20.0)
    print(*(next(results) for _ in range(4)), flush=True)
    if end == "killed reader":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "failed reader":
        raise RuntimeError("of the one who reads")  # the name of the results lives as long as the process
    list(results)
"""
ENDS = {
    "killed reader": (-signal.SIGKILL, ""),
    "failed reader": (1, "RuntimeError: of the one who reads"),
    "stuck worker": (1, "is the storage stuck? (data.timeout_s)"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("method", FORK_AND_SLOW_ONES)
def test_workers_end_with_their_reader(tmp_path, method, end):
    """Standard output ends when the last worker does, as they all hold it."""
    (tmp_path / "script.py").write_text(READER)
    command = [sys.executable, tmp_path / "script.py", method, end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout) == (ENDS[end][0], "0 1 2 3\n"), done.stderr
    assert done.stderr.strip().endswith(ENDS[end][1])


# ---- workers that are forked, forked from a server, or spawned


@pytest.fixture
def new_fork_server(monkeypatch):
    """A server that no earlier test has started, with other imports."""
    server = forkserver.ForkServer()
    for name in ("ensure_running", "get_inherited_fds", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    monkeypatch.setattr(forkserver, "_forkserver", server)
    yield
    server._stop()


@pytest.mark.parametrize("method", FORK_AND_SLOW_ONES)
@pytest.mark.usefixtures("new_fork_server")
def test_workers_and_their_server_outlive_stop_signals(folder: Path, new_workers, method) -> None:
    batches = spoilt_data(folder, workers=2, start_method=method).batches(0, 30)
    first = [next(batches), next(batches)]  # one of each worker, which has prepared itself then
    others = [forkserver._forkserver._forkserver_pid] if method == "forkserver" else []
    for process in new_workers() + others:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(process, number)
    assert len([*first, *batches]) == 30


def die(captions: list[str]) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize("method", FORK_AND_SLOW_ONES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dead_worker_is_noticed_soon(folder: Path, new_workers, method) -> None:
    batches = failing(folder, die, workers=2, start_method=method).batches(0, 9)
    start = time.monotonic()
    with pytest.raises(DataError, match=r"a data worker died \(.*killed for memory\? Fewer data.workers"):
        next(batches)
    assert time.monotonic() - start < 60  # importing torch takes most of it; data.timeout_s is 240
    assert not new_workers()


@pytest.mark.parametrize(
    ("available", "current", "expected"),
    [
        (["fork", "spawn", "forkserver"], None, "fork"),
        (["forkserver", "fork", "spawn"], "forkserver", "fork"),  # Python 3.14
        (["forkserver", "fork", "spawn"], "spawn", "spawn"),
    ],
)
def test_workers_are_forked_unless_the_program_chooses(available, current, expected, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: available)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: current)
    assert workers._default_method() == expected
