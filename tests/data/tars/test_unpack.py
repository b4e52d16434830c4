"""Compressed shards, and those of servers that send whole files only, are copied once and read as the tars in them."""

import fcntl
import gzip
import os
from pathlib import Path

import pytest

from tests.data.making import caption_members, caption_shards, class_folder, write_tar
from tests.data.serving import FaultyServer
from vqclip.data import CaptionShardsConfig, ClassShardsConfig
from vqclip.data.tars.make import IndexMaker
from vqclip.data.tars.store import GzipError, gunzip
from vqclip.errors import DataError
from vqclip.process import progress


def compress(folder: Path, target: Path, ending: str = ".tar.gz") -> Path:
    target.mkdir(parents=True)
    for tar in folder.glob("*.tar"):
        (target / f"{tar.stem}{ending}").write_bytes(gzip.compress(tar.read_bytes(), mtime=0))
    return target


def read_all(path: Path | str) -> tuple[dict, list]:
    source = CaptionShardsConfig(path=str(path), remote={"tries": 1}).build()
    return source.fingerprint, [source.read(index) for index in range(len(source))]


def refusal(path: Path | str) -> str:
    with pytest.raises(DataError) as error:
        read_all(path)
    return str(error.value)


def unpacked(cache: Path) -> list[Path]:
    return sorted(cache.glob("packed/tars-*/*.tar"))


def test_compressed_shards_equal_plain_ones(tmp_path: Path, cache: Path) -> None:
    plain = caption_shards(tmp_path / "plain", (3, 2))
    small = compress(plain, tmp_path / "small", ".tgz")
    assert read_all(small) == read_all(plain)
    assert [path.name for path in unpacked(cache)] == ["00000.tar", "00001.tar"]
    for path in unpacked(cache):  # they are made again
        path.unlink()
    assert read_all(small) == read_all(plain)
    assert read_all(small / "00001.tgz")[1] == read_all(plain)[1][3:]


def test_compressed_classes(tmp_path: Path) -> None:
    plain = ClassShardsConfig(path=class_folder(tmp_path / "plain")).build()
    folder = class_folder(tmp_path / "small")
    tar = folder / "train" / "0.tar"
    (folder / "train" / "0.tar.gz").write_bytes(gzip.compress(tar.read_bytes()))
    with pytest.raises(DataError, match=r"0\.tar is there plain and compressed; remove one of them"):
        ClassShardsConfig(path=folder).build()
    tar.unlink()
    small = ClassShardsConfig(path=folder).build()
    assert small.fingerprint == plain.fingerprint
    assert small.read(4) == plain.read(4)


def test_compressed_shards_at_urls(tmp_path: Path, server: FaultyServer, cache: Path) -> None:
    plain = caption_shards(tmp_path / "plain", (3,))
    url = server.add(compress(plain, tmp_path / "small"))
    assert read_all(f"{url}/00000.tar.gz?key=x") == read_all(plain)
    assert len([request for request in server.requests if ".tar.gz" in request]) == 1
    server.files["/1.tar.gz"] = server.files["/00000.tar.gz"][:-9]
    assert "cannot be fetched: truncated" in refusal(f"{url}/1.tar.gz?key=y")


def test_gzip_of_several_members() -> None:
    data = [os.urandom(99_999), b"", b"x" * 1000]
    packed = b"".join(map(gzip.compress, data))
    for size in (7, 4096, len(packed)):
        blocks = [packed[at : at + size] for at in range(0, len(packed), size)]
        assert b"".join(gunzip([*blocks, b"\0" * 100, b"\0"])) == b"".join(data)
    with pytest.raises(GzipError, match="damaged gzip data near byte"):
        list(gunzip([packed, b"\0\0more"]))


def test_damage_is_named(tmp_path: Path, cache: Path) -> None:
    plain = write_tar(tmp_path / "a.tar", caption_members(0, 3)).read_bytes()
    packed, path = gzip.compress(plain), tmp_path / "b.tar.gz"
    path.write_bytes(packed[:-1])
    assert refusal(path).startswith(f"{path}: truncated: ends in the middle of its gzip data")
    path.write_bytes(b"")
    assert refusal(path).startswith(f"{path}: truncated")
    path.write_bytes(packed[:500] + bytes([packed[500] ^ 1]) + packed[501:])
    assert refusal(path).startswith(f"{path}: damaged gzip data near byte")
    path.write_bytes(gzip.compress(bytes(20 << 20)))
    assert "b.tar.gz: more than 100 times its size" in refusal(path)
    path.write_bytes(gzip.compress(plain[: len(plain) // 2]))
    assert "b.tar.gz: truncated: member" in refusal(path)
    path.write_bytes(plain)
    assert "incorrect header check; copy it again; a plain tar is named .tar" in refusal(path)
    assert "no such file" in refusal(tmp_path / "none.tar.gz")


def test_a_damaged_one_may_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = compress(caption_shards(tmp_path / "plain", (2, 3)), tmp_path / "small")
    (small / "00000.tar.gz").write_bytes((small / "00000.tar.gz").read_bytes()[:-9])
    source = CaptionShardsConfig(path=str(small), bad_shards="leave_out").build()
    assert (len(source), len(source.notes)) == (3, 1)
    assert f"{small}/00000.tar.gz: truncated: ends in the middle of its gzip data" in caplog.text


def test_a_changed_shard_is_copied_again(tmp_path: Path, cache: Path) -> None:
    folder = compress(caption_shards(tmp_path / "plain", (2,)), tmp_path / "small")
    former = CaptionShardsConfig(path=str(folder)).build()
    compress(caption_shards(tmp_path / "other", (3,)), tmp_path / "new")
    (tmp_path / "new" / "00000.tar.gz").replace(folder / "00000.tar.gz")
    assert len(former.read(1).image) > 0  # the copy
    assert len(read_all(folder)[1]) == 3
    assert len(unpacked(cache)) == 2


def test_shards_of_a_server_that_sends_whole_files(tmp_path, server, cache, caplog):
    caplog.set_level("INFO", "vqclip.data")
    plain = caption_shards(tmp_path, (3, 2))
    url, server.ranges = server.add(plain), False
    for _ in range(2):
        assert read_all(f"{url}/{{00000..00001}}.tar?key=secret") == read_all(plain)
    assert [path.name for path in unpacked(cache)] == ["00000.tar", "00001.tar"]
    tars = [request for request in server.requests if ".tar" in request]
    assert len(tars) == 2 + 2  # a question, which takes two requests, and the shards
    assert sum("copied http://" in text for text in caplog.messages) == 2
    assert "secret" not in caplog.text


def test_a_copy_that_another_process_makes_is_waited_for_with_heartbeats(tmp_path: Path) -> None:
    small = compress(caption_shards(tmp_path / "plain", (2,)), tmp_path / "small")
    tars = CaptionShardsConfig(path=str(small)).tar_set()
    (prepare,), (copy,) = tars.preparations(), tars._find_copies().values()
    copy.parent.mkdir(parents=True)
    beats: list[bool] = []
    with open(copy.with_name("00000.tar.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert prepare() is False  # such a shard is tried again later

        def release() -> None:
            beats.append(copy.exists())
            if len(beats) == 2:
                fcntl.flock(lock, fcntl.LOCK_UN)

        with progress.report_to(release):
            assert len(read_all(small)[1]) == 2
    assert beats[:2] == [False, False]


def test_a_copy_counts_once_it_is_checked(tmp_path, server, monkeypatch):
    """A process that ends between both leaves nothing behind that is used after the shard is mended."""
    url, server.ranges = server.add(caption_shards(tmp_path, (3,))), False
    whole = server.files["/00000.tar"]
    server.files["/00000.tar"] = whole[:150] + b"9999" + whole[154:]

    def end(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(IndexMaker, "part", end)
        with pytest.raises(KeyboardInterrupt):
            read_all(f"{url}/00000.tar")
    server.files["/00000.tar"] = whole
    assert len(read_all(f"{url}/00000.tar")[1]) == 3
