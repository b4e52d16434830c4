from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands import command
from tests.data.making import caption_members, caption_shards, write_tar
from tests.training import run_tree
from vqclip.data_tools.show import Caption, ModelInputs, Tile, render_sheet, training_tiles
from vqclip.towers.vocabulary import BPE

main = command("data")

AUGMENTED = {"scale": [0.5, 0.9], "flip": 0.5, "rotation": 20, "brightness": 0.3}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tree = run_tree(tmp_path / "runs", caption_shards(tmp_path / "shards", (10, 13)))
    tree["data"]["transform"] = AUGMENTED
    tree["run"]["seed"] = 5
    tree["train"]["batch_size"] = 8
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tree))
    return path


@pytest.mark.parametrize("epoch", [0, 2])
def test_images_and_captions_equal_those_of_the_training_loader(config: Path, epoch: int) -> None:
    inputs = ModelInputs.load(config)
    data = inputs.config.data.build(inputs.size, inputs.vocabulary.with_lengths, 8, inputs.config.run.seed)
    batches = [*data.batches(0, 3 * len(data) // 8 + 1)]
    images = torch.cat([batch.images for batch in batches])[epoch * len(data) :][:12]
    captions = [caption for batch in batches for caption in batch.captions][epoch * len(data) :][:12]
    tiles = training_tiles(data, inputs.vocabulary, 12, epoch, 2)
    assert all(torch.equal(tile.images[0], image) for tile, image in zip(tiles, images, strict=True))
    assert [[*tile.captions[0].pieces] for tile in tiles] == [inputs.vocabulary.pieces(each)[0] for each in captions]
    assert not torch.equal(tiles[0].images[0], tiles[0].images[1])


def images_of(sheet: Path) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', sheet.read_text())
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(each)))) for each in found]


def test_the_command_shows_what_the_loader_gives(config: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.html"
    options = ["--count", "5", "--views", "3", "data.transform.flip=0"]
    assert main(["show", "--config", str(config), "--out", str(sheet), *options]) == 0
    inputs = ModelInputs.load(config, ["data.transform.flip=0"])
    data = inputs.config.data.build(inputs.size, inputs.vocabulary.with_lengths, 8, 5)
    batch, images = next(data.batches()), images_of(sheet)
    assert len(images) == 15
    for number in range(5):
        assert np.array_equal(images[3 * number], batch.images[number].permute(1, 2, 0).numpy())


def test_a_source_without_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = caption_members(0, 6)
    members["000000002.jpg"] = b"no image"
    shard, sheet = str(write_tar(tmp_path / "0.tar", members)), str(tmp_path / "sheet.html")
    assert main(["show", shard, "captions=json", "--out", sheet, "json_keys=[many]", "--image-size", "32"]) == 0
    assert "24 samples" in capsys.readouterr().out
    assert "in place of 0.tar: sample 000000002: image format" in Path(sheet).read_text()
    assert main(["show", shard, "--out", str(tmp_path / "no" / "sheet.html")]) == 2
    assert main(["show", shard, "--out", str(tmp_path / "sheet.jpg")]) == 2
    assert "expected a file whose name ends in .html" in capsys.readouterr().err
    assert main(["show", "--out", sheet]) == 2
    assert "neither SOURCE nor --config" in capsys.readouterr().err
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
