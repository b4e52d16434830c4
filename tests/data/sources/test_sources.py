import json
import os
import shutil
from pathlib import Path

import pytest

from tests.data.making import caption_members, caption_shards, class_folder, write_tar
from vqclip.data import CaptionShardsConfig, ClassShardsConfig
from vqclip.data.sources.paths import find_shards
from vqclip.errors import DataError


def refusal(action, *args) -> str:
    with pytest.raises(DataError) as error:
        action(*args)
    return str(error.value)


def test_captions_from_json_and_lines(tmp_path: Path) -> None:
    folder = caption_shards(tmp_path / "a", (1,))
    config = CaptionShardsConfig(path=str(folder), captions="json", json_keys=("caption", "none", "many"))
    assert config.build().read(0).captions == ("json 0", "a0", "b0")
    path = write_tar(tmp_path / "b.tar", {"1.jpg": b"", "1.txt": "one\n\n two \r\nthrée".encode()})
    assert CaptionShardsConfig(path=str(path), captions="txt_lines").build().read(0).captions == ("one", "two", "thrée")
    lines = {"0.jpg": b"", "0.txt": b"x\n\ny\n", "1.jpg": b"", "1.txt": b"x\n\ny\n"}
    path = write_tar(tmp_path / "c.tar", lines)
    note = "the first 2 .txt have several lines, read as one caption; captions: txt_lines divides them"
    assert CaptionShardsConfig(path=str(path)).build().notes == (note,)
    assert CaptionShardsConfig(path=str(path), captions="txt_lines").build().notes == ()


def test_splits_beside_each_other_are_noted(tmp_path: Path) -> None:
    for number, name in enumerate(("cc3m-train-0000", "cc3m-train-0001", "cc3m-validation-0000", "more")):
        write_tar(tmp_path / f"{name}.tar", caption_members(number, 1))
    note = f"files of splits train (2), validation (1) are read together; the path {tmp_path}/*train*.tar reads one"
    assert CaptionShardsConfig(path=str(tmp_path)).build().notes == (note,)
    assert CaptionShardsConfig(path=f"{tmp_path}/*train*.tar").build().notes == ()
    (tmp_path / "._cc3m-train-0000.tar").write_bytes(b"of macOS")
    assert len(CaptionShardsConfig(path=str(tmp_path)).build()) == 4


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
    path = write_tar(tmp_path / "h.tar", {"0.heic": b"x", "0.txt": b"c"})
    message = refusal(CaptionShardsConfig(path=str(path)).build)
    assert "1 member named like images (.heic 1): convert them to JPEG, PNG" in message
    path = write_tar(tmp_path / "e.tar", {"d/0.tar": b"x"})
    assert "end in .tar (1). It contains tars: unpack it" in refusal(CaptionShardsConfig(path=str(path)).build)
    path = write_tar(tmp_path / "d.tar", {"txt/0.txt": b"x", "imgs/0.jpg": b""})
    assert "an image 'imgs/0' and a txt 'txt/0': give" in refusal(CaptionShardsConfig(path=str(path)).build)
    for name, ending in (("images", "jpg"), ("texts", "txt")):
        write_tar(tmp_path / "apart" / f"{name}.tar", {f"0.{ending}": b"x"})
    assert "and a txt '0': put them into one" in refusal(CaptionShardsConfig(path=str(tmp_path / "apart")).build)


def test_a_shard_that_is_replaced_while_it_is_open_stays_readable_as_it_was(tmp_path: Path) -> None:
    folder = caption_shards(tmp_path, (2, 2))
    source = CaptionShardsConfig(path=str(folder)).build()
    second = source.read(2)
    write_tar(folder / "new", caption_members(9, 3)).replace(folder / "00001.tar")
    assert source.read(2) == second


def test_class_names_and_prompts_are_bounded(tmp_path: Path) -> None:
    folder = class_folder(tmp_path)
    (folder / "classnames.txt").write_text("cat\n" + "d" * 1001 + "\n")
    build = ClassShardsConfig(path=folder).build
    assert refusal(build).endswith("classnames.txt:2: 1001 characters; expected one class name a line")
    (folder / "classnames.txt").write_bytes(b"cat\n\xff\n")
    assert refusal(build).endswith("classnames.txt: not UTF-8: invalid start byte at byte 4")
    (folder / "classnames.txt").unlink()
    os.mkfifo(folder / "classnames.txt")
    assert "classnames.txt: cannot be read (not a regular file)" in refusal(build)


def test_fingerprint_tells_content_not_place(tmp_path: Path) -> None:
    folder = caption_shards(tmp_path / "a", (2, 2))
    shutil.copytree(folder, tmp_path / "b")
    first = CaptionShardsConfig(path=str(folder)).build().fingerprint
    assert first == CaptionShardsConfig(path=str(tmp_path / "b")).build().fingerprint
    assert json.loads(json.dumps(first)) == first
    swapped = (str(folder / "00001.tar"), str(folder / "00000.tar"))
    assert CaptionShardsConfig(path=swapped).build().fingerprint != first
    assert CaptionShardsConfig(path=str(folder), captions="txt_lines").build().fingerprint != first


def test_tars_beside_the_class_names(tmp_path: Path) -> None:
    folder = class_folder(tmp_path)
    shutil.move(folder / "train" / "0.tar", folder / "0.tar")
    assert len(ClassShardsConfig(path=folder, split="").build()) == 6
    (folder / "a" / "b").mkdir(parents=True)
    shutil.move(folder / "0.tar", folder / "a" / "b" / "0.tar")
    assert len(ClassShardsConfig(path=folder, split="a/b").build()) == 6


def test_wrong_class_folders(tmp_path: Path) -> None:
    message = refusal(ClassShardsConfig(path=tmp_path / "none").build)
    assert "no such folder; expected one with classnames.txt and SPLIT/*.tar" in message
    folder = class_folder(tmp_path / "a")
    message = refusal(ClassShardsConfig(path=folder, split="test").build)
    assert "has no split 'test'; splits with tars: 'train'" in message
    (folder / "zeroshot_classification_templates.txt").write_text("a photo\n")
    assert "templates.txt:1: no {c} for the class name in 'a photo'" in refusal(ClassShardsConfig(path=folder).build)
    (folder / "zeroshot_classification_templates.txt").write_bytes(b"\xef\xbb\xbfa {c}\n\n")
    (folder / "classnames.txt").write_bytes(b"\xef\xbb\xbfcat\n\ndog\n\n")  # clip_benchmark's CLEVR has such a class
    source = ClassShardsConfig(path=folder).build()
    assert (source.classnames, source.templates) == (("cat", "", "dog"), ("a {c}",))
    assert source.notes == ("classnames.txt: no name for class 1",)
    (folder / "classnames.txt").unlink()
    assert "classnames.txt: cannot be read" in refusal(ClassShardsConfig(path=folder).build)


# ---- what paths stand for


def test_what_paths_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = caption_shards(tmp_path / "data", (1, 1, 1))
    shards = [folder / f"{number:05d}.tar" for number in range(3)]
    (folder / "00000_stats.json").touch()
    assert find_shards([folder]) == shards
    assert find_shards([f"{folder}/{{00000..00002}}.tar"]) == shards
    assert find_shards([f"{folder}/*.tar"]) == shards
    assert find_shards([shards[2], shards[0]]) == [shards[2], shards[0]]
    monkeypatch.chdir(tmp_path)
    assert find_shards(["data/00001.tar"]) == shards[1:2]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_shards(["~/data"]) == shards


def test_paths_that_stand_for_nothing(tmp_path: Path) -> None:
    folder = caption_shards(tmp_path / "data" / "train", (1, 1))
    (tmp_path / "empty").mkdir()
    for path, message in {
        tmp_path / "none": "no such file or folder; expected a file, a folder of *.tar",
        tmp_path / "empty": "no *.tar, *.tar.gz, *.tgz in this folder (it is empty)",
        folder.parent: "found some in train: did you mean",
        f"{folder}/{{00000..00003}}.tar": f"2 of 4 files are missing: {folder}/00002.tar, {folder}/00003.tar",
        f"{folder}/{{10..13}}.tar": f"4 of 4 files are missing: {folder}/10.tar",
        f"{folder}/*.tgz": "matches no file",
    }.items():
        message_got = refusal(find_shards, [path])
        assert message in message_got
        assert str(path) in message_got
    assert "listed twice" in refusal(find_shards, [folder, folder / "00000.tar"])
    write_tar(folder / "a\nstep 1: forged.tar", {})
    shown = f"'{folder}/a\\nstep 1: forged.tar'"
    assert refusal(find_shards, [folder]) == f"{shown}: a line break in the name of a shard; rename it"
