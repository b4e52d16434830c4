import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands import command
from tests.data.hostile import huge_png
from tests.data.making import (
    caption_members,
    caption_shards,
    class_folder,
    encode,
    make_files,
    pixels,
    write_parquet,
    write_tar,
)
from tests.training import run_tree
from vqclip.data import CaptionShardsConfig, ClassShardsConfig
from vqclip.data_tools.check import CheckOptions, check_source, format_report
from vqclip.data_tools.show import Caption, ModelInputs, Tile, render_sheet, training_tiles
from vqclip.towers.vocabulary import BPE

main = command("data")

CONTEXT = 12
KINDS = {
    "image format": "begins with b'<svg",
    "truncated image": "ends early",
    "damaged image": "wrong checksum",
    "image size": "at most 50000000 pixels",
    "missing member": "has no image",
    "no caption": ".txt) is empty",
    "not UTF-8": "not UTF-8",
    "same image file": "same as",
    "cut caption": "tokens; 12 are read",
}
"""Kind → part of its description."""


def plant(folder: Path) -> dict[str, set[str]]:
    """Three tars of 100 samples with a fault of each kind in each; return the samples that a report must name."""
    planted: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for shard in range(3):
        members = caption_members(100 * shard, 100)
        keys = [f"{100 * shard + 3 + 7 * number:09d}" for number in range(len(KINDS))]
        for number, (kind, key) in enumerate(zip(KINDS, keys, strict=True)):
            seed = 1000 * (shard + 1) + number
            png = encode(pixels(seed), "PNG")
            images = {
                "image format": b"<svg/>%d" % seed,
                "truncated image": encode(pixels(seed), ("JPEG", "PNG", "WEBP")[shard])[:-9],
                "damaged image": png[:60] + bytes([png[60] ^ 1]) + png[61:],
                "image size": huge_png(20_000 + shard),
                "same image file": members[f"{100 * shard:09d}.jpg"],
            }
            texts = {"no caption": b" \n", "not UTF-8": "café".encode("latin-1")}
            texts["cut caption"] = b"caption %d of many more words than the text tower reads in one go" % seed
            members[f"{key}.jpg"] = images.get(kind, members[f"{key}.jpg"])
            members[f"{key}.txt"] = texts.get(kind, members[f"{key}.txt"])
            if kind == "missing member":
                del members[f"{key}.jpg"]
            planted[kind].add(f"{folder}/{shard:05d}.tar: sample {key}")
        write_tar(folder / f"{shard:05d}.tar", members)
    return planted


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_all_planted_faults_are_found_and_named(tmp_path, workers, capsys):
    planted, out = plant(tmp_path / "in"), tmp_path / "report.json"
    options = ["--context-length", str(CONTEXT), "--workers", str(workers), "--json", str(out), "--min-side", "8"]
    assert main(["check", str(tmp_path / "in"), *options]) == 1
    report = json.loads(out.read_text())
    found = report["bad"] | report["warnings"]
    assert {kind: {each["sample"] for each in samples} for kind, samples in found.items()} == planted
    for kind, text in KINDS.items():
        assert all(text in each["detail"] for each in found[kind])
    assert report["bad_samples"] == 21
    shown = capsys.readouterr().out
    assert all(name in shown for names in planted.values() for name in names)
    assert "21 of 300 samples are bad; --bad-fraction allows 10 bad samples" in shown
    assert main(["check", str(tmp_path / "in"), *options, "--bad-fraction", "0.07"]) == 0


def check(path: Path, **options: object):
    return check_source(CaptionShardsConfig(path=str(path)).build(), CheckOptions(min_side=8, **options))


def test_duplicates(tmp_path: Path) -> None:
    """Sample 3 has the file of sample 0; sample 4 its pixels in another file; 5 and 6 its caption."""
    members = caption_members(0, 8)
    png = encode(pixels(0), "PNG")
    members["000000000.jpg"] = members["000000003.jpg"] = png
    members["000000004.jpg"] = encode(pixels(0), "PNG", compress_level=1)
    for key in ("000000005.txt", "000000006.txt"):
        members[key] = members["000000000.txt"]
    report = check(write_tar(tmp_path / "0.tar", members))
    names = {kind: [each.sample[-9:] for each in found] for kind, found in report.warnings.items()}
    assert names == {"same image file": ["000000003"], "same pixels": ["000000004"], "repeated caption": ["000000000"]}
    assert report.warnings["repeated caption"][0].detail == "3 images have 'caption 0'"
    assert "captions of several images: 1, on 3 images (37.50 %)" in format_report(report)


def test_unusual_images(tmp_path: Path) -> None:
    members = caption_members(0, 7)
    exif = Image.Exif()
    exif[0x0112] = 6
    members["000000000.jpg"] = encode(pixels(0, channels=1), "PNG")
    members["000000001.jpg"] = encode(pixels(1, channels=4), "PNG")
    members["000000002.jpg"] = encode(pixels(2), "JPEG", exif=exif)
    members["000000003.jpg"] = encode(pixels(3, 8, 40), "PNG")
    members["000000004.jpg"] = encode(pixels(4, 7, 9), "PNG")
    members["000000005.jpg"] = encode(np.full((20, 20), 4095, np.uint16), "PNG")
    members["000000006.jpg"] = encode(np.full((20, 20), 255, np.uint8), "PNG")
    report = check(write_tar(tmp_path / "0.tar", members))
    assert {kind: [each.sample[-9:] for each in found] for kind, found in report.warnings.items()} == {
        "grey image": ["000000000", "000000005", "000000006"],
        "dark 16-bit image": ["000000005"],
        "image of one colour": ["000000005", "000000006"],
        "transparent image": ["000000001"],
        "EXIF orientation": ["000000002"],
        "long image": ["000000003"],
        "small image": ["000000004"],
    }
    assert not report.bad


def test_placeholders_as_captions_notes_and_black_images(tmp_path: Path) -> None:
    members = caption_members(0, 6)
    for number, text in enumerate(("nan", " None\n", "N/A", "nano")):
        members[f"{number:09d}.txt"] = text.encode()
    members["000000004.jpg"] = encode(np.zeros((20, 20, 3), np.uint8), "JPEG")
    source = CaptionShardsConfig(path=str(write_tar(tmp_path / "0.tar", members))).build()
    with mock.patch.object(source, "notes", ("left out: 12 files of other endings (.psd 12)",)):
        report = check_source(source, CheckOptions(min_side=8))
    assert [each.detail[:6] for each in report.warnings["placeholder as caption"]] == ["'nan' ", "'None'", "'N/A' "]
    assert [each.sample[-9:] for each in report.warnings["black image"]] == ["000000004"]
    shown = format_report(report)
    assert "left out: 12 files of other endings (.psd 12)" in shown.partition("warnings")[2]
    assert report.to_json()["notes"] == ("left out: 12 files of other endings (.psd 12)",)


def test_labels_and_classes(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "in", 6)
    members = {f"s{n}.jpg": encode(pixels(n)) for n in range(4)} | {"s0.cls": b"0", "s1.cls": b"3", "s2.cls": b"cat"}
    write_tar(folder / "train" / "0.tar", members)
    report = check_source(ClassShardsConfig(path=str(folder)).build(), CheckOptions(min_side=8))
    assert {kind: len(found) for kind, found in report.bad.items()} == {"class number": 2, "missing member": 1}
    assert [each.sample for each in report.warnings["class without images"]] == ["dog", "red panda"]
    assert report.classes == {"cat": 1, "dog": 0, "red panda": 0}
    assert "repeated caption" not in report.warnings


def test_overlap_with_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = caption_members(0, 6), caption_members(10, 6)
    there["000000012.jpg"] = here["000000001.jpg"]
    there["000000013.jpg"], here["000000002.jpg"] = encode(pixels(50), "PNG"), encode(pixels(50), "WEBP", lossless=True)
    for name, members in (("here", here), ("there", there)):
        write_tar(tmp_path / name / "0.tar", members)
    assert main(["check", str(tmp_path / "here"), "--against", str(tmp_path / "there"), "--min-side", "8"]) == 0
    shown = capsys.readouterr().out
    assert f"sample 000000001: same file as {tmp_path}/there/0.tar: sample 000000012" in shown
    assert f"sample 000000002: same pixels as {tmp_path}/there/0.tar: sample 000000013" in shown


@pytest.mark.parametrize(("kind", "message"), [("tar", "truncated: member"), ("parquet", "cannot be read as Parquet")])
def test_damaged_shards_do_not_hide_the_others(tmp_path: Path, capsys, kind: str, message: str) -> None:
    rows = {"image": [encode(pixels(number)) for number in range(4)], "caption": list("abcd")}
    for name in "xyz":
        path = tmp_path / f"{name}.{kind}"
        if kind == "tar":
            write_tar(path, caption_members(0, 4))
        else:
            write_parquet(path, rows)
    for name in "xy":
        path.with_stem(name).write_bytes(path.read_bytes()[:1000])
    assert main(["check", str(tmp_path), "--min-side", "8"]) == 1
    shown = capsys.readouterr().out
    assert f"{tmp_path}/x.{kind}: {message}" in shown
    assert "4 samples" in shown
    assert "2 damaged shards" in shown


def test_mistakes_of_a_user(tmp_path, capsys, refused):
    assert main(["check", str(tmp_path / "none")]) != 0
    assert f"{tmp_path}/none" in capsys.readouterr().err
    shard = str(write_tar(tmp_path / "0.tar", caption_members(0, 2)))
    assert main(["check", shard, "--json", str(tmp_path)]) == 2
    assert main(["check", shard, "--config", "configs/base.yaml", "--context-length", "9"]) == 2
    assert "caption" in refused(main(["check", shard, "caption=txt"]))


@pytest.mark.parametrize("epoch", [0, 2])
def test_images_and_captions_equal_those_of_the_training_loader(tmp_path: Path, epoch: int) -> None:
    tree = run_tree(tmp_path, caption_shards(tmp_path / "shards", (10, 13)), run__seed=5, train__batch_size=8)
    tree["data"]["transform"] = {"scale": [0.5, 0.9], "flip": 0.5, "rotation": 20, "brightness": 0.3}
    inputs = ModelInputs.load(make_files(tmp_path, "config.json", json.dumps(tree).encode()) / "config.json")
    data = inputs.config.data.build(inputs.size, inputs.vocabulary.with_lengths, 8, inputs.config.run.seed)
    batches = [*data.batches(0, 3 * len(data) // 8 + 1)]
    images = torch.cat([batch.images for batch in batches])[epoch * len(data) :][:12]
    captions = [caption for batch in batches for caption in batch.captions][epoch * len(data) :][:12]
    tiles = training_tiles(data, inputs.vocabulary, 12, epoch, 2)
    assert all(torch.equal(tile.images[0], image) for tile, image in zip(tiles, images, strict=True))
    assert [[*tile.captions[0].pieces] for tile in tiles] == [inputs.vocabulary.pieces(each)[0] for each in captions]
    assert not torch.equal(tiles[0].images[0], tiles[0].images[1])


def test_a_source_without_a_configuration(tmp_path, capsys, refused):
    members = caption_members(0, 6)
    members["000000002.jpg"] = b"no image"
    shard, sheet = str(write_tar(tmp_path / "0.tar", members)), str(tmp_path / "sheet.html")
    assert main(["show", shard, "captions=json", "--out", sheet, "json_keys=[many]", "--image-size", "32"]) == 0
    assert "24 samples" in capsys.readouterr().out
    assert "in place of 0.tar: sample 000000002: image format" in Path(sheet).read_text()
    assert main(["show", shard, "--out", str(tmp_path / "no" / "sheet.html")]) == 2
    message = refused(main(["show", shard, "--out", str(tmp_path / "sheet.jpg")]))
    assert "expected a file whose name ends in .html" in message
    assert "neither SOURCE nor --config" in refused(main(["show", "--out", sheet]))
    assert main(["show", "--config", "configs/base.yaml", "--out", sheet, "--image-size", "9"]) == 2


def test_pieces_are_the_tokens_and_the_cut_is_where_the_text_tower_stops() -> None:
    vocabulary, caption = BPE(5), "A café, 東京 and unbelievablyish"
    pieces, read = vocabulary.pieces(caption)
    tokens, lengths = vocabulary.with_lengths([caption])
    assert (len(pieces) + 2, read) == (lengths[0], 3)
    assert "".join(pieces) == "a café , 東京 and unbelievablyish "
    rest = vocabulary.with_lengths(["".join(pieces[:read])])[0]
    assert torch.equal(rest, tokens)


def test_texts_are_escaped_and_a_cut_is_marked() -> None:
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    cut, endless = Caption(("<script> ", "two ", "\u202ethree"), 1), Caption(("word ",) * 5000, 9)
    page = render_sheet([Tile((image,), "<b>", (cut, endless))], "head & co")
    assert "<b>&lt;script&gt; </b> <s>two </s> <s>\\u202ethree</s>" in page
    assert "head &amp; co" in page
    assert '<p class="faint">&lt;b&gt;</p>' in page
    assert page.count("word") == 300
    assert not re.search(r"<script|https?://", page)
