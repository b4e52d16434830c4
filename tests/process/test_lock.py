"""One job at a time in a run folder."""

import errno
import multiprocessing
import os
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from tests.data.making import caption_shards
from tests.ranks import fork_server
from tests.training import run_tree
from vqclip import dist
from vqclip.data.remote.cache import BoundedCache
from vqclip.data.remote.retry import Deadline
from vqclip.errors import ConfigError
from vqclip.io.atomic import ProcessLock, hold_lock, remove_leftovers
from vqclip.process.lock import LOCK_FILE, LOCK_FILES, RunLock
from vqclip.train import Callback
from vqclip.train import run as train
from vqclip.train.tasks.kinds import load_task_config

FORK = multiprocessing.get_context("fork")


def hold(folder, worker_pid):
    with RunLock(folder) as lock:
        lock.acquire()
        worker = FORK.Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
        worker_pid.send(worker.pid)
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder, with a worker forked while it does."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=hold, args=(tmp_path / "run", sender))
    process.start()
    worker = receiver.recv()
    yield process
    process.kill()
    process.join()
    os.kill(worker, signal.SIGKILL)


def test_a_second_job_is_told_who_holds_the_folder_until_that_one_is_killed(tmp_path, holder):
    """A worker of the holder lives on, and holds nothing."""
    with RunLock(tmp_path / "run") as lock, pytest.raises(ConfigError) as error:
        lock.acquire()
    assert f"in use by another job (process {holder.pid} on {socket.gethostname()})" in str(error.value)
    assert "run.name" in str(error.value)
    holder.kill()
    holder.join()
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        assert str(os.getpid()) in (tmp_path / "run" / LOCK_FILE).read_text()


def take(folder):
    try:
        with RunLock(folder) as lock:
            lock.acquire()
    except ConfigError as error:
        return str(error)


def test_the_end_of_the_context_frees_the_folder(tmp_path):
    with fork_server().Pool(1) as pool:
        with RunLock(tmp_path) as lock:
            lock.acquire()
            assert "in use" in pool.apply(take, (tmp_path,))
            shutil.copytree(tmp_path, tmp_path / "copy")  # opens and closes each file
            assert "in use" in pool.apply(take, (tmp_path,))
        assert pool.apply(take, (tmp_path,)) is None


def test_a_link_in_place_of_the_lock_file_is_refused(tmp_path):
    (tmp_path / "precious").write_text("as it was")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "precious")
    with RunLock(tmp_path / "run") as lock, pytest.raises(OSError, match=r"run\.lock"):
        lock.acquire()
    assert (tmp_path / "precious").read_text() == "as it was"


def test_a_deleted_lock_file_lets_no_rank_in_and_comes_back(tmp_path, ranks, holder, caplog):
    (tmp_path / "run" / LOCK_FILE).unlink()
    for message in ranks(2, take, tmp_path / "run"):
        assert f"process {holder.pid}" in message
    with RunLock(tmp_path / "own") as lock:
        lock.acquire()
        (tmp_path / "own" / LOCK_FILE).unlink()
        lock.acquire()
        assert f"{LOCK_FILE} was deleted or replaced while this job held it" in caplog.text
        assert str(os.getpid()) in (tmp_path / "own" / LOCK_FILE).read_text()


def test_a_job_whose_lock_another_has_taken_says_so(tmp_path, holder):
    """As after the whole folder was deleted and another job began in it."""
    with RunLock(tmp_path / "mine") as lock:
        lock.acquire()
        shutil.rmtree(tmp_path / "mine")
        (tmp_path / "run").rename(tmp_path / "mine")
        with pytest.raises(ConfigError, match=f"in use by another job .process {holder.pid}"):
            lock.acquire()


def test_another_thread_is_refused_and_takes_no_lock_away(tmp_path):
    with RunLock(tmp_path) as lock, ThreadPoolExecutor(1) as pool:
        lock.acquire()
        assert f"in use by another job (process {os.getpid()} on" in pool.submit(take, tmp_path).result(30)
        lock.acquire()
    assert take(tmp_path) is None  # it is free again


def train_and_copy(tree, cache):
    """Train on a rank; rank 0 copies the run's folder after each step, then rank 1 returns the holders it meets."""
    holders, folder = [], Path(tree["run"]["folder"]) / "tiny"

    class Copy(Callback):
        def on_step_end(self, training):
            if dist.is_main():
                # A checkpoint is renamed while it is copied.
                shutil.copytree(folder, f"{folder}-{training.done}", ignore=shutil.ignore_patterns("checkpoints"))
            dist.barrier()
            if not dist.is_main():
                for name in LOCK_FILES:
                    holders.append(ProcessLock(folder / name).try_acquire())
            dist.barrier()

    os.environ["VQCLIP_CACHE"] = cache
    train(load_task_config(tree), [Copy()])
    return os.getpid(), holders


def test_a_start_of_several_ranks_and_a_callback_that_copies_the_folder_keep_the_lock(tmp_path, ranks):
    tree = run_tree(tmp_path, caption_shards(tmp_path / "shards", counts=(12,)), train__steps=2, optim__warmup_steps=1)
    (pid, _), (_, holders) = ranks(2, train_and_copy, tree, str(tmp_path / "cache"), init=False)
    assert holders == [f"process {pid} on {socket.gethostname()}"] * 4


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(37, "No locks available")))
    with RunLock(tmp_path) as lock:
        lock.acquire()
        for _ in range(2):
            with hold_lock(tmp_path / "other"):
                pass
    cache = BoundedCache(tmp_path / "chunks", 10**6)
    os.close(cache.open("a", lambda: b"a", Deadline(0)))
    assert caplog.text.count("files in it cannot be locked (No locks available)") == 2
    (tmp_path / ".tmp-in-use").touch()
    remove_leftovers(tmp_path)
    assert (tmp_path / ".tmp-in-use").exists()


def test_files_of_another_user_are_locked_too(tmp_path, monkeypatch):
    system_open = os.open

    def refuse_writing(path, flags, *mode, **options):
        if flags & os.O_RDWR and Path(path).exists():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return system_open(path, flags, *mode, **options)

    path = tmp_path / "lock"
    path.write_text("process 1 on elsewhere\n")
    monkeypatch.setattr(os, "open", refuse_writing)
    with hold_lock(path, wait=False) as is_held:
        assert is_held
        assert ProcessLock(path).try_acquire() == "process 1 on elsewhere"
    lock = ProcessLock(path)
    assert lock.try_acquire() is None
    lock.release()
    assert path.read_text() == "process 1 on elsewhere\n"
