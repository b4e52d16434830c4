"""``vqclip data index``: what it writes is what training finds."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands import command
from tests.data.making import class_folder
from tests.data.remote.test_s3 import bucket, put  # noqa: F401
from tests.data.tars.test_index import tiny
from vqclip.data.remote.files import RemoteShard
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.sources.paths import find_shards
from vqclip.data.tars.index import open_index
from vqclip.data.tars.open import TarSet, cached_index, find_index, index_name
from vqclip.data_tools import index as job
from vqclip.errors import StorageError

main = command("data")


def run(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert main(["index", *map(str, arguments)]) == status
    out, error = capsys.readouterr()
    return error if status else out


def test_beside_the_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = tiny(tmp_path / "a")
    text = run(capsys, tmp_path / "a", "--workers", 2)
    path = tmp_path / "a" / index_name(shards)
    said = r": 20 samples in 8 shards, chunks of 128, [\d.]+ kB; 8 shards read, 0 known\ntraining finds it beside .*"
    assert re.fullmatch(re.escape(str(path)) + said, text.rstrip())
    assert find_index(shards).path == path
    before = path.stat().st_mtime_ns
    assert "no shard had to be read" in run(capsys, tmp_path / "a")
    assert path.stat().st_mtime_ns == before
    os.utime(shards[3])
    assert "1 shards read, 7 known" in run(capsys, tmp_path / "a")
    assert "no shard had to be read" in run(capsys, tmp_path / "a", "--chunk", 4)
    assert len(open_index(path)) == 5
    path.write_bytes(b"")
    assert "no shard had to be read" in run(capsys, tmp_path / "a")
    # some of the shards have an index of their own
    assert "13 samples in 3 shards" in run(capsys, tmp_path / "a" / "{1..3}.tar")
    assert len(list((tmp_path / "a").glob("*.index"))) == 2
    assert "6 samples in 1 shards" in run(capsys, class_folder(tmp_path / "classes"), "split=train")


def test_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shards = tiny(tmp_path / "a")
    (tmp_path / "a" / job.PARTS).mkdir()  # another user's
    monkeypatch.setattr(job.os, "access", lambda path, _: path.name != job.PARTS)
    assert "training finds it beside the shards" in run(capsys, tmp_path / "a")
    assert not any((tmp_path / "a" / job.PARTS).iterdir())
    find_index(shards).path.unlink()
    monkeypatch.setattr(job.os, "access", lambda *_: False)  # a read-only folder; root may write to any
    assert "it is in the cache, where training on this machine" in run(capsys, tmp_path / "a")
    assert find_index(shards).path == cached_index(shards)


def test_web_servers_cannot_be_written_to(tmp_path, capsys, server):
    shards = tiny(tmp_path / "a")
    url = server.add(tmp_path / "a", "/d")
    source = f"{url}/{{0..7}}.tar?key=secret"
    text = run(capsys, source)
    assert "secret" not in text
    assert f"for other machines copy it to {url}/{index_name(shards)}\n" in text
    there = find_shards([source], RemoteConfig())
    assert find_index(there).path == cached_index(there)
    assert index_name(there) == index_name(shards)
    assert "no shard had to be read" in run(capsys, source)
    server.files.pop("/d/3.tar")
    assert "not found (404)" in run(capsys, source, status=1)


def test_a_bucket_without_permission_to_write(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise StorageError("s3://b/a/writable: cannot be written: AccessDenied", kind)

    monkeypatch.setattr(job.RemoteFolder, "write", refuse)
    shards = [RemoteShard(f"s3://b/a/{n}.tar") for n in range(3)]
    kind = "gone"
    path, _, upload, advice = job._choose_place(TarSet(shards, RemoteConfig()))
    assert path == cached_index(shards)
    assert (upload, "AccessDenied; the index goes to the cache" in caplog.text) == (None, True)
    assert advice.endswith(f"for other machines copy it to s3://b/a/{index_name(shards)}")
    kind = "storage"  # the store does not answer: nothing else is chosen in its place
    with pytest.raises(StorageError):
        job._choose_place(TarSet(shards, RemoteConfig()))


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("filepath,title\n")
    assert "no such file or folder" in run(capsys, tmp_path / "none", status=1)
    assert "SOURCE: kind csv has no chunks; expected tars" in run(capsys, tmp_path / "t.csv", status=2)


# ---- make faults


def many(folder: Path, count: int) -> list[Path]:
    (first,) = tiny(folder, (6,))
    for number in range(count):
        (folder / f"{number:04d}.tar").write_bytes(first.read_bytes())
    first.unlink()
    return sorted(folder.iterdir())


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vqclip", "data", "index", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.faults
def test_killed_and_shared(tmp_path: Path) -> None:
    """One of two processes is killed in the middle; the other, a third finish; the index is that of one."""
    shards = many(tmp_path / "a", 400)
    parts = tmp_path / "a" / job.PARTS
    first, second = (start(tmp_path / "a", "--workers", 1) for _ in range(2))
    while len(list(parts.glob("*.part"))) < 20:
        time.sleep(0.01)
        assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert second.communicate()[0].startswith(f"{tmp_path}/a/vqclip-")
    shared = (tmp_path / "a" / index_name(shards)).read_bytes()
    third = start(tmp_path / "a")
    assert "no shard had to be read" in third.communicate()[0]
    for path in (*parts.iterdir(), tmp_path / "a" / index_name(shards)):
        path.unlink()
    assert "400 shards read" in start(tmp_path / "a", "--workers", 8).communicate()[0]
    assert (tmp_path / "a" / index_name(shards)).read_bytes() == shared


@pytest.mark.faults
def test_in_a_bucket(tmp_path: Path, bucket: Any, capsys: pytest.CaptureFixture[str], cache: Path) -> None:  # noqa: F811
    shards = tiny(tmp_path / "a")
    put(bucket[0], tmp_path / "a", "i")
    text = run(capsys, "s3://bucket/i")
    name = index_name(shards)
    assert text.startswith(f"s3://bucket/i/{name}: 20 samples in 8 shards")
    assert text.endswith("training finds it beside the shards\n")
    assert not bucket[0].exists("bucket/i/writable")  # which tried whether it can be written
    (cache / "index").rename(tmp_path / "former")  # another machine
    there = find_shards(["s3://bucket/i/{0..7}.tar"], RemoteConfig())
    assert find_index(there).path == cached_index(there)
    assert "no shard had to be read" in run(capsys, "s3://bucket/i")
    bucket[0].rm_file(f"bucket/i/{name}")
    run(capsys, "s3://bucket/i")
    assert bucket[0].exists(f"bucket/i/{name}")
    changed = tiny(tmp_path / "b", (0, 3, 9, 1, 0, 2, 4, 1))
    bucket[0].pipe_file("bucket/i/7.tar", changed[7].read_bytes())
    assert "1 shards read, 7 known" in run(capsys, "s3://bucket/i")
    assert "cannot be fetched: not found" in run(capsys, "s3://bucket/i/{0..8}.tar", status=1)
    assert "cannot be fetched: not found" in run(capsys, "s3://bucket/none/{0..8}.tar", status=1)
    assert "cannot be fetched: not found" in run(capsys, "s3://nobucket/{0..8}.tar", status=1)
