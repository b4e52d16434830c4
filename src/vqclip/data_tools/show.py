"""Contact sheets: what the model sees, as an HTML page that contains its images and needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from vqclip.config import load_config
from vqclip.data import Source, TrainData
from vqclip.data.transforms import Size, as_pixels
from vqclip.report.page import render
from vqclip.report.plot import png_uri
from vqclip.towers import Vocabulary

if TYPE_CHECKING:
    from vqclip.train import TrainConfig

_LEAST_SIDE = 144
_MOST_PIECES = 300
"""Tokens of a caption that are shown; it may have 65,536 characters."""


class ModelInputs(NamedTuple):
    """A training configuration, and the form in which its model takes images and captions."""

    config: TrainConfig
    size: Size
    """Size of the images."""
    vocabulary: Vocabulary
    """Captions to tokens, at the context length of the text tower."""

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> ModelInputs:
        """Read a configuration and build its model, as training does; weights are not used.

        Raises:
            ConfigError: an invalid configuration.
        """
        from vqclip.train import TrainConfig  # here: `vqclip data draw` does without the training code

        config = load_config(TrainConfig, path, overrides)
        model = config.model.build()
        return cls(config, model.image.tower.size, model.text.preprocess)


class Caption(NamedTuple):
    """A caption as its tokens."""

    pieces: tuple[str, ...]
    """Text of each token."""
    read: int
    """Number of tokens that are read; the rest is cut."""


class Tile(NamedTuple):
    """Images of one sample side by side, with text below."""

    images: tuple[Tensor, ...]
    """``(3, H, W)`` uint8 each."""
    title: str
    captions: tuple[Caption, ...]
    warning: str = ""
    """Remark in red."""


def render_sheet(tiles: Sequence[Tile], title: str) -> str:
    """Return tiles as a page, with images as wide as the first. Each pixel of it is a square of whole pixels."""
    side = tiles[0].images[0].shape[-1] if tiles else 1
    shown = [
        (tile, [png_uri(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in tile.images]) for tile in tiles
    ]
    scaled = side * max(1, _LEAST_SIDE // side)
    return render("sheet.html", title=title, tiles=shown, side=scaled, most=_MOST_PIECES)


def training_tiles(data: TrainData, vocabulary: Vocabulary, count: int, epoch: int, views: int) -> list[Tile]:
    """Return tiles of the first samples of an epoch, in the order of training.

    Images equal those of the batches of training, bit for bit.

    Args:
        data: the training data.
        vocabulary: of the text tower.
        count: number of samples.
        epoch: e; the first tile is the first sample of epoch e.
        views: number of epochs, from e on, whose views of a sample are side by side.

    Raises:
        DataError: too many samples in a row are bad.
    """
    slots = data.order[data.order.begin(epoch) + np.arange(count)]
    tiles = []
    for source, index, passes in zip(*(part.tolist() for part in slots), strict=True):
        made = [data.samples.make(source, index, passes + view) for view in range(views)]
        sample, bad = made[0]
        pieces = [vocabulary.pieces(text) for text in dict.fromkeys(each.caption for each, _ in made)]
        captions = tuple(Caption(tuple(words), read) for words, read in pieces)
        longest, read = max(len(each.pieces) for each in captions), captions[0].read
        title = f"{sample.sample_id}: {_place(*data.samples.locate(sample.sample_id))}, {longest} token"
        title += "s" * (longest != 1) + (f", {read} read" if longest > read else "")
        warning = f"in place of {_place(data.samples.sources[source], index)}: {bad.kind}" if bad else ""
        size = data.samples.transform.size
        images = tuple(as_pixels(each.image, size) for each, _ in made if each.image is not None)
        tiles.append(Tile(images, title, captions, warning))
    return tiles


def _place(source: Source, index: int) -> str:
    """Return the end of a sample's name: its shard and key, or its file."""
    name = source.name(index)
    folder, _, last = name.rpartition("/")
    return last if ": " in last or not folder else "/".join(name.split("/")[-2:])
