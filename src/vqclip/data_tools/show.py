"""Show what the model sees: images after decoding and augmentation, captions as tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vqclip.data import Source, TrainData, decode_image
from vqclip.data.transforms import EvalTransformConfig
from vqclip.data_tools.sheet import Caption, Tile, draw_sheet
from vqclip.towers import Vocabulary

__all__ = ["draw_source", "show", "training_tiles"]


def show(
    data: TrainData, vocabulary: Vocabulary, head: str, count: int, epoch: int, views: int, font: Path | None = None
) -> Image.Image:
    """Draw a contact sheet of the first samples of an epoch, in the order of training.

    Args:
        data: the training data.
        vocabulary: of the text tower.
        head: line above the images.
        count: number of samples.
        epoch: e; the sheet begins with the first sample of epoch e.
        views: number of epochs, from e on, whose views of a sample are shown side by side.
        font: used first for captions.

    Raises:
        DataError: too many samples in a row are bad.
        ConfigError: the font cannot be read.
    """
    return draw_sheet(training_tiles(data, vocabulary, count, epoch, views), head, font)


def training_tiles(data: TrainData, vocabulary: Vocabulary, count: int, epoch: int, views: int) -> list[Tile]:
    """Return the tiles of `show`; images equal those of the batches of training, bit for bit."""
    positions = data.order.begin(epoch) + np.arange(count)
    slots = zip(*(part.tolist() for part in data.order[positions]), strict=True)
    return [_tile(data, vocabulary, source, index, passes, views) for source, index, passes in slots]


def _tile(data: TrainData, vocabulary: Vocabulary, source: int, index: int, passes: int, views: int) -> Tile:
    made = [data.samples.make(source, index, passes + view) for view in range(views)]
    images, bad = [], made[0][1]
    for sample, _ in made:
        assert sample.image is not None
        images.append(sample.image)
    captions = []
    for text in dict.fromkeys(sample.caption for sample, _ in made):
        pieces, read = vocabulary.pieces(text)
        captions.append(Caption((*pieces,), read))
    longest = max(len(caption.pieces) for caption in captions)
    read = captions[0].read or 0
    sample_id = made[0][0].sample_id
    title = f"{sample_id}: {_place(*data.samples.locate(sample_id))}, {longest} token{'s' * (longest != 1)}"
    if longest > read:
        title += f", {read} read"
    warning = f"in place of {_place(data.samples.sources[source], index)}: {bad[0].kind}" if bad else ""
    return Tile(tuple(images), title, tuple(captions), warning)


def _place(source: Source, index: int) -> str:
    """Return the end of a sample's name: its shard and key, or its file."""
    name = source.name(index)
    folder, _, last = name.rpartition("/")
    return last if ": " in last or not folder else "/".join(name.split("/")[-2:])


def draw_source(source: Source, count: int, side: int = 144) -> Image.Image:
    """Draw a contact sheet of the first samples of a source as they are stored."""
    transform = EvalTransformConfig(mode="squash").build(side)
    tiles = []
    for index in range(min(count, len(source))):
        sample = source.read(index)
        captions = tuple(Caption((caption,)) for caption in sample.captions)
        tiles.append(Tile((transform(decode_image(sample.image)),), "", captions))
    return draw_sheet(tiles, "")
