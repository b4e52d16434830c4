"""Shards from an S3-compatible server. Needs the extra test-s3."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data import serving
from tests.data.loading import global_batches, open_data, same
from tests.data.making import caption_members, caption_shards, class_folder, write_tar
from vqclip.data import CaptionShardsConfig, ClassShardsConfig
from vqclip.data.remote import transfer
from vqclip.data.remote.files import RemoteShard, fetch_bytes
from vqclip.data.remote.retry import Deadline, RemoteConfig
from vqclip.data.sources.paths import find_shards
from vqclip.errors import DataError, StorageError

pytestmark = pytest.mark.faults

OPTIONS = {"tries": 2, "timeout_s": 5.0, "total_s": 60.0}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Files of s3://bucket, and its server, which may be stopped."""
    with serving.s3(monkeypatch, "bucket") as found:
        yield found


def put(files: Any, folder: Path, below: str) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            files.pipe_file(f"bucket/{below}/{file.relative_to(folder)}", file.read_bytes())


def evict(cache: Path) -> None:
    shutil.rmtree(cache / "chunks", ignore_errors=True)


def whole(url: str, **options: float) -> bytes:
    return fetch_bytes(url, RemoteConfig(**{**OPTIONS, **options}), 1 << 26)


def test_batches_from_s3_are_those_from_files(bucket: Any, tmp_path: Path, cache: Path) -> None:
    caption_shards(tmp_path / "a", (5, 4, 3))
    class_folder(tmp_path / "c", 6)
    put(bucket[0], tmp_path, "data")
    local = (CaptionShardsConfig(path=str(tmp_path / "a")), ClassShardsConfig(path=tmp_path / "c"))
    here = open_data(tmp_path, sources=local)
    expected = global_batches(here, 0, 4, 1)
    classes = ClassShardsConfig(path="s3://bucket/data/c", remote=OPTIONS)
    for path in ("a", "a/", "a/*.tar", "a/{00000..00002}.tar", "{a}"):
        evict(cache)
        source = CaptionShardsConfig(path=f"s3://bucket/data/{path}", remote=OPTIONS)
        there = open_data(tmp_path, sources=(source, classes), workers=2)
        assert there.fingerprint == here.fingerprint
        assert same(global_batches(there, 0, 4, 1), expected)
    evict(cache)
    assert same(global_batches(there, 0, 4, 1), expected)  # fetched by workers, after a fork


def test_large_objects_come_in_several_requests(bucket: Any, tmp_path: Path, cache: Path) -> None:
    members = {**caption_members(0, 2), "big.txt": bytes(range(256)) * 140_000}  # 34 MiB
    write_tar(tmp_path / "0.tar", members)
    put(bucket[0], tmp_path, "big")
    assert len(CaptionShardsConfig(path="s3://bucket/big").build()) == 3
    assert whole("s3://bucket/big/0.tar") == (tmp_path / "0.tar").read_bytes()


def test_what_is_not_there(bucket: Any, tmp_path: Path, pauses: list[float]) -> None:
    put(bucket[0], caption_shards(tmp_path, (1,)), "a")
    with pytest.raises(DataError, match=r"s3://bucket/none/\*: matches nothing; .* names of bucket and folder right"):
        find_shards(["s3://bucket/none"])
    for url in ("s3://bucket/a/1.tar", "s3://nobucket/1.tar"):
        with pytest.raises(StorageError, match=f"{url}: cannot be fetched: not found .404.; this is not tried again"):
            whole(url)
    assert pauses == []


def test_each_request_is_sent_once(bucket: Any, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither botocore nor s3fs tries again by itself; and what the server takes its time over ends in time."""
    with serving.serving() as other:
        monkeypatch.setenv("AWS_ENDPOINT_URL", other.url)
        transfer._file_system.cache_clear()
        other.for_ever["/bucket/0.tar"] = serving.status(503)
        with pytest.raises(StorageError, match=r"Tries: 2 of remote.tries=2"):
            whole("s3://bucket/0.tar", timeout_s=5.5)
        assert len(other.requests) == 2
        other.for_ever["/bucket/0.tar"] = serving.dribbling(other, 0.2)
        other.files["/bucket/0.tar"] = bytes(1000)
        start = time.monotonic()
        with pytest.raises(StorageError, match=r"FSTimeoutError. Tries: 1 .* s of remote.total_s=2"):
            whole("s3://bucket/0.tar", timeout_s=5.5, total_s=2.0)
        assert time.monotonic() - start < 100  # all of it would take 200


def test_an_object_that_changes_while_it_comes_is_fetched_again(bucket, tmp_path, pauses, monkeypatch):
    monkeypatch.setattr(transfer, "_BLOCK", 4096)
    bucket[0].pipe_file("bucket/c/0.tar", b"a" * 10_000)
    read, changes = transfer._object_blocks, [b"b" * 10_000]

    def changing(*args: Any) -> Iterator[bytes]:
        for block in read(*args):
            if changes:
                bucket[0].pipe_file("bucket/c/0.tar", changes.pop())
            yield block

    monkeypatch.setattr(transfer, "_object_blocks", changing)
    assert whole("s3://bucket/c/0.tar") == b"b" * 10_000
    assert len(pauses) == 1


def test_a_server_that_is_gone(bucket: Any, pauses: list[float]) -> None:
    bucket[1].stop()
    with pytest.raises(StorageError, match=r"cannot be fetched: (?s:.*)Tries: 2 of remote.tries=2"):
        whole("s3://bucket/a/0.tar")
    assert len(pauses) == 1
    with pytest.raises(StorageError, match=r"s3://bucket/a/\*: cannot be fetched: (?s:.*)Tries: 2 of"):
        find_shards(["s3://bucket/a"], RemoteConfig(**OPTIONS))


# ---- parts of objects


def test_a_part_of_an_object_is_one_request(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytes(range(256)) * 100
    bucket[0].pipe_file("bucket/p/0.tar", body)
    shard = RemoteShard("s3://bucket/p/0.tar", RemoteConfig(**OPTIONS))
    with monkeypatch.context() as patch:  # which would be the size of the whole object
        patch.setattr(type(bucket[0]), "info", None)
        assert shard.read(1000, 1300, len(body), Deadline(20)) == body[1000:1300]
        assert shard.read(len(body) - 1, len(body), len(body), Deadline(20)) == body[-1:]
    for size in (1200, 1000, 10):
        bucket[0].pipe_file("bucket/p/0.tar", body[:size])
        with pytest.raises(StorageError, match=rf"has changed since .* 25600 bytes then, {size} bytes now") as error:
            shard.read(1000, 1300, len(body), Deadline(20))
        assert error.value.kind == "changed shard"
    bucket[0].rm_file("bucket/p/0.tar")
    with pytest.raises(StorageError, match=r"not found .404.; this is not tried again"):
        shard.read(1000, 1300, len(body), Deadline(20))
