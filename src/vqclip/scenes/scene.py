"""Scenes: objects with shape, colour, size and position on a background; and their keyed random sampling."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")
Rgb = tuple[int, int, int]
Combination = tuple[str, str]
"""A colour and a shape."""

Point = tuple[float, float]
"""x and y (down), as fractions of the image's side."""

# The basic colour terms of English, with cyan in place of grey (which is a background here): names that people agree
# on, and no two colours near each other.
COLOURS: dict[str, Rgb] = {
    "red": (222, 40, 48),
    "orange": (247, 132, 24),
    "yellow": (252, 214, 48),
    "green": (46, 158, 68),
    "cyan": (64, 206, 226),
    "blue": (34, 92, 220),
    "purple": (142, 50, 176),
    "pink": (246, 126, 184),
    "brown": (122, 74, 44),
    "black": (34, 34, 40),
    "white": (250, 250, 248),
}

# Two ends of a soft gradient each.
BACKGROUNDS: dict[str, tuple[Rgb, Rgb]] = {
    "grey": ((152, 156, 164), (114, 119, 129)),
    "cream": ((250, 240, 218), (238, 220, 186)),
    "mint": ((206, 238, 218), (166, 214, 188)),
    "lavender": ((224, 216, 246), (192, 182, 226)),
    "peach": ((254, 222, 200), (246, 192, 164)),
    "navy": ((44, 56, 104), (24, 32, 68)),
    "teal": ((38, 112, 118), (18, 76, 84)),
}

MIN_CONTRAST = 32.0
"""Least CIE76 colour difference between an object and the middle of its background."""

# Radius as a fraction of the image's side. The gaps between the ranges keep the words unambiguous.
SIZES: dict[str, tuple[float, float]] = {"small": (0.14, 0.155), "medium": (0.195, 0.22), "large": (0.28, 0.32)}

OBJECT_COUNTS = {1: 0.65, 2: 0.22, 3: 0.13}
"""Number of objects → fraction of the scenes, in the captioned splits."""

_MARGIN = 0.015
_GAP = 0.02
# Degrees to either side: enough to vary the image, too little to turn a square into a diamond.
_TILT = 12.0
_OTHER_TILTS = {"flower": 36.0, "circle": 0.0, "ring": 0.0, "crescent": 20.0}
_LOW, _MIDDLE, _HIGH = 0.24, 0.5, 0.76
_PAIRS = (
    ((_LOW, _MIDDLE), (_HIGH, _MIDDLE)),
    ((_MIDDLE, _LOW), (_MIDDLE, _HIGH)),
    ((_LOW, 0.4), (_HIGH, 0.6)),
    ((0.6, _LOW), (0.4, _HIGH)),
    ((_LOW, _LOW), (_HIGH, _HIGH)),
    ((_HIGH, _LOW), (_LOW, _HIGH)),
)
# Only small objects find room in a line of three.
_LINES = (
    ((0.17, _MIDDLE), (_MIDDLE, _MIDDLE), (0.83, _MIDDLE)),
    ((_MIDDLE, 0.17), (_MIDDLE, _MIDDLE), (_MIDDLE, 0.83)),
)
_TRIANGLES = (
    ((_MIDDLE, _LOW), (_LOW, _HIGH), (_HIGH, _HIGH)),
    ((_MIDDLE, _HIGH), (_LOW, _LOW), (_HIGH, _LOW)),
    ((_LOW, _MIDDLE), (_HIGH, _LOW), (_HIGH, _HIGH)),
    ((_HIGH, _MIDDLE), (_LOW, _LOW), (_LOW, _HIGH)),
)


class Draws:
    """A stream of draws keyed by integers; no global random state is read or changed.

    Everything is derived from `Generator.random`, whose stream is the same in all versions of numpy, so that a newer
    numpy does not change the images.

    Args:
        key: non-negative integers, here (version, dataset seed, split number, image index, attempt).
    """

    def __init__(self, *key: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key))).random

    def uniform(self, low: float, high: float) -> float:
        """Return a float in [low, high)."""
        return low + (high - low) * self._random()

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """Return one of the items, all equally likely."""
        return items[int(self._random() * len(items))]

    def pick_weighted(self, items: dict[T, float]) -> T:
        """Return one of the keys, in proportion to its value."""
        mark = self._random() * sum(items.values())
        for item, weight in items.items():
            mark -= weight
            if mark < 0:
                return item
        return next(reversed(items))

    def shuffle(self, items: Sequence[T]) -> list[T]:
        """Return the items in a random order."""
        keys = [self._random() for _ in items]
        return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]


@dataclasses.dataclass(frozen=True, slots=True)
class SceneObject:
    """One object; x, y (centre, y down) and radius are fractions of the image's side, angle in degrees."""

    colour: str
    shape: str
    size: str
    x: float
    y: float
    radius: float
    angle: float

    @property
    def combination(self) -> Combination:
        """The colour and the shape."""
        return self.colour, self.shape


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """One to three objects on a background. Objects of one colour and shape in a scene also share their size."""

    objects: tuple[SceneObject, ...]
    background: str


def sample_scene(
    draws: Draws, first: Combination, combinations: Sequence[Combination], counts: dict[int, float] | None = None
) -> Scene:
    """Draw a scene.

    Args:
        draws: random draws.
        first: colour and shape of the first object.
        combinations: choices for further objects.
        counts: number of objects and its weight; default `OBJECT_COUNTS`.
    """
    kinds = _sample_kinds(draws, draws.pick_weighted(counts or OBJECT_COUNTS), first, combinations)
    while True:
        pattern: tuple[Point, ...] = ()  # a single object may be anywhere
        if len(kinds) > 1:
            pattern = draws.pick(_PAIRS if len(kinds) == 2 else _LINES if draws.chance(0.25) else _TRIANGLES)
        if pattern in _LINES:
            sizes = ["small"] * 3
        else:
            size_of = {kind: draws.pick(tuple(SIZES)) for kind in dict.fromkeys(kinds)}
            sizes = [size_of[kind] for kind in kinds]
        radii = [draws.uniform(*SIZES[size]) for size in sizes]
        centres = _sample_centres(draws, pattern, radii)
        if centres is not None:
            break
    objects = []
    for (colour, shape), size, radius, (x, y) in zip(kinds, sizes, radii, centres, strict=True):
        tilt = _OTHER_TILTS.get(shape, _TILT)
        angle = draws.uniform(-tilt, tilt)
        objects.append(SceneObject(colour, shape, size, round(x, 4), round(y, 4), round(radius, 4), round(angle, 2)))
    return Scene(tuple(objects), draws.pick(backgrounds_for(frozenset(colour for colour, _ in kinds))))


def _sample_kinds(draws: Draws, count: int, first: Combination, combinations: Sequence[Combination]) -> list:
    """Draw the objects' combinations: sometimes several of one kind, and only sets with a common background."""
    while True:
        kinds = [first]
        repeats = draws.pick_weighted({0: 0.6, 1: 0.25, 2: 0.15})
        while len(kinds) < count:
            kinds.append(kinds[-1] if len(kinds) <= repeats else draws.pick(combinations))
        # If a kind were drawn twice by chance, the caption would count two of it; draw again.
        if len(set(kinds)) == max(1, count - repeats) and backgrounds_for(frozenset(c for c, _ in kinds)):
            return kinds


def _sample_centres(draws: Draws, pattern: tuple[Point, ...], radii: list[float]) -> list[Point] | None:
    """Place the objects apart from each other and inside the image; None if they do not fit."""
    if not pattern:
        return [(_place(draws, radii[0]), _place(draws, radii[0]))]
    for jitter in (0.07, 0.05, 0.03, 0.01):
        centres = [
            (_inside(x + draws.uniform(-jitter, jitter), r), _inside(y + draws.uniform(-jitter, jitter), r))
            for (x, y), r in zip(draws.shuffle(pattern), radii, strict=True)
        ]
        if _apart(centres, radii):
            return centres
    return None


def _place(draws: Draws, radius: float) -> float:
    """Return a coordinate that is clearly low, clearly central or clearly high."""
    low = radius + _MARGIN
    spread = max(0.005, min(0.08, 0.36 - low))
    return draws.pick((low + draws.uniform(0, spread), draws.uniform(0.47, 0.53), 1 - low - draws.uniform(0, spread)))


def _inside(value: float, radius: float) -> float:
    return min(max(value, radius + _MARGIN), 1 - radius - _MARGIN)


def _apart(centres: list[Point], radii: list[float]) -> bool:
    things = zip(centres, radii, strict=True)
    return all(math.dist(a, b) >= r + s + _GAP for (a, r), (b, s) in itertools.combinations(things, 2))


def lab(rgb: Rgb) -> np.ndarray:
    """Return CIE L*a*b* (D65), shape (3,), float64, of an sRGB colour in 0..255."""
    value = np.asarray(rgb, np.float64) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    cube = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * cube[1] - 16, 500 * (cube[0] - cube[1]), 200 * (cube[1] - cube[2])])


def difference(a: Rgb, b: Rgb) -> float:
    """Return the CIE76 difference of two sRGB colours; about 2 is just visible, 100 is black against white."""
    return float(np.linalg.norm(lab(a) - lab(b)))


@functools.cache
def backgrounds_for(colours: frozenset[str]) -> tuple[str, ...]:
    """Return the backgrounds with enough contrast to all of these object colours."""
    return tuple(
        name
        for name, (light, dark) in BACKGROUNDS.items()
        if all(min(difference(COLOURS[c], light), difference(COLOURS[c], dark)) >= MIN_CONTRAST for c in colours)
    )
