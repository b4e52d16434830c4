"""The splits: trained and held-out combinations of colour and shape, and the samples of each split.

All draws are keyed by (VERSION, dataset seed, split number, image index, attempt), so an image depends neither on the
number of images nor on the process that draws it. (`val` compares with its earlier images, see `val_samples`.)
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from vqclip.errors import DataError
from vqclip.scenes.captions import Meaning, describe, holds
from vqclip.scenes.drawing import SHAPES, draw_scene
from vqclip.scenes.scene import COLOURS, Combination, Draws, Scene, sample_scene

VERSION = 3
"""Part of the cache folder's name; increase it with any change of an image, a caption or a split."""

SPLITS = ("train", "val", "test", "heldout")

TRAIN_DETAIL, VAL_DETAIL = 0.5, 0.85

# No "a {c}": the class may be "orange star", and these forms read well with every class.
TEMPLATES = ("{c}", "one {c}", "a single {c}", "a small {c}", "a large {c}", "a picture of one {c}", "a big {c}")

_HELD_OUT_DIAGONALS = (0, 5)


def _diagonals() -> list[list[Combination]]:
    """Split the table of colours × shapes into wrapped diagonals: each has every colour and every shape once."""
    colours = tuple(COLOURS)
    assert len(colours) == len(SHAPES)
    side = len(colours)
    # A step of 3, which has no factor in common with 11, keeps neighbours in the lists apart.
    return [[(colours[c], SHAPES[(d + 3 * c) % side]) for c in range(side)] for d in range(side)]


HELD_OUT: tuple[Combination, ...] = tuple(pair for d in _HELD_OUT_DIAGONALS for pair in _diagonals()[d])
"""Combinations that no training image shows; two of every colour and two of every shape."""

TRAINED: tuple[Combination, ...] = tuple(
    pair for d, row in enumerate(_diagonals()) if d not in _HELD_OUT_DIAGONALS for pair in row
)
"""All other combinations. Any 11 in a row contain every colour and every shape."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """An image, (S, S, 3) uint8, with its scene, and a caption or a class label."""

    pixels: np.ndarray
    scene: Scene
    caption: str | None = None
    label: int | None = None


def class_names(split: str) -> list[str]:
    """Return the classes of a labelled split: trained combinations for `test`, all of them for `heldout`.

    Chance is therefore 1/99 in `test` and 1/121 in `heldout`, whose images show only the 22 held-out classes: a model
    that knows colours and shapes but prefers the combinations of its training fails there.
    """
    combinations = TRAINED if split == "test" else TRAINED + HELD_OUT
    return [f"{colour} {shape}" for colour, shape in combinations]


def _draws(seed: int, split: str, index: int, attempt: int = 0) -> Draws:
    return Draws(VERSION, seed, SPLITS.index(split), index, attempt)


def train_samples(seed: int, count: int, image_size: int) -> Iterator[Sample]:
    """Yield captioned images of trained combinations; the first object takes each of them in turn."""
    for index in range(count):
        draws = _draws(seed, "train", index)
        scene = sample_scene(draws, TRAINED[index % len(TRAINED)], TRAINED)
        caption, _ = describe(scene, draws, TRAIN_DETAIL)
        yield Sample(draw_scene(scene, image_size, draws), scene, caption=caption)


def val_samples(seed: int, count: int, image_size: int, attempts: int = 200) -> Iterator[Sample]:
    """Yield captioned images of held-out combinations; each caption is true only of its own image.

    Scene and caption are drawn again while the caption is nearly true of an earlier image, or an earlier caption nearly
    true of this one; so a retrieval model can in principle be right every time.

    Raises:
        DataError: `count` exceeds the number of captions that the grammar can distinguish.
    """
    seen: dict[frozenset[Combination], list[tuple[Scene, Meaning]]] = defaultdict(list)
    counts = {1: 0.25, 2: 0.45, 3: 0.30}
    for index in range(count):
        for attempt in range(attempts):
            draws = _draws(seed, "val", index, attempt)
            scene = sample_scene(draws, HELD_OUT[index % len(HELD_OUT)], HELD_OUT, counts)
            caption, meaning = describe(scene, draws, VAL_DETAIL)
            similar = seen[frozenset(thing.combination for thing in scene.objects)]
            if not any(holds(meaning, other, True) or holds(said, scene, True) for other, said in similar):
                break
        else:
            raise DataError(
                f"scenes: val image {index} found no caption that fits only it in {attempts} draws; "
                f"got val={count}: ask for fewer"
            )
        similar.append((scene, meaning))
        yield Sample(draw_scene(scene, image_size, draws), scene, caption=caption)


def labelled_samples(seed: int, split: str, count: int, image_size: int) -> Iterator[Sample]:
    """Yield single-object images for zero-shot classification, `split` test or heldout, classes in turn."""
    shown, offset = (TRAINED, 0) if split == "test" else (HELD_OUT, len(TRAINED))
    for index in range(count):
        draws = _draws(seed, split, index)
        scene = sample_scene(draws, shown[index % len(shown)], shown, {1: 1.0})
        yield Sample(draw_scene(scene, image_size, draws), scene, label=offset + index % len(shown))
