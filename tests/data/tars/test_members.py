"""Members of tars as people have them: names with dots, own endings, two of a kind, shards that are damaged."""

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.data.making import caption_members, caption_shards, encode, open_tars, pixels, write_tar
from tests.data.serving import FaultyServer, status
from vqclip.data import CaptionShardsConfig
from vqclip.data.tars import make
from vqclip.data.tars.members import MemberRules
from vqclip.errors import DataError

JPEG = encode(pixels(0))


def keys(path: Path, **options) -> list[str]:
    reader = open_tars(path, **options)
    return [reader.key(index) for index in range(len(reader))]


@pytest.mark.parametrize("names", [["22.05", "22.06", "22"], ["photo", "photo.v1", "photo.v1.b"], ["a.b/0", "a.c/0"]])
def test_names_with_dots(tmp_path: Path, names: list[str]) -> None:
    members = {f"{name}{ending}": JPEG for name in names for ending in (".jpg", ".txt")}
    assert keys(write_tar(tmp_path / "a.tar", members)) == names
    assert sorted(keys(write_tar(tmp_path / "b.tar", dict(sorted(members.items()))))) == sorted(names)


@pytest.mark.parametrize("in_chunks", [False, True])
def test_members_that_extend_a_sample_are_no_samples(tmp_path, monkeypatch, in_chunks):
    monkeypatch.setattr(make, "MOST_WITH_MEMBERS", 0 if in_chunks else 1 << 40)
    members: dict[str, bytes] = {}
    for key in ("0", "1.5", "2"):
        members |= {f"{key}.depth.png": b"d", f"{key}.png": key.encode(), f"{key}.a.b.png": b"x"}
        members |= {f"{key}.txt": key.encode(), f"{key}.mask": b"m", f"{key}.meta.json": b"{}"}
    source = CaptionShardsConfig(path=str(write_tar(tmp_path / "a.tar", members))).build()
    assert [source.key(index) for index in range(len(source))] == ["0", "1.5", "2"]
    assert [source.read(index)[:3] for index in range(3)] == [(k.encode(), (k,), -1) for k in ("0", "1.5", "2")]
    assert source.notes == ("left out: 6 members named like images (.a.b.png 3, .depth.png 3)",)


def test_members_of_a_sample_may_be_apart(tmp_path: Path) -> None:
    """As `tar` writes an unsorted folder, and `tar -r` a new caption, which replaces the former one."""
    path = write_tar(tmp_path / "a.tar", {"0.depth.png": b"d", "1.jpg": JPEG, "0.png": JPEG, "1.txt": b"1"})
    write_tar(tmp_path / "more.tar", {"0.txt": b"0", "1.txt": b"new"})
    with tarfile.open(path, "a") as tar, tarfile.open(tmp_path / "more.tar") as more:
        for member in more:
            tar.addfile(member, more.extractfile(member))
    source = CaptionShardsConfig(path=str(path)).build()
    assert [source.key(index) for index in range(2)] == ["1", "0"]
    assert [source.read(index).captions for index in range(2)] == [("new",), ("0",)]


@pytest.mark.parametrize(
    ("image", "caption"),
    [("image.jpg", "cap"), ("jpg", "caption.txt"), ("input.png", "output.txt"), ("photo", "words"), ("JPG", "TXT")],
)
def test_endings_of_ones_own(tmp_path: Path, image: str, caption: str) -> None:
    members = {f"{n}.{ending}": JPEG if ending == image else b"c" for n in range(2) for ending in (image, caption)}
    path = str(write_tar(tmp_path / "a.tar", members))
    config = CaptionShardsConfig(path=path, image_member=f".{image}", caption_member=caption)
    assert [config.build().read(n).captions for n in range(2)] == [("c",)] * 2
    if image != "JPG":
        with pytest.raises(DataError, match=r"members end in .* Set image_member and caption_member") as error:
            CaptionShardsConfig(path=path).build()
        assert f".{image} (2)" in str(error.value)
        assert f".{caption} (2)" in str(error.value)


@pytest.mark.parametrize("ending", ["text", "caption", "cap"])
def test_other_usual_endings_of_captions(tmp_path: Path, ending: str) -> None:
    path = write_tar(tmp_path / "a.tar", {"0.jpg": JPEG, f"0.{ending}": b"c", "1.jpg": JPEG, "1.txt": b"d"})
    source = CaptionShardsConfig(path=str(path)).build()
    assert [source.read(index).captions for index in range(2)] == [("c",), ("d",)]


def test_two_images_in_a_sample(tmp_path: Path) -> None:
    members = caption_members(0, 2) | {"000000001.png": b"mask", "000000001.txt": b"c"}
    path = str(write_tar(tmp_path / "a.tar", members))
    source = CaptionShardsConfig(path=path).build()
    assert source.read(0).captions == ("caption 0",)
    (note,) = source.notes
    assert "two members for one purpose (.jpg and .png 1), bad unless image_member or caption_member chooses" in note
    with pytest.raises(DataError, match=r"a.tar: sample 000000001: has two members for its image"):
        source.read(1)
    chosen = CaptionShardsConfig(path=path, image_member=["png", "jpg"]).build()
    assert chosen.read(1).image == b"mask"
    assert chosen.read(0).image == members["000000000.jpg"]
    assert chosen.fingerprint != source.fingerprint
    both = {f"0.{ending}": b"x" for ending in ("jpg", "png", "txt")}
    with pytest.raises(DataError, match=r"two members for one purpose \(\.jpg and \.png 1\).*image_member"):
        CaptionShardsConfig(path=str(write_tar(tmp_path / "b.tar", both))).build()


def test_texts_with_a_byte_order_mark_and_captions_that_are_null(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    members = {"0.jpg": JPEG, "0.txt": mark + b"a cat", "0.json": mark + json.dumps({"caption": [None, "b"]}).encode()}
    path = str(write_tar(tmp_path / "a.tar", members))
    assert CaptionShardsConfig(path=path).build().read(0).captions == ("a cat",)
    assert CaptionShardsConfig(path=path, captions="json").build().read(0).captions == ("b",)


# ---- shards that are missing or damaged


def test_damaged_shards_are_left_out_by_a_setting(tmp_path: Path) -> None:
    folder = caption_shards(tmp_path, (2, 3, 2, 4))
    os.truncate(folder / "00002.tar", 3000)
    path = f"{folder}/{{00000..00004}}.tar"
    with pytest.raises(DataError, match=r"1 of 5 files are missing: .*00004.tar.*\*\.tar.*bad_shards: leave_out"):
        CaptionShardsConfig(path=path).build()
    with pytest.raises(DataError, match=r"00002.tar: truncated.*bad_shards: leave_out"):
        CaptionShardsConfig(path=str(folder)).build()
    source = CaptionShardsConfig(path=path, bad_shards="leave_out").build()
    assert [source.read(index).captions[0] for index in (0, 4, 5, 8)] == [f"caption {n}" for n in (0, 4, 7, 10)]
    assert len(source) == 9
    (note,) = source.notes
    assert note.startswith("left out: 2 missing or damaged shards (00002.tar: ")
    assert "bad_shards" not in note
    with pytest.raises(DataError, match=r"00002.tar: truncated.*bad_shards: leave_out"):  # by the parts that are there
        CaptionShardsConfig(path=f"{folder}/*.tar").build()
    caption_shards(tmp_path, (2, 3, 2))
    assert len(CaptionShardsConfig(path=path, bad_shards="leave_out").build()) == 11


def test_shards_that_are_missing_at_a_url(tmp_path: Path, server: FaultyServer, pauses: list[float]) -> None:
    url = server.add(caption_shards(tmp_path, (2, 2, 2)))
    del server.files["/00001.tar"]
    source = CaptionShardsConfig(path=f"{url}/{{00000..00002}}.tar", bad_shards="leave_out").build()
    assert [source.read(index).captions[0][-1] for index in range(4)] == ["0", "1", "4", "5"]
    assert "1 missing or damaged shard" in source.notes[0]
    server.for_ever["/00002.tar"] = status(503)  # which is no reason to leave a shard out
    with pytest.raises(DataError, match="HTTP 503"):
        CaptionShardsConfig(path=f"{url}/{{00001..00002}}.tar", bad_shards="leave_out").build()


def test_rules_are_part_of_the_index(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"0.jpg": b"j", "0.image.png": b"p", "0.txt": b"t"})
    one, other = open_tars(path), open_tars(path, rules=MemberRules(("image.png",)))
    assert one.index.path != other.index.path
    assert (one.read(0, "image"), other.read(0, "image")) == (b"j", b"p")
    assert np.array_equal(one.index.digests, open_tars(path).index.digests)
