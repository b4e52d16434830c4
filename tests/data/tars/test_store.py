"""Ranges of bytes: from files, from a real http server that makes mistakes, and from S3."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.data import serving
from tests.data.serving import FaultyServer, status
from vqclip.data.remote.files import RemoteShard, Shard
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.tars.store import OpenFiles, read_ranges
from vqclip.errors import StorageError
from vqclip.io.files import Stamp

OPTIONS = {"tries": 4, "timeout_s": 5.0, "total_s": 30.0}
BODY = bytes(range(256)) * 999


class Part(NamedTuple):
    shard: int
    first: int
    end: int


class Table(NamedTuple):
    lengths: tuple[int, ...]
    times: tuple[int, ...] = ()
    path: Path = Path("index")

    def stamp(self, shard: int) -> tuple[int, int]:
        return self.lengths[shard], self.times[shard]


class Shards(NamedTuple):
    """Some shards with their index, and the open ones."""

    shards: Sequence[Shard]
    index: Table
    files: OpenFiles

    def read(self, ranges: Sequence[Part]) -> bytes:
        return read_ranges(ranges, *self)


def local(*files: Path) -> Shards:
    stamps = [file.stat() for file in files]
    times = tuple(each.st_mtime_ns for each in stamps)
    return Shards(files, Table(tuple(each.st_size for each in stamps), times), OpenFiles())


def remote(*urls: str, **options: float) -> Shards:
    shards = [RemoteShard(url, RemoteConfig(**{**OPTIONS, **options})) for url in urls]
    return Shards(shards, Table((len(BODY),) * len(urls)), OpenFiles())


@pytest.fixture
def url(server: FaultyServer) -> str:
    server.files["/0.tar"] = BODY
    return f"{server.url}/0.tar"


def refusal(store: Shards, *parts: Part) -> StorageError:
    with pytest.raises(StorageError) as error:
        store.read(parts or [Part(0, 100, 300)])
    return error.value


# ---- files


def test_ranges_of_files_come_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(BODY)
    (tmp_path / "1.tar").write_bytes(BODY[::-1])
    store = local(tmp_path / "0.tar", tmp_path / "1.tar")
    parts = [Part(0, 200_000, len(BODY)), Part(1, 0, 512), Part(0, 5, 6)]
    expected = BODY[200_000:] + BODY[::-1][:512] + BODY[5:6]
    assert store.read(parts) == expected
    assert pickle.loads(pickle.dumps(store)).read(parts) == expected
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(store.read, (parts,)) == expected


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "0.tar"
    file.write_bytes(BODY)
    store = local(file)
    store.read([Part(0, 0, 5)])
    os.utime(file, ns=(1, 1))
    error = refusal(store)
    assert str(error).startswith(f"{file}: the shard has changed since it was indexed")
    assert error.kind == "changed shard"
    file.unlink()
    assert str(refusal(store)) == f"{file}: cannot be read: No such file or directory"


# ---- http


def test_only_the_range_is_sent(server: FaultyServer, url: str) -> None:
    store = remote(url, url)
    assert store.read([Part(0, 100, 300), Part(1, len(BODY) - 1, len(BODY))]) == BODY[100:300] + BODY[-1:]
    assert server.sent == 201
    assert pickle.loads(pickle.dumps(store)).read([Part(0, 7, 9)]) == BODY[7:9]
    with multiprocessing.get_context("fork").Pool(1) as pool:  # after this process has used its connections
        assert pool.apply(store.read, ([Part(0, 7, 9)],)) == BODY[7:9]


def test_a_server_that_sends_parts_no_more(server: FaultyServer, url: str) -> None:
    server.ranges = False
    assert "the server answers a request for a part of the file with all of it" in str(refusal(remote(url)))


def test_a_page_in_place_of_a_part_is_tried_again(server: FaultyServer, url: str, pauses: list[float]) -> None:
    server.faults["/0.tar"] = [lambda handler, _: serving.answer(handler, b"<html>please log in</html>")]
    assert remote(url).read([Part(0, 100, 300)]) == BODY[100:300]
    assert (len(server.requests), server.sent, len(pauses)) == (2, 200, 1)


@pytest.mark.parametrize(
    ("fault", "message", "tries"),
    [
        (status(206), "HTTP 206 Partial Content with Content-Range ''; expected 206 and a part", 1),
        (status(206, Content_Range="bytes 0-9/*" + "9" * 99), "with Content-Range 'bytes 0-9/*999", 1),
        (status(206, Content_Range=f"bytes 0-9/{len(BODY)}"), "sent bytes 0-9/255744; asked for bytes 100-299", 4),
    ],
)
def test_what_does_not_pass_is_an_error(
    server: FaultyServer, url: str, pauses: list[float], fault: serving.Fault, message: str, tries: int
) -> None:
    server.for_ever["/0.tar"] = fault
    text = str(refusal(remote(url)))
    assert text.startswith(f"{url}: cannot be fetched: ")
    assert message in text
    assert f"Tries: {tries} of remote.tries=4, in " in text


@pytest.mark.parametrize("size", [len(BODY) - 1, len(BODY) + 1, 200, 100])
def test_another_size_is_a_changed_shard(server: FaultyServer, url: str, size: int) -> None:
    server.files["/0.tar"] = (BODY + b"x")[:size]
    error = refusal(remote(url))
    assert error.kind == "changed shard"
    assert (
        f"{url}: has changed since it was indexed: {len(BODY)} bytes then, {'at most ' * (size == 100)}{size} bytes now"
        in str(error)
    )


def test_a_body_that_is_longer_or_shorter_than_the_part(server: FaultyServer, url: str, pauses: list[float]) -> None:
    for wrong in (BODY[:100], BODY[:300]):
        server.faults["/0.tar"] = [
            lambda handler, _, wrong=wrong: (
                handler.send_response(206),
                handler.send_header("Content-Range", f"bytes 100-299/{len(BODY)}"),
                handler.end_headers(),
                handler.wfile.write(wrong),
            )
        ]
        assert remote(url).read([Part(0, 100, 300)]) == BODY[100:300]
    assert len(pauses) == 2


def open_now() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("allowed", "most"), [(40, 10), (10**6, 20), (resource.RLIM_INFINITY, 20), (3, 1)])
def test_files_stay_open_within_a_share_of_the_limit(
    tmp_path: Path, allowed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (allowed, allowed))
    files, before = OpenFiles(), open_now()
    for number in [*range(20), 0, 19]:
        path = tmp_path / str(number)
        path.write_bytes(b"%03d" % number)
        status = path.stat()
        assert files.read(path, (3, status.st_mtime_ns), 1, 2, "shard") == b"%02d" % number
    assert open_now() - before == most
    del files
    assert open_now() == before


def test_a_stale_handle_is_closed_and_the_file_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"bytes")
    files, stamp = OpenFiles(), (5, path.stat().st_mtime_ns)
    assert files.read(path, stamp, 0, 5, "shard") == b"bytes"
    before = open_now()

    def fail(file: int) -> Stamp:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(Stamp, "of", fail)
        with pytest.raises(StorageError, match="shard: cannot be read: Stale file handle"):
            files.read(path, stamp, 0, 5, "shard")
    assert open_now() == before - 1
    assert files.read(path, stamp, 0, 5, "shard") == b"bytes"
