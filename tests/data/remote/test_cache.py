"""The folder of fetched shards: its bound, who is in use, who dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vqclip.data.remote import cache as cache_module
from vqclip.data.remote.cache import CachedShard, PartialShard, ShardCache
from vqclip.data.remote.retry import Deadline
from vqclip.errors import StorageError

SIZE = 1000


def content(key: str) -> bytes:
    return key.encode() * (SIZE // len(key))


class Folder:
    """A cache of three shards, and what was fetched into it."""

    def __init__(self, folder: Path, limit: int = 3 * SIZE, wait_s: float = 0.0):
        self.path, self.wait_s = folder, wait_s
        self.cache = ShardCache(folder, limit)
        self.fetched: list[str] = []

    def open(self, key: str, fill: Callable[[PartialShard], None] | None = None) -> CachedShard:
        def ordinary(part: PartialShard) -> None:
            self.fetched.append(key)
            part.reserve(SIZE)
            part.write(content(key))

        return self.cache.open(key, None, fill or ordinary, Deadline(self.wait_s))

    def use(self, *keys: str) -> None:
        for key in keys:
            with self.held(key) as file:
                assert os.pread(file, 2 * SIZE, 0) == content(key)

    @contextlib.contextmanager
    def held(self, key: str) -> Iterator[int]:
        file = self.open(key).file
        try:
            yield file
        finally:
            os.close(file)

    @property
    def keys(self) -> str:
        return "".join(sorted(path.name[0] for path in self.path.glob("*.tar")))

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.path.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "shards")


def test_the_least_recently_used_go_first(folder: Folder) -> None:
    folder.use(*"abc")
    assert folder.keys == "abc"
    folder.use(*"ad")
    assert folder.keys == "acd"
    folder.use(*"ce")
    assert folder.keys == "cde"
    assert folder.fetched == list("abcde")
    folder.use("b")
    assert folder.keys == "bce"
    assert folder.size <= folder.cache.limit


def test_what_a_clock_that_was_ahead_left_over_goes_first(folder: Folder) -> None:
    folder.use(*"abc")
    for path in folder.path.glob("b-*.tar"):
        os.utime(path, ns=(path.stat().st_atime_ns + 3600 * 10**9, path.stat().st_mtime_ns))
    folder.use("d", "a")
    assert folder.keys == "acd"


def test_random_use_stays_within_the_bound(folder: Folder) -> None:
    for number in range(60):
        folder.use("abcdefg"[number * number * 5 % 7])
        assert folder.size <= folder.cache.limit
    assert len(folder.keys) == 3


def test_what_is_in_use_stays(folder: Folder) -> None:
    with folder.held("a") as a, folder.held("b"):
        folder.use(*"cdef")
        assert folder.keys == "abf"
        with folder.held("c"):
            with pytest.raises(
                StorageError, match=r"no room for 1000 bytes in .*/shards, after 0.0 s of .*=0: .* in use"
            ):
                folder.use("d")
            assert folder.keys == "abc"
            assert not list(folder.path.glob("*.part"))
        assert os.pread(a, 5, 0) == b"aaaaa"
    folder.use("d")
    assert folder.size <= folder.cache.limit


def test_room_is_waited_for(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "shards", SIZE, wait_s=20)
    with folder.held("a"):
        other = threading.Thread(target=folder.use, args=("b",))
        other.start()
        other.join(0.2)
        assert other.is_alive()
        assert folder.keys == "a"
    other.join(20)
    assert folder.keys == "b"


def test_a_shard_on_its_way_counts_in_full(folder: Folder) -> None:
    def fill(part: PartialShard) -> None:
        part.reserve(2 * SIZE)
        with pytest.raises(StorageError, match="no room for"):
            folder.open("b", lambda other: other.reserve(2 * SIZE))
        folder.use("c")
        part.write(bytes(2 * SIZE))

    os.close(folder.open("a", fill).file)
    assert folder.keys == "ac"


def test_content_without_an_announced_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_STEP", 64)
    folder = Folder(tmp_path / "shards")
    folder.use(*"abc")
    held = folder.open("d", lambda part: [part.write(b"x" * 100) for _ in range(25)])
    os.close(held.file)
    assert held.sha256 == hashlib.sha256(b"x" * 2500).hexdigest()
    assert (folder.keys, folder.size) == ("d", 2500)
    with pytest.raises(StorageError, match=r"has 3100 bytes or more, and the cache may take 3000 \(remote.cache_gib="):
        folder.open("e", lambda part: [part.write(b"x" * 100) for _ in range(40)])
    assert not list(folder.path.glob("*.part"))


def test_nothing_half_fetched_remains(folder: Folder) -> None:
    def fail(part: PartialShard) -> None:
        part.reserve(SIZE)
        part.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.open("a", fail)
    assert [path.name for path in folder.path.iterdir()] == ["lock"]


def test_a_new_try_begins_anew(folder: Folder) -> None:
    def twice(part: PartialShard) -> None:
        part.reserve(SIZE)
        part.write(b"half of it")
        part.restart()
        part.write(content("a"))

    held = folder.open("a", twice)
    assert held.sha256 == hashlib.sha256(content("a")).hexdigest()
    os.close(held.file)
    folder.use("a")
    assert folder.fetched == []


def test_another_content_is_fetched_where_one_is_wanted(folder: Folder) -> None:
    os.close(folder.open("a", lambda part: part.write(b"old")).file)
    wanted = hashlib.sha256(b"new").hexdigest()
    held = folder.cache.open("a", wanted, lambda part: part.write(b"new"), Deadline(1))
    assert held.sha256 == wanted
    os.close(held.file)
    folder.cache.remove("a")
    assert folder.keys == ""


def hold_a_part(folder: Path, ready) -> None:
    def fill(part: PartialShard) -> None:
        part.reserve(2 * SIZE)
        part.write(b"half")
        ready.set()
        signal.pause()

    Folder(folder).open("a", fill)


def test_a_process_that_dies_leaves_nothing_that_counts(folder: Folder) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold_a_part, args=(folder.path, ready))
    process.start()
    try:
        assert ready.wait(30)
        with pytest.raises(StorageError, match="another process has been fetching this shard for 0 s"):
            folder.use("a")
        with pytest.raises(StorageError, match="no room for 2000 bytes"):
            folder.open("b", lambda part: part.reserve(2 * SIZE))
        assert (folder.path / "a.part").stat().st_size == 2 * SIZE
    finally:
        process.kill()
        process.join(30)
    assert (folder.path / "a.part").exists()
    folder.use(*"bcd")  # which needs all the room
    assert [path.name for path in folder.path.glob("*.part")] == []
    (folder.path / "a.part").write_bytes(b"rubbish of somebody who died")
    folder.use("a")
    assert folder.keys == "acd"


def test_a_full_disk_is_explained(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"/shards: cannot be written \(No space left on device\); set VQCLIP_CACHE"):
        folder.use("a")
    assert [path.name for path in folder.path.iterdir()] == ["lock"]


def test_a_shard_is_on_the_disk_before_it_has_its_name(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file))[1])
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("rename"), replace(old, new))[1])
    folder.use("a")
    assert done == [str(folder.path / "a.part"), "rename", str(folder.path)]


def test_a_lock_is_shared_by_readers(folder: Folder) -> None:
    with folder.held("a") as one, folder.held("a") as two:
        fcntl.flock(one, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert folder.fetched == ["a"]
