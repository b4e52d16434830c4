import gzip
import os
import random
import tarfile
from pathlib import Path

import pytest
import webdataset

from tests.data import hostile
from tests.data.making import caption_members, count_calls, member_places, open_tars, write_tar
from tests.fuzz import shards
from vqclip.data.tars.headers import Member, walk_tar
from vqclip.errors import DataError


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names(tmp_path: Path, kind: int) -> None:
    folder = "f" * 60 + "/" + "g" * 60
    names = [f"{folder}/{'n' * 90}" if kind == tarfile.USTAR_FORMAT else f"{folder}/{'n' * 300}", "d.x/ünïcode 图"]
    members = {f"{name}.png": name.encode() for name in names}
    index = open_tars(write_tar(tmp_path / "a.tar", members, kind))
    assert [index.key(row) for row in range(2)] == names
    assert [index.read(row, "image") for row in range(2)] == [name.encode() for name in names]


def test_samples_are_webdatasets_samples(tmp_path: Path) -> None:
    members = {"a/1.jpg": b"x", "a/1.txt": b"y", "b/1.JPEG": b"z", "b/1.seg.png": b"q", "b/1.txt": b"w", "2.txt": b"v"}
    path = write_tar(tmp_path / "a.tar", members)
    index = open_tars(path)
    theirs = [sample["__key__"] for sample in webdataset.WebDataset(str(path), shardshuffle=False)]
    assert [index.key(row) for row in range(len(index))] == theirs == ["a/1", "b/1", "2"]
    assert index.read(1, "image") == b"z"


def test_other_files_and_folders_are_left_alone(tmp_path: Path) -> None:
    members = [tarfile.TarInfo(name) for name in ("README", "d", "d/._1.jpg", "d/1.pyd", "d/1.pkl", "d/1.jpg")]
    members[1].type = tarfile.DIRTYPE
    assert len(open_tars(hostile.tar_with(tmp_path / "a.tar", [(member, b"") for member in members]))) == 1


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as error:
        open_tars(path)
    assert str(path) in str(error.value)
    return str(error.value)


def damaged(data: bytearray, start: int, how: str) -> bytes:
    """A tar whose second sample's image has its header at a place."""
    if how == "flipped":
        data[start + 3] ^= 4
    elif how == "zeroed":
        data[start : start + 512] = bytes(512)
    return bytes(data[: {"in a member": start + 522, "in a header": start + 412, "between members": start}.get(how)])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("in a member", "truncated: member '000000001.jpg' at offset {}"),
        ("in a header", "truncated at offset {}"),
        ("between members", "ends at offset {} without the end-of-archive mark"),
        ("zeroed", "zeroed header at offset {}"),
        ("flipped", "no valid tar header at offset {}"),
    ],
)
def test_damage_is_named(tmp_path: Path, how: str, message: str) -> None:
    path = write_tar(tmp_path / "a.tar", caption_members(0, 3))
    start = int(member_places(open_tars(path))[..., 0][1, 0]) - 512
    path.write_bytes(damaged(bytearray(path.read_bytes()), start, how))
    assert message.format(start) in refusal(path)
    if how == "between members":  # what the message says helps
        path.write_bytes(path.read_bytes() + bytes(1024))
        assert len(open_tars(path)) == 1


def test_missing_empty_garbage_and_compressed(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.tar")
    (tmp_path / "empty.tar").touch()
    assert "is empty" in refusal(tmp_path / "empty.tar")
    (tmp_path / "noise.tar").write_bytes(bytes(range(1, 256)) * 40)
    assert "no valid tar header at offset 0" in refusal(tmp_path / "noise.tar")
    plain = write_tar(tmp_path / "a.tar", caption_members(0, 1))
    (tmp_path / "a.tar.gz.tar").write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    assert r"but b'\x1f\x8b\x08" in refusal(tmp_path / "a.tar.gz.tar")
    for table in (b"url,caption\nx,y\n" * 100, b"url\tcaption\n", b"PAR1\0", b"<html><body>404</body></html>"):
        (tmp_path / "table.csv").write_bytes(table)
        message = refusal(tmp_path / "table.csv")
        assert f"table.csv: no valid tar header at offset 0, but {table[:16]!r}; expected a shard" in message
    (tmp_path / "folder.tar").mkdir()
    assert "cannot be opened: Is a directory" in refusal(tmp_path / "folder.tar")


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
        *((each, f"of type {each!r}") for each in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"V", b"M")),
    ],
)
def test_other_members_are_refused(tmp_path: Path, kind: bytes, word: str) -> None:
    info = tarfile.TarInfo("1.jpg")
    info.type, info.linkname = kind, "/etc/passwd"
    path = hostile.tar_with(tmp_path / "a.tar", [(info, b"")], tarfile.USTAR_FORMAT)
    assert f"member '1.jpg' at offset 0 is {word}; only regular files are read" in refusal(path)


def test_sparse_members_of_pax(tmp_path: Path) -> None:
    info = tarfile.TarInfo("1.jpg")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": str(1 << 40)}
    assert "sparse member" in refusal(hostile.tar_with(tmp_path / "a.tar", [(info, b"")]))


def test_long_pax_headers_take_no_time(tmp_path: Path) -> None:
    """Each record used to copy all that came after it."""
    for count, expected in ((10_000, ""), (11_000, "extended header of 66000 bytes at offset 0; at most 65536")):
        info = tarfile.TarInfo("header")
        info.type = tarfile.XHDTYPE
        path = hostile.tar_with(tmp_path / f"{count}.tar", [(info, b"6 a=b\n" * count)], tarfile.USTAR_FORMAT)
        assert (expected in refusal(path)) if expected else not len(open_tars(path))


@pytest.mark.parametrize("record", [b"9 path=a", b"0 a=b\n", b"99 path=x\n", b"6 ab\n\n", b"x", b" 6 a=b\n", b"7 =a\n"])
def test_damaged_pax_headers(tmp_path: Path, record: bytes) -> None:
    info = tarfile.TarInfo("header")
    info.type = tarfile.XHDTYPE
    path = hostile.tar_with(tmp_path / "a.tar", [(info, record)], tarfile.USTAR_FORMAT)
    assert "damaged PAX header at offset 0" in refusal(path)


def test_a_tar_that_boasts_is_refused_by_its_header(tmp_path: Path) -> None:
    """10 KB each, which say that they unpack to 1 GiB."""
    assert "is a sparse file; only regular files" in refusal(hostile.sparse_tar(tmp_path / "a.tar", 1 << 30))
    assert "needs 1073742336 bytes, the file has 10240" in refusal(hostile.boastful_tar(tmp_path / "b.tar", 1 << 30))
    path = hostile.gzip_bomb_tar(tmp_path / "c.tar", 1 << 30)
    assert path.stat().st_size <= 10_240
    assert r"at offset 0, but b'\x1f\x8b" in refusal(path)


def test_a_pipe_is_no_shard(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    assert refusal(tmp_path / "a.tar") == f"{tmp_path}/a.tar: shard cannot be opened: not a regular file"


def test_names_lead_nowhere(tmp_path: Path, cache: Path) -> None:
    """Members are never written: their names are names of samples and nothing else."""
    names = ["../../../1.jpg", "/etc/2.jpg", "..", "a/../../3.txt", "~/4.jpg", "C:\\5.jpg", "pipe:touch x; 6.jpg"]
    names += ["$(id).jpg"]
    before = sorted(tmp_path.rglob("*"))
    path = write_tar(tmp_path / "a.tar", {name: b"x" for name in names}, tarfile.PAX_FORMAT)
    index = open_tars(path)
    keys = [name.rpartition(".")[0] for name in names if name.endswith((".jpg", ".txt"))]
    assert [index.key(row) for row in range(len(index))] == keys
    assert sorted(tmp_path.rglob("*")) == [*before, path]
    assert all(cache / "index" in file.parents for file in cache.rglob("*") if file.is_file())


def test_a_pickle_in_place_of_the_index_is_not_read(tmp_path: Path, cache: Path) -> None:
    path = write_tar(tmp_path / "a.tar", caption_members(0, 2))
    for stored in (open_tars(path).index.path, *cache.glob("index/*/*.part")):
        stored.write_bytes(hostile.marking_pickle(tmp_path / "was here"))
    assert len(open_tars(path)) == 2
    assert not (tmp_path / "was here").exists()


def test_sizes_in_pax_and_binary_notation(tmp_path: Path) -> None:
    info = tarfile.TarInfo("1.jpg")
    info.pax_headers = {"size": "5"}
    assert open_tars(hostile.tar_with(tmp_path / "a.tar", [(info, b"hello")])).read(0, "image") == b"hello"
    for name, size in (("b.tar", b"\x80" + (5).to_bytes(11, "big")), ("c.tar", b" 0000000005\0")):
        assert open_tars(with_size_field(tmp_path / name, size)).read(0, "image") == b"hello"
    # The first would go back and read for ever; Python reads the last ones as numbers, and tar does not.
    for size in (b"-0000001000\0", b"\xff" * 12, b"+0000000005\0", b"0o000000005\0", b"0_000000005\0"):
        assert "no valid size" in refusal(with_size_field(tmp_path / "c.tar", size))


def with_size_field(path: Path, field: bytes) -> Path:
    data = bytearray(write_tar(path, {"1.jpg": b"hello"}).read_bytes())
    data[124:136] = field
    path.write_bytes(hostile.with_checksum(data))
    return path


# ---- the bytes may come in any blocks


def outcome(data: bytes, block: int) -> tuple[list[Member], str]:
    """The members, and the message that ends them; and all bytes come again."""
    members: list[Member] = []
    again = b""
    try:
        blocks = (data[at : at + block] for at in range(0, len(data), block))
        for member, part in walk_tar(Path("a.tar"), blocks, len(data)):
            if member is not None:
                assert member.begin == len(again)
                members.append(member)
            again += part
    except DataError as error:
        return members, str(error)
    assert again == data
    return members, ""


def check(data: bytes) -> str:
    members, message = outcome(data, len(data) or 1)
    if not message:
        for block in (512, 700, 4096):
            assert outcome(data, block) == (members, message)
    return message


def test_blocks_of_any_size() -> None:
    known = shards.seeds()
    messages = [check(data) for data in (*known, *(shards.case(random.Random(number), known) for number in range(60)))]
    assert 10 < sum(map(bool, messages)) < len(messages) - 10


def test_headers_take_few_calls(tmp_path: Path) -> None:
    """Measured: 2.9 us a member; a call for each byte of a checksum would take 13."""
    data = write_tar(tmp_path / "a.tar", {f"{n:05d}.jpg": b"x" for n in range(5000)}).read_bytes()

    def read() -> None:
        assert len(outcome(data, len(data))[0]) == 5000

    assert count_calls(read) < 8 * 5000
