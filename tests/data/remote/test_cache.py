"""The folder of chunks: its limits, what dies in it, who shares it."""

import errno
import fcntl
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vqclip.data.remote import cache as module
from vqclip.data.remote.cache import BoundedCache
from vqclip.data.remote.retry import Deadline
from vqclip.errors import StorageError

SIZE = 4000
CONTEXT = multiprocessing.get_context("fork")


def content(key: str) -> bytes:
    return (key.encode() * SIZE)[:SIZE]


class Folder:
    """A cache of a number of chunks, and what was made for it."""

    def __init__(self, path: Path, chunks: int = 4, wait_s: float = 0.0):
        self.path, self.wait_s = path, wait_s
        self.cache = BoundedCache(path, chunks * SIZE)
        self.made: list[str] = []

    def read(self, key: str) -> bytes:
        def make() -> bytes:
            self.made.append(key)
            return content(key)

        file = self.open(key, make)
        try:
            return os.pread(file, SIZE, 0)
        finally:
            os.close(file)

    def open(self, key: str, make: Callable[[], bytes]) -> int:
        return self.cache.open(key, make, Deadline(self.wait_s))

    def use(self, *keys: str) -> None:
        for key in keys:
            assert self.read(key) == content(key)

    @property
    def keys(self) -> str:
        return "".join(sorted(path.name for path in self.path.iterdir() if path.name != "ledger"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr(module, "_USED_S", 0.0)
    monkeypatch.setattr(module, "FILLED", 1.0)
    return Folder(tmp_path / "chunks")


def test_chunks_are_made_once_and_the_least_recently_used_go_first(folder: Folder) -> None:
    folder.use(*"abcd", *"abcd")
    assert folder.made == list("abcd")
    folder.use("a", "e")
    assert folder.keys == "acde"
    folder.use("c", "f", "g")
    assert folder.keys == "cefg"
    assert folder.made == list("abcdefg")


def test_what_a_clock_that_was_ahead_left_over_goes_first(folder: Folder) -> None:
    folder.use(*"abcd")
    hour_ahead = time.time_ns() + 3600 * 10**9
    for number, key in enumerate("cab"):
        os.utime(folder.path / key, ns=(hour_ahead + number,) * 2)
    folder.use("b", "e", "f")  # the use of b is now, by the right clock
    assert folder.keys == "bdef"
    folder.use("d", "g")
    assert folder.keys == "defg"
    assert folder.made == list("abcdefg")


def test_an_open_chunk_stays_readable(folder: Folder) -> None:
    file = folder.open("a", lambda: content("a"))
    folder.use(*"bcdefg")
    assert "a" not in folder.keys
    assert os.pread(file, SIZE, 0) == content("a")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(file, b"x")
    os.close(file)


def test_the_folder_is_not_read_for_each_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans, shrink = [], BoundedCache._shrink
    monkeypatch.setattr(BoundedCache, "_shrink", lambda self, more: scans.append(more) or shrink(self, more))
    folder = Folder(tmp_path / "chunks", 100)
    for number in range(300):
        folder.use(f"{number:03d}")
        assert sum(path.stat().st_size for path in folder.path.iterdir()) <= folder.cache.limit + 24
    assert len(scans) <= 1 + 200 // 5  # once at the start, then once in a twentieth of the limit
    assert len(list(folder.path.iterdir())) >= 94


def test_the_number_of_files_and_their_size_are_bounded(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"/a: has 20000 bytes, and the cache may take 16000 \(remote\.c"):
        folder.open("a", lambda: bytes(20_000))
    assert folder.keys == ""
    monkeypatch.setattr(module, "_FILES", 3)
    folder.use(*"abcdefg")
    assert len(folder.keys) == 3


@pytest.mark.parametrize("rest", [None, b"", b"x" * 15, bytes(24), b"9" * 30])
def test_a_damaged_ledger_is_made_again(folder: Folder, rest: bytes | None) -> None:
    folder.use(*"abcd")
    ledger = folder.path / "ledger"
    ledger.unlink() if rest is None else ledger.write_bytes(rest)
    folder.use(*"efgh")
    assert len(folder.keys) == 4


def test_the_folder_may_be_removed(folder: Folder) -> None:
    def make() -> bytes:
        if not folder.made:
            folder.made.append("a")
            for path in folder.path.iterdir():
                path.unlink()
            folder.path.rmdir()
        return content("a")

    folder.wait_s = 9.0
    os.close(folder.open("a", make))
    assert folder.keys == "a"


def test_a_full_disk_and_a_folder_of_another_user_are_explained(folder, monkeypatch):
    folder.use("a")
    for code, text in ((errno.ENOSPC, "No space left on device"), (errno.EACCES, "Permission denied")):

        def refuse(*_: object, code: int = code) -> int:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            with pytest.raises(StorageError, match=rf"/chunks: cannot be written \({text}\); set VQCLIP_CACHE to a"):
                folder.use("b")
            folder.use("a")
    assert folder.keys == "a"
    folder.use("b")


def test_threads_wait_for_the_one_that_makes(folder: Folder) -> None:
    folder.wait_s = 20.0

    def make() -> bytes:
        folder.made.append("a")
        time.sleep(0.05)
        return content("a")

    threads = [threading.Thread(target=lambda: os.close(folder.open("a", make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folder.made == ["a"]


def hold(path: Path, ready) -> None:
    def make() -> bytes:
        ready.set()
        signal.pause()
        return b""

    Folder(path).open("a", make)


def test_a_process_that_dies_leaves_nothing_that_counts(folder: Folder) -> None:
    ready = CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(folder.path, ready))
    process.start()
    try:
        assert ready.wait(30)
        with pytest.raises(StorageError, match=r"/a.part: another process has been fetching this file for 0 s"):
            folder.use("a")
        (folder.path / "x.part").write_bytes(bytes(3 * SIZE))  # of one that died before
    finally:
        process.kill()
        process.join(30)
    folder.use(*"bcdef")
    assert "part" not in folder.keys
    folder.use("a")


def test_a_chunk_on_its_way_counts_in_full(folder: Folder) -> None:
    def make() -> bytes:
        folder.use(*"bcd")
        return content("a")

    os.close(folder.open("a", make))
    assert folder.keys == "abcd"
    in_use = os.open(folder.path / "x.part", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(in_use, 4 * SIZE)
        fcntl.flock(in_use, fcntl.LOCK_EX)
        (folder.path / "ledger").unlink()
        with pytest.raises(StorageError, match="no room for 4000 bytes in .*, after 0.0 s of .*=0: other processes"):
            folder.use("e")
    finally:
        os.close(in_use)


def test_what_cannot_be_removed_from_it_is_left(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.use(*"abc")
    for name in ("lost+found", "x.part"):
        (folder.path / name).mkdir()
    (folder.path / ".nfs1").touch()
    for number, name in enumerate((".nfs1", "lost+found", *"abc")):
        os.utime(folder.path / name, (number, number))
    unlink = os.unlink

    def fail(path: Path) -> None:
        if os.path.basename(path) in (".nfs1", "a"):
            raise OSError(errno.EBUSY, "busy")
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        folder.use("d", "e")
    assert {"a", "d", "e", ".nfs1", "lost+found"} <= {path.name for path in folder.path.iterdir()}
    assert int((folder.path / "ledger").read_text()) <= 4 * SIZE


# ---- several processes


def work(path: Path, chunks: int, seed: int, seconds: float, results) -> None:
    """Reads random chunks of 40."""
    draws, made, end = random.Random(seed), 0, time.monotonic() + seconds
    cache = BoundedCache(path, chunks * SIZE)
    while time.monotonic() < end:
        key = f"{draws.randrange(40):04d}"

        def make(key: str = key) -> bytes:
            nonlocal made
            made += 1
            time.sleep(draws.random() / 500)
            return content(key)

        file = cache.open(key, make, Deadline(30))
        assert os.pread(file, SIZE, 0) == content(key)
        os.close(file)
    results.put(made)


def watch(path: Path, end: float) -> int:
    largest = 0
    while time.monotonic() < end:
        sizes = []
        for entry in path.iterdir() if path.exists() else ():
            try:
                sizes.append(entry.stat().st_size)
            except FileNotFoundError:
                continue
        largest = max(largest, sum(sizes))
    return largest


@pytest.mark.faults
def test_processes_share_it_within_the_bound(tmp_path: Path) -> None:
    """Two runs with other limits; one is killed again and again."""
    path, results = tmp_path / "chunks", CONTEXT.Queue()
    others = [CONTEXT.Process(target=work, args=(path, 20, seed, 12.0, results)) for seed in range(2)]
    for each in others:
        each.start()
    draws, end, kills = random.Random(0), time.monotonic() + 10, 0
    largest = 0
    while time.monotonic() < end:
        victim = CONTEXT.Process(target=work, args=(path, 10, kills, 60.0, CONTEXT.Queue()))
        victim.start()
        largest = max(largest, watch(path, time.monotonic() + draws.random() / 3))
        os.kill(victim.pid or 0, signal.SIGKILL)
        victim.join()
        kills += 1
    for each in others:
        each.join(60)
        assert each.exitcode == 0
    assert kills > 10
    assert sum(results.get() for _ in others) > 100
    # Scanning is not one moment: what is removed and what replaces it may both be counted.
    assert largest <= 24 * SIZE
    Folder(path, 8, 20).use(*(f"{number:04d}" for number in range(40)))
    assert sum(each.stat().st_size for each in path.iterdir()) <= 8 * SIZE + 24
    assert not list(path.glob("*.part"))
