"""Scenes: objects with shape, colour, size and position on a background; and their random sampling."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from vqclip.scenes.draws import Draws
from vqclip.scenes.palette import backgrounds_for
from vqclip.scenes.shapes import MAX_TILT

Combination = tuple[str, str]
"""A colour and a shape."""

Point = tuple[float, float]
"""x and y (down), as fractions of the image's side."""

# Radius as a fraction of the image's side. The gaps between the ranges keep the words unambiguous.
SIZES: dict[str, tuple[float, float]] = {"small": (0.14, 0.155), "medium": (0.195, 0.22), "large": (0.28, 0.32)}

OBJECT_COUNTS = {1: 0.65, 2: 0.22, 3: 0.13}
"""Number of objects → fraction of the scenes, in the captioned splits."""

_MARGIN = 0.015
_GAP = 0.02


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
        pattern = _sample_pattern(draws, len(kinds))
        sizes = ["small"] * 3 if pattern in _LINES else _sample_sizes(draws, kinds)
        radii = [draws.uniform(*SIZES[size]) for size in sizes]
        centres = _sample_centres(draws, pattern, radii)
        if centres is not None:
            break
    objects = tuple(
        SceneObject(colour, shape, size, round(x, 4), round(y, 4), round(radius, 4), round(_tilt(draws, shape), 2))
        for (colour, shape), size, radius, (x, y) in zip(kinds, sizes, radii, centres, strict=True)
    )
    return Scene(objects, draws.pick(backgrounds_for(frozenset(colour for colour, _ in kinds))))


def _tilt(draws: Draws, shape: str) -> float:
    return draws.uniform(-MAX_TILT[shape], MAX_TILT[shape])


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


def _sample_sizes(draws: Draws, kinds: list[Combination]) -> list[str]:
    size_of = {kind: draws.pick(tuple(SIZES)) for kind in dict.fromkeys(kinds)}
    return [size_of[kind] for kind in kinds]


def _sample_pattern(draws: Draws, count: int) -> tuple[Point, ...]:
    """Choose approximate places of the objects; () for a single one, which may be anywhere."""
    if count == 1:
        return ()
    if count == 2:
        return draws.pick(_PAIRS)
    return draws.pick(_LINES if draws.chance(0.25) else _TRIANGLES)


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
