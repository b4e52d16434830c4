from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.data.making import caption_members, caption_shards, class_folder, encode, pixels, write_tar
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, ScenesSourceConfig, SourceConfig
from vqclip.errors import DataError


def refusal(action, *args) -> str:
    with pytest.raises(DataError) as error:
        action(*args)
    return str(error.value)


def test_captions_from_json_and_lines(tmp_path: Path) -> None:
    folder = caption_shards(tmp_path / "a", (1,))
    keys = ("caption", "none", "many")
    assert CaptionShardsConfig(path=str(folder), captions="json", json_keys=keys).build().read(0).captions == (
        "json 0",
        "a0",
        "b0",
    )
    path = write_tar(tmp_path / "b.tar", {"1.jpg": b"", "1.txt": "one\n\n two \r\nthrée".encode()})
    assert CaptionShardsConfig(path=str(path), captions="txt_lines").build().read(0).captions == ("one", "two", "thrée")


def test_wrong_layout_is_told_at_once(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.jpg": b"", "1.json": b"{}"})
    message = refusal(CaptionShardsConfig(path=str(path)).build)
    assert "none of the 1 samples has an image (.jpg, .png, .webp, ...) and a caption (.txt)" in message
    assert "the members end in .jpg (1), .json (1). Captions in the .json?" in message
    folder = class_folder(tmp_path / "c")
    message = refusal(CaptionShardsConfig(path=str(folder / "train")).build)
    assert "is it a source of kind: classes?" in message
    path = write_tar(tmp_path / "b.tar", {"1.txt": b""})
    assert "the members end in .txt (1)" in refusal(CaptionShardsConfig(path=str(path)).build)
    path = write_tar(tmp_path / "e.tar", {"d/0.tar": b"x"})
    assert "end in .tar (1). It contains tars: unpack it" in refusal(CaptionShardsConfig(path=str(path)).build)
    path = write_tar(tmp_path / "d.tar", {"txt/0.txt": b"x", "imgs/0.jpg": b""})
    assert "an image 'imgs/0' and a txt 'txt/0': pack" in refusal(CaptionShardsConfig(path=str(path)).build)


def test_a_shard_that_is_written_to_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    """In place, as rsync --inplace does; one that is replaced by another file stays readable as it was."""
    folder = caption_shards(tmp_path, (2, 2))
    source = CaptionShardsConfig(path=str(folder)).build()
    first, second = source.read(0), source.read(2)
    with (folder / "00000.tar").open("r+b") as file:
        file.seek(600)
        file.write(b"x")
    os.utime(folder / "00000.tar", ns=(1, 1))
    assert "00000.tar: sample 000000000: the shard has changed since it was indexed" in refusal(source.read, 0)
    assert first.captions == ("caption 0",)
    write_tar(folder / "new", caption_members(9, 3)).replace(folder / "00001.tar")
    assert source.read(2) == second
    os.truncate(folder / "00000.tar", 700)
    assert "sample 000000000: the shard has changed" in refusal(source.read, 0)


def test_class_names_and_prompts_are_bounded(tmp_path: Path) -> None:
    folder = class_folder(tmp_path)
    (folder / "classnames.txt").write_text("cat\n" + "d" * 1001 + "\n")
    assert refusal(ClassShardsConfig(path=folder).build).endswith(
        "classnames.txt:2: 1001 characters; expected one class name a line"
    )
    (folder / "classnames.txt").write_bytes(b"cat\n\xff\n")
    assert refusal(ClassShardsConfig(path=folder).build).endswith(
        "classnames.txt: not UTF-8: invalid start byte at byte 4"
    )
    (folder / "classnames.txt").unlink()
    os.mkfifo(folder / "classnames.txt")
    assert "classnames.txt: cannot be read (not a regular file)" in refusal(ClassShardsConfig(path=folder).build)


def test_fingerprint_tells_content_not_place(tmp_path: Path) -> None:
    folder = caption_shards(tmp_path / "a", (2, 2))
    shutil.copytree(folder, tmp_path / "b")
    first = CaptionShardsConfig(path=str(folder)).build().fingerprint
    assert first == CaptionShardsConfig(path=str(tmp_path / "b")).build().fingerprint
    assert json.loads(json.dumps(first)) == first
    swapped = (str(folder / "00001.tar"), str(folder / "00000.tar"))
    assert CaptionShardsConfig(path=swapped).build().fingerprint != first
    assert CaptionShardsConfig(path=str(folder), captions="txt_lines").build().fingerprint != first


def test_classes(tmp_path: Path) -> None:
    source = ClassShardsConfig(path=class_folder(tmp_path)).build()
    assert source.classnames == ("cat", "dog", "red panda")
    assert source.templates == ("a photo of a {c}", "the {c}")
    sample = source.read(5)
    assert (sample.label, sample.captions) == (2, ("a photo of a red panda", "the red panda"))
    assert sample.image == encode(pixels(5))


def test_tars_beside_the_class_names(tmp_path: Path) -> None:
    folder = class_folder(tmp_path)
    shutil.move(folder / "train" / "0.tar", folder / "0.tar")
    assert len(ClassShardsConfig(path=folder, split="").build()) == 6


def test_wrong_class_folders(tmp_path: Path) -> None:
    assert "no such folder; expected one with classnames.txt and SPLIT/*.tar" in refusal(
        ClassShardsConfig(path=tmp_path / "none").build
    )
    folder = class_folder(tmp_path / "a")
    assert "has no split 'test'; splits with tars: train" in refusal(ClassShardsConfig(path=folder, split="test").build)
    (folder / "zeroshot_classification_templates.txt").write_text("a photo\n")
    assert "templates.txt:1: no {c} for the class name in 'a photo'" in refusal(ClassShardsConfig(path=folder).build)
    (folder / "zeroshot_classification_templates.txt").write_bytes(b"\xef\xbb\xbfa {c}\n\n")
    (folder / "classnames.txt").write_bytes(b"\xef\xbb\xbfcat\n\ndog\n\n")  # clip_benchmark's CLEVR has such a class
    source = ClassShardsConfig(path=folder).build()
    assert (source.classnames, source.templates) == (("cat", "", "dog"), ("a {c}",))
    assert source.notes == ("classnames.txt: no name for class 1",)
    (folder / "classnames.txt").unlink()
    assert "classnames.txt: cannot be read" in refusal(ClassShardsConfig(path=folder).build)


def test_scenes(tmp_path: Path) -> None:
    drawing = {"train": 4, "val": 2, "test": 99, "heldout": 22, "image_size": 32}
    config = TypeAdapter(SourceConfig).validate_python({"kind": "scenes", "drawing": drawing})
    assert isinstance(config, ScenesSourceConfig)
    source = config.build()
    assert len(source) == 4
    assert source.read(0).captions[0]
    test = config.model_copy(update={"split": "test"}).build()
    assert test.read(0).label >= 0
    assert test.classnames


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "shards"},
        {"kind": "shards", "path": ""},
        {"kind": "shards", "path": "x", "weight": 0},
        {"kind": "shards", "path": "x", "captions": "json", "json_keys": []},
        {"kind": "shard", "path": "x"},
        {"path": "x"},
    ],
)
def test_wrong_configuration(section: dict) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(SourceConfig).validate_python(section)
