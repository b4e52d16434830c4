import json
import shutil
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.commands import command
from tests.data.making import caption_members, class_folder, encode, make_files, pixels, write_parquet, write_tar
from tests.tokenize_dataset.making import hashes
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, RawSample, Source, parse_source
from vqclip.data.work_folder import WorkResult
from vqclip.data_tools.pack import pack
from vqclip.errors import ConfigError, DataError

main = command("data")

COUNT = 13
SHARD = 5


class Made:
    """Samples with one to three captions, one of them with a line break; jpeg, png and webp."""

    classnames = templates = ()

    def __len__(self) -> int:
        return COUNT

    def read(self, index: int) -> RawSample:
        captions = tuple(f"caption {index}\nversion {n} é 🙂" for n in range(1 + index % 3))
        return RawSample(encode(pixels(index), ("JPEG", "PNG", "WEBP")[index % 3]), captions)

    def name(self, index: int) -> str:
        return f"made: sample {index}"

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "made", "samples": COUNT}


SETTINGS = {"split": "train", "shard_size": SHARD, "workers": 0, "bad_fraction": 0.01, "max_pixels": 10**6}


def write(source: Any, out: Path, **changes: Any) -> WorkResult:
    return pack(source, out, **SETTINGS | changes)


def assert_same_samples(first: Source, second: Source) -> None:
    assert len(first) == len(second)
    assert all(first.read(index) == second.read(index) for index in range(len(first)))


def test_every_caption_and_every_byte_come_back(tmp_path: Path) -> None:
    done = write(Made(), tmp_path / "out")
    assert (done.made, done.samples, done.manifest.samples) == (3, COUNT, COUNT)
    assert done.note == f"read them with {{kind: shards, path: {tmp_path / 'out'}, captions: json}}"
    packed = CaptionShardsConfig(path=str(tmp_path / "out"), captions="json").build()
    assert_same_samples(Made(), packed)
    assert [packed.key(index) for index in (0, 4, 5, 12)] == ["000000000", "000000004", "000010000", "000020002"]
    first = CaptionShardsConfig(path=str(tmp_path / "out")).build()
    assert first.read(2).captions == Made().read(2).captions[:1]
    assert json.loads((tmp_path / "out" / "00002_stats.json").read_text())["successes"] == 3
    with tarfile.open(tmp_path / "out" / "00000.tar") as tar:
        assert {(each.mtime, each.uname, each.gname, each.uid) for each in tar} == {(0, "", "", 0)}


@pytest.mark.parametrize("labelled", [False, True])
def test_the_bytes_depend_neither_on_workers_nor_on_the_time(tmp_path: Path, labelled: bool) -> None:
    source = ClassShardsConfig(path=str(class_folder(tmp_path / "in", COUNT))).build() if labelled else Made()
    for name, workers in (("one", 0), ("two", 2)):
        write(source, tmp_path / name, workers=workers)
    done = write(source, tmp_path / "two")
    assert (done.made, done.found, done.missing) == (0, 3, 0)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")


def test_labels_and_prompts_come_back(tmp_path: Path) -> None:
    source = ClassShardsConfig(path=str(class_folder(tmp_path / "in", COUNT))).build()
    write(source, tmp_path / "out", split="test")
    packed = ClassShardsConfig(path=str(tmp_path / "out"), split="test").build()
    assert_same_samples(source, packed)
    assert (packed.classnames, packed.templates) == (source.classnames, source.templates)
    assert (tmp_path / "out" / "test" / "nshards.txt").read_text() == "3\n"
    write(source, tmp_path / "out", split="train")
    (tmp_path / "in" / "classnames.txt").write_text("cat\ndog\nfox\n")
    other = ClassShardsConfig(path=str(tmp_path / "in")).build()
    with pytest.raises(ConfigError, match=r"classnames\.txt: belongs to data with other classes"):
        write(other, tmp_path / "out", split="val")


def test_labels_and_own_captions_come_back(tmp_path: Path) -> None:
    class Labelled(Made):
        classnames = ("cat", "dog")

        def read(self, index: int) -> RawSample:
            return super().read(index)._replace(label=index % 2)

    write(Labelled(), tmp_path / "out")
    captioned = CaptionShardsConfig(path=str(tmp_path / "out" / "train"), captions="json").build()
    assert_same_samples(Made(), captioned)
    labels = ClassShardsConfig(path=str(tmp_path / "out")).build()
    assert [labels.read(index).label for index in range(4)] == [0, 1, 0, 1]


def test_an_interrupted_job_continues_with_the_same_bytes(tmp_path: Path) -> None:
    class Dying(Made):
        def read(self, index: int) -> RawSample:
            if index == 12:  # in the last of three shards
                raise KeyboardInterrupt
            return super().read(index)

    write(Made(), tmp_path / "whole")
    with mock.patch("vqclip.data_tools.pack._PROBES", 1), pytest.raises(KeyboardInterrupt):
        write(Dying(), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("0*.tar")] != []
    assert not (tmp_path / "out" / "00002.tar").exists()
    (tmp_path / "out" / ".tmp-00002.tar-killed").write_bytes(b"half")
    done = write(Made(), tmp_path / "out")
    assert (done.made, done.found) == (1, 2)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_what_does_not_fit_is_refused_before_it_is_written(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=9_000)
    message = r"has room for 9 kB, and about [\d.]+ kB are needed; OUT: name a folder"
    with mock.patch("shutil.disk_usage", return_value=free), pytest.raises(DataError, match=message):
        write(Made(), tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*.tar")]


def test_other_settings_and_other_folders_are_refused(tmp_path: Path) -> None:
    write(Made(), tmp_path / "out")
    with pytest.raises(ConfigError, match="shard_size: 5 there, 6 now"):
        write(Made(), tmp_path / "out", shard_size=6)
    write_tar(tmp_path / "foreign" / "0.tar", caption_members(0, 1))
    with pytest.raises(ConfigError, match=r"contains 0\.tar; expected an empty folder or one that `vqclip data pack`"):
        write(Made(), tmp_path / "foreign")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ConfigError, match="OUT: .*file: cannot be made"):
        write(Made(), tmp_path / "file")
    source = Made()
    source.classnames = ("cat", "k" * 1001)  # which could not be read back
    with pytest.raises(DataError, match="of 1001 characters, expected one line of at most 1000"):
        write(source, tmp_path / "new")
    members = caption_members(0, 10) | {f"{number:09d}.jpg": b"no image" for number in range(2)}
    spoilt = parse_source(write_tar(tmp_path / "spoilt.tar", members)).build()
    with pytest.raises(DataError, match=r"2 samples cannot be used; --bad-fraction allows 1 .*\n  .*sample 000000000"):
        write(spoilt, tmp_path / "bad", bad_fraction=0.1)


@pytest.mark.parametrize("labelled", [False, True])
def test_rows_are_packed_without_the_cache(tmp_path: Path, cache: Path, labelled: bool) -> None:
    images = [*(encode(pixels(index)) for index in range(6)), b"no image"]
    texts = {"label": ["cat", "dog", "dog", "cat", "cat", "cat", "cat"]} if labelled else {"caption": list("abcdefg")}
    write_parquet(tmp_path / "a.parquet", {"image": images, **texts}, group=1000)
    with pytest.raises(DataError, match=r"1 samples cannot be used; --bad-fraction allows 0(.|\n)*row 6: "):
        write(parse_source(tmp_path / "a.parquet"), tmp_path / "none", bad_fraction=0.0)
    assert not list((tmp_path / "none").rglob("manifest.json"))
    done = write(parse_source(tmp_path / "a.parquet"), tmp_path / "out", bad_fraction=0.2)
    assert (done.manifest.samples, done.manifest.bad) == (6, {"image format": 1})
    assert not (cache / "packed").exists()
    rows = parse_source(tmp_path / "a.parquet").build()
    packed = parse_source(tmp_path / "out").build()
    assert [packed.read(index) for index in range(6)] == [rows.read(index) for index in range(6)]


def test_shards_are_not_written_into_a_folder_of_images(tmp_path, refused):
    make_files(tmp_path, "cat/0.png", encode(pixels(0), "PNG"))
    message = refused(main(["pack", str(tmp_path), str(tmp_path / "packed")]))
    assert "is inside SOURCE, whose folders are data; expected a folder elsewhere" in message
    assert not (tmp_path / "packed").exists()
