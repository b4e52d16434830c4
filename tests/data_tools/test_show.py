from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.making import caption_members, caption_shards, encode, pixels, write_tar
from tests.training import run_tree
from vqclip.cli.data import main
from vqclip.data_tools.fonts import Fonts
from vqclip.data_tools.model_inputs import ModelInputs
from vqclip.data_tools.sheet import GAP, HEAD, Caption, Tile, draw_sheet, scale_of
from vqclip.data_tools.show import training_tiles
from vqclip.errors import ConfigError
from vqclip.towers.bpe import BPE

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
    data = inputs.config.data.build(inputs.image_size, inputs.vocabulary.with_lengths, 8, inputs.config.run.seed)
    batches = [*data.batches(0, 3 * len(data) // 8 + 1)]
    images = torch.cat([batch.images for batch in batches])[epoch * len(data) :][:12]
    captions = [caption for batch in batches for caption in batch.captions][epoch * len(data) :][:12]
    tiles = training_tiles(data, inputs.vocabulary, 12, epoch, 2)
    assert all(torch.equal(tile.images[0], image) for tile, image in zip(tiles, images, strict=True))
    assert [[*tile.captions[0].pieces] for tile in tiles] == [inputs.vocabulary.pieces(each)[0] for each in captions]
    assert not torch.equal(tiles[0].images[0], tiles[0].images[1])


def first_image(sheet: Path, side: int) -> np.ndarray:
    scaled = side * scale_of(side)
    pixels = np.asarray(Image.open(sheet))[HEAD : HEAD + scaled, GAP : GAP + scaled]
    return pixels[:: scale_of(side), :: scale_of(side)]


def test_the_command_draws_what_the_loader_gives(config: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    assert main(["show", "--config", str(config), "--out", str(sheet), "--count", "5", "data.transform.flip=0"]) == 0
    inputs = ModelInputs.load(config, ["data.transform.flip=0"])
    data = inputs.config.data.build(inputs.image_size, inputs.vocabulary.with_lengths, 8, 5)
    expected = next(data.batches()).images[0].permute(1, 2, 0).numpy()
    assert np.array_equal(first_image(sheet, inputs.image_size), expected)


def test_a_source_without_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = caption_members(0, 6)
    members["000000002.jpg"] = b"no image"
    shard, sheet = str(write_tar(tmp_path / "0.tar", members)), str(tmp_path / "sheet.png")
    assert main(["show", shard, "captions=json", "--out", sheet, "json_keys=[many]", "--image-size", "32"]) == 0
    assert "24 samples" in capsys.readouterr().out
    assert main(["show", shard, "--out", str(tmp_path / "no" / "sheet.png")]) == 2
    assert main(["show", shard, "--out", str(tmp_path / "sheet.jpg")]) == 2
    assert "expected a name that ends in .png" in capsys.readouterr().err
    assert main(["show", "--out", sheet]) == 2
    assert "neither SOURCE nor --config" in capsys.readouterr().err
    assert main(["show", shard, "--out", sheet, "--font", shard]) == 2
    assert "expected a TrueType" in capsys.readouterr().err
    assert main(["show", "--config", "configs/base.yaml", "--out", sheet, "--image-size", "9"]) == 2


def test_pieces_are_the_tokens_and_the_cut_is_where_the_text_tower_stops() -> None:
    vocabulary, caption = BPE(5), "A café, 東京 and unbelievablyish"
    pieces, read = vocabulary.pieces(caption)
    tokens, lengths = vocabulary.with_lengths([caption])
    assert (len(pieces) + 2, read) == (lengths[0], 3)
    assert "".join(pieces) == "a café , 東京 and unbelievablyish "
    rest = vocabulary.with_lengths(["".join(pieces[:read])])[0]
    assert torch.equal(rest, tokens)


def test_text_that_no_font_has_is_escaped() -> None:
    fonts = Fonts(13)
    assert fonts.replace_missing("ab\té\U0010fffe\u202e") == "ab\\té\\U0010fffe\\u202e"
    assert fonts.width("abc") > fonts.width("ab") > 0


def colours(sheet: Image.Image) -> set[tuple[int, ...]]:
    return set(map(tuple, np.asarray(sheet).reshape(-1, 3)))


def test_a_cut_is_marked_and_long_captions_end() -> None:
    image, red = torch.zeros(3, 16, 16, dtype=torch.uint8), (0xC0, 0x20, 0x20)

    def draw(*captions: Caption) -> Image.Image:
        return draw_sheet([Tile((image,), "title", captions)], "head")

    whole, cut = Caption(("one ", "two "), 2), Caption(("one ", "two "), 1)
    assert red in colours(draw(cut))
    assert red not in colours(draw(whole))
    endless = draw(Caption(("word ",) * 5000, 9), Caption(("x" * 5000,)))
    assert endless.size[1] < 800
    with pytest.raises(ConfigError, match="--font"):
        draw_sheet([Tile((image,), "", (whole,))], "", Path("no.ttf"))


def test_views_are_side_by_side() -> None:
    images = tuple(torch.full((3, 16, 16), 40 * number, dtype=torch.uint8) for number in range(4))
    sheet = np.asarray(draw_sheet([Tile(images, "", (Caption(("a",), 1),))], ""))
    scaled = 16 * scale_of(16)
    row = [sheet[HEAD + 5, GAP + number * (scaled + 4) + 5, 0] for number in range(4)]
    assert row == [0, 40, 80, 120]


def test_pixels_of_the_stored_image(tmp_path: Path) -> None:
    """A transform that does nothing shows the file's own pixels."""
    shard = str(write_tar(tmp_path / "0.tar", {"a.png": encode(pixels(3, 32, 32), "PNG"), "a.txt": b"a"}))
    sheet = tmp_path / "sheet.png"
    tree = run_tree(tmp_path / "runs", Path(shard), train__batch_size=2)
    tree["data"]["transform"] = {"scale": [1, 1], "ratio": [1, 1]}
    tree["data"]["sources"][0]["weight"] = 2
    (tmp_path / "c.json").write_text(json.dumps(tree))
    size = ["model.image.tower.image_size=32"]
    assert main(["show", "--config", str(tmp_path / "c.json"), "--out", str(sheet), "--count", "1", *size]) == 0
    assert np.array_equal(first_image(sheet, 32), pixels(3, 32, 32))
