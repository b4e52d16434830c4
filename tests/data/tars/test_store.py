"""Ranges of bytes: from files, and from a real http server that makes mistakes."""

import errno
import multiprocessing
import os
import pickle
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data import serving
from tests.data.making import open_tars, write_tar
from tests.data.serving import FaultyServer, status
from vqclip.data.remote.cache import BoundedCache
from vqclip.data.remote.files import RemoteShard
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.tars.index import ByteRange
from vqclip.data.tars.members import USUAL
from vqclip.data.tars.reader import TarReader
from vqclip.data.tars.store import OpenFiles, open_files
from vqclip.errors import StorageError
from vqclip.io.files import Stamp

BODY = bytes(range(256)) * 999


@pytest.fixture
def url(server: FaultyServer) -> str:
    server.files["/0.tar"] = BODY
    return f"{server.url}/0.tar"


def remote(url: str) -> RemoteShard:
    return RemoteShard(url, RemoteConfig(tries=4, timeout_s=5.0, total_s=30.0))


def read(url: str) -> bytes:
    return remote(url).read(100, 300, len(BODY))


def refusal(url: str) -> StorageError:
    with pytest.raises(StorageError) as error:
        read(url)
    return error.value


def test_only_the_range_is_sent(server: FaultyServer, url: str) -> None:
    assert read(url) == BODY[100:300]
    assert remote(url).read(len(BODY) - 1, len(BODY), len(BODY)) == BODY[-1:]
    assert server.sent == 201
    assert pickle.loads(pickle.dumps(remote(url))).read(7, 9, len(BODY)) == BODY[7:9]
    with multiprocessing.get_context("fork").Pool(1) as pool:  # after this process has used its connections
        assert pool.apply(read, (url,)) == BODY[100:300]


def test_a_server_that_sends_parts_no_more(server: FaultyServer, url: str, tmp_path: Path) -> None:
    server.ranges, index = False, SimpleNamespace(lengths=[len(BODY)], path="index", keys=None)
    reader = TarReader([remote(url)], index, USUAL, BoundedCache(tmp_path, 1))  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="the server answers a request for a part of the file with all of it"):
        reader._read_ranges([ByteRange(0, 100, 300)])


def test_a_page_in_place_of_a_part_is_tried_again(server: FaultyServer, url: str, pauses: list[float]) -> None:
    server.faults["/0.tar"] = [lambda handler, _: serving.answer(handler, b"<html>please log in</html>")]
    assert read(url) == BODY[100:300]
    assert (len(server.requests), server.sent, len(pauses)) == (2, 200, 1)


@pytest.mark.parametrize(
    ("fault", "message", "tries"),
    [
        (status(206), "HTTP 206 Partial Content with Content-Range ''; expected 206 and a part", 1),
        (status(206, Content_Range="bytes 0-9/*" + "9" * 99), "with Content-Range 'bytes 0-9/*999", 1),
        (status(206, Content_Range=f"bytes 0-9/{len(BODY)}"), "sent bytes 0-9/255744; asked for bytes 100-299", 4),
    ],
)
def test_what_does_not_pass_is_an_error(server, url, pauses, fault, message, tries):
    server.for_ever["/0.tar"] = fault
    text = str(refusal(url))
    assert text.startswith(f"{url}: cannot be fetched: ")
    assert message in text
    assert f"Tries: {tries} of remote.tries=4, in " in text


@pytest.mark.parametrize("size", [len(BODY) - 1, len(BODY) + 1, 200, 100])
def test_another_size_is_a_changed_shard(server: FaultyServer, url: str, size: int) -> None:
    server.files["/0.tar"] = (BODY + b"x")[:size]
    error = refusal(url)
    assert error.kind == "changed shard"
    now = "at most 100" if size == 100 else str(size)
    assert f"{url}: has changed since it was indexed: {len(BODY)} bytes then, {now} bytes now" in str(error)


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
        assert read(url) == BODY[100:300]
    assert len(pauses) == 2


def open_now() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("allowed", "most"), [(40, 10), (10**6, 20), (resource.RLIM_INFINITY, 20), (3, 1)])
def test_files_stay_open_within_a_share_of_the_limit(tmp_path, allowed, most, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (allowed, allowed))
    files, before = OpenFiles(), open_now()
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"%03d" % number)
    for number in [*range(20), 0, 19]:
        path = tmp_path / str(number)
        assert files.read(path, (3, path.stat().st_mtime_ns), 1, 2) == b"%02d" % number
    assert open_now() - before == most
    files.close()
    assert open_now() == before


def test_all_sources_share_the_limit_and_a_worker_inherits_no_file(tmp_path, monkeypatch):
    open_files.close()
    monkeypatch.setattr(open_files._files, "_limit", 5)
    for source in range(3):
        tars = [write_tar(tmp_path / f"{source}-{number}.tar", {"1.jpg": b"x", "1.txt": b""}) for number in range(4)]
        reader = open_tars(*tars)
        assert [reader.read(row, "image") for row in range(4)] == [b"x"] * 4
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(open_tars_now, (str(tmp_path),)) == 0
    assert open_tars_now(str(tmp_path)) == 5


def open_tars_now(folder: str) -> int:
    return sum(Path(file).resolve().is_relative_to(folder) for file in Path("/proc/self/fd").iterdir())


def test_a_stale_handle_is_closed_and_the_file_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"bytes")
    files, stamp = OpenFiles(), (5, path.stat().st_mtime_ns)
    assert files.read(path, stamp, 0, 5) == b"bytes"
    before = open_now()

    def fail(file: int) -> Stamp:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(Stamp, "of", fail)
        with pytest.raises(StorageError, match="shard: cannot be read: Stale file handle"):
            files.read(path, stamp, 0, 5)
    assert open_now() == before - 1
    assert files.read(path, stamp, 0, 5) == b"bytes"
    path.with_name("new").write_bytes(b"other")
    os.utime(path.with_name("new"), ns=(2, 2))
    os.replace(path.with_name("new"), path)
    assert files.read(path, (5, 2), 0, 5) == b"other"  # indexed again
    os.utime(path, ns=(1, 1))
    with pytest.raises(StorageError, match="shard: the shard has changed since it was indexed"):
        files.read(path, (5, 2), 0, 5)
    path.unlink()
    with pytest.raises(StorageError, match="shard: cannot be read: No such file or directory"):
        OpenFiles().read(path, stamp, 0, 5)
