"""Draw scenes: shapes as distance fields, on a soft gradient with a little grain, with shadow, rim and light."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from vqclip.scenes.scene import BACKGROUNDS, COLOURS, Draws, Scene, SceneObject

FIELD_EXTENT = 1.5
"""A distance field covers the square [-FIELD_EXTENT, FIELD_EXTENT]², in units of the object's radius."""

FIELD_CELLS = 192

Outline = list[np.ndarray]
"""Closed contours, (points, 2) float64 each, x to the right and y down; even-odd filled, inside the unit circle."""


def _polar(radius: Callable[[np.ndarray], np.ndarray], points: int = 120) -> np.ndarray:
    angle = np.linspace(0, 2 * np.pi, points, endpoint=False)
    return np.stack([radius(angle) * np.sin(angle), -radius(angle) * np.cos(angle)], axis=1)


def _regular(corners: int, radius: float = 1.0) -> np.ndarray:
    return _polar(lambda a: np.full_like(a, radius), corners)


def _cross() -> np.ndarray:
    arm, half = 0.88, 0.28
    corner = np.array([[half, -arm], [half, -half], [arm, -half]])
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    turns = [np.linalg.matrix_power(turn, k) for k in range(4)]
    return np.concatenate([corner @ t.T for t in turns])


def _heart() -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([x, -y], axis=1) / 17.5 + [0, -0.1]


def _crescent() -> np.ndarray:
    bite, radius, offset = 0.76, 0.94, 0.5
    # The two circles meet at (x, ±y); walk the outer arc from the upper to the lower tip, then the inner one back.
    x = (radius**2 - bite**2 + offset**2) / (2 * offset)
    y = np.sqrt(radius**2 - x**2)
    outer = np.linspace(np.arctan2(-y, x), np.arctan2(y, x) - 2 * np.pi, 80)
    inner = np.linspace(np.arctan2(y, x - offset), np.arctan2(-y, x - offset) + 2 * np.pi, 60)[1:-1]
    arcs = [np.stack([radius * np.cos(outer), radius * np.sin(outer)], 1)]
    arcs.append(np.stack([offset + bite * np.cos(inner), bite * np.sin(inner)], 1))
    return np.concatenate(arcs) + [0.16, 0]


def _drop() -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    x = 0.92 * np.sin(t) * np.sin(t / 2) ** 1.35
    return np.stack([x, -np.cos(t)], axis=1) * 0.96


OUTLINES: dict[str, Outline] = {
    "circle": [_regular(96, 0.9)],
    "square": [0.72 * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])],
    "triangle": [_regular(3, 0.97) + [0, 0.14]],
    "star": [_regular(10, 0.98) * np.array([[1], [0.44]] * 5) + [0, 0.04]],
    "heart": [_heart()],
    "ring": [_regular(96, 0.92), _regular(72, 0.46)],
    "cross": [_cross()],
    "diamond": [np.array([[0, -0.98], [0.6, 0], [0, 0.98], [-0.6, 0]])],
    "crescent": [_crescent()],
    "flower": [_polar(lambda a: 0.38 + 0.6 * np.abs(np.cos(2.5 * a)) ** 0.7, 200)],
    "drop": [_drop()],
}

SHAPES: tuple[str, ...] = tuple(OUTLINES)

_ROUNDING = 0.05


@functools.cache
def distance_field(shape: str) -> np.ndarray:
    """Return the signed distance to the shape's outline, (FIELD_CELLS, FIELD_CELLS) float32, negative inside.

    Corners are rounded a little. Distances are in units of the object's radius; rows are y (down), columns x.
    """
    axis = np.linspace(-FIELD_EXTENT, FIELD_EXTENT, FIELD_CELLS)
    x, y = np.meshgrid(axis, axis)
    points = np.stack([x.ravel(), y.ravel()], axis=1)
    nearest = np.full(len(points), np.inf)
    inside = np.zeros(len(points), bool)
    for contour in OUTLINES[shape]:
        # Shrunk, since rounding grows the shape outwards.
        contour = contour * (1 - _ROUNDING)
        for start, end in zip(contour, np.roll(contour, -1, axis=0), strict=True):
            edge, offset = end - start, points - start
            along = np.clip(offset @ edge / max(edge @ edge, 1e-12), 0, 1)
            gap = offset - along[:, None] * edge
            nearest = np.minimum(nearest, np.einsum("ij,ij->i", gap, gap))
            if start[1] != end[1]:
                spans = (points[:, 1] >= start[1]) != (points[:, 1] >= end[1])
                inside ^= spans & (offset[:, 0] < edge[0] * offset[:, 1] / edge[1])
    distance = np.sqrt(nearest) * np.where(inside, -1, 1) - _ROUNDING
    return distance.reshape(x.shape).astype(np.float32)


_LIGHT = np.array([-0.5, -0.87], np.float32)
"""Direction to the light, x right and y down: from above, a little from the left."""


def draw_scene(scene: Scene, image_size: int, draws: Draws) -> np.ndarray:
    """Draw a scene.

    Args:
        scene: the scene; its colours, shapes and places are drawn exactly, up to the shading.
        image_size: side S in pixels.
        draws: random draws of gradient direction, grain and shade.

    Returns:
        (S, S, 3) uint8 RGB.
    """
    canvas = _background(scene.background, image_size, draws)
    for thing in scene.objects:
        _shadow(canvas, thing)
    for thing in scene.objects:
        _object(canvas, thing, shade=draws.uniform(0.94, 1.05))
    return np.clip(canvas + 0.5, 0, 255).astype(np.uint8)


@functools.cache
def _axis(image_size: int) -> np.ndarray:
    return (np.arange(image_size, dtype=np.float32) + 0.5) / image_size


@functools.cache
def _grain(image_size: int) -> np.ndarray:
    """Return a fixed texture twice as large as an image; each image shows a different part of it."""
    side = 2 * image_size
    fine = np.random.Generator(np.random.PCG64(1)).random((side, side), np.float32) - 0.5
    soft = fine.copy()
    for shift in (1, 2, 3):
        soft += np.roll(fine, shift, 0) + np.roll(fine, shift, 1)
    return (4.0 * fine + 3.0 * soft)[..., None]


def _background(name: str, image_size: int, draws: Draws) -> np.ndarray:
    light, dark = (np.array(colour, np.float32) for colour in BACKGROUNDS[name])
    axis = _axis(image_size)
    angle = draws.uniform(-0.6, 0.6) - np.pi / 2
    glow_x, glow_y = draws.uniform(0.2, 0.8), draws.uniform(0.0, 0.5)
    ramp = 0.5 - 0.7 * (np.cos(angle) * (axis - 0.5)[None, :] + np.sin(angle) * (axis - 0.5)[:, None])
    glow = (axis - glow_x)[None, :] ** 2 + (axis - glow_y)[:, None] ** 2
    mix = np.clip(0.65 * ramp + 0.7 * glow, 0, 1)[..., None]
    top, left = int(draws.uniform(0, image_size)), int(draws.uniform(0, image_size))
    return light + (dark - light) * mix + _grain(image_size)[top : top + image_size, left : left + image_size]


def _box(thing: SceneObject, image_size: int, reach: float) -> tuple[slice, slice]:
    radius = thing.radius * reach
    ends = [(int(max(0.0, (c - radius) * image_size)), int((c + radius) * image_size) + 2) for c in (thing.y, thing.x)]
    return slice(*ends[0]), slice(*ends[1])


def _distance(thing: SceneObject, image_size: int, box: tuple[slice, slice], shift: float = 0.0) -> np.ndarray:
    """Return the distance of the box's pixels to the outline in units of the radius, bilinear in the stored field."""
    axis = _axis(image_size)
    y = ((axis[box[0]] - thing.y) / thing.radius)[:, None] - shift
    x = ((axis[box[1]] - thing.x) / thing.radius)[None, :] - 0.4 * shift
    turn = np.deg2rad(thing.angle)
    cos, sin = np.float32(np.cos(turn)), np.float32(np.sin(turn))
    scale, middle = (FIELD_CELLS - 1) / (2 * FIELD_EXTENT), (FIELD_CELLS - 1) / 2
    column = np.clip((cos * x + sin * y) * scale + middle, 0, FIELD_CELLS - 1.001)
    row = np.clip((cos * y - sin * x) * scale + middle, 0, FIELD_CELLS - 1.001)
    j, i = column.astype(np.int32), row.astype(np.int32)
    column -= j
    row -= i
    field, at = distance_field(thing.shape).ravel(), i * FIELD_CELLS + j
    upper = field[at] * (1 - column) + field[at + 1] * column
    lower = field[at + FIELD_CELLS] * (1 - column) + field[at + FIELD_CELLS + 1] * column
    return upper + (lower - upper) * row


def _shadow(canvas: np.ndarray, thing: SceneObject) -> None:
    """Darken the canvas below and to the right of the object, with a soft edge."""
    box = _box(thing, len(canvas), reach=1.4)
    distance = _distance(thing, len(canvas), box, shift=0.14)
    soft = np.clip(0.5 - distance / 0.34, 0, 1)
    canvas[box] *= 1 - (0.42 * soft * soft * (3 - 2 * soft))[..., None]


def _object(canvas: np.ndarray, thing: SceneObject, shade: float) -> None:
    """Paint the object: its colour, lighter towards the light, with a bevelled rim; edges are one pixel soft."""
    size = len(canvas)
    box = _box(thing, size, reach=1.1)
    distance = _distance(thing, size, box)
    coverage = np.clip(0.5 - distance * (thing.radius * size), 0, 1)[..., None]
    # The field's gradient points outwards: its dot product with the light separates lit from shaded rims.
    slope_y, slope_x = np.gradient(distance * (thing.radius * size))
    facing = slope_x * _LIGHT[0] + slope_y * _LIGHT[1]
    rim = np.clip(1 + distance / 0.2, 0, 1)
    height = ((_axis(size)[box[0]] - thing.y) / thing.radius)[:, None]
    light = (0.26 * rim * rim * facing - 0.10 * height)[..., None]
    colour = np.array(COLOURS[thing.colour], np.float32) * shade
    paint = np.where(light > 0, colour + (255 - colour) * light, colour * (1 + light))
    canvas[box] += (paint - canvas[box]) * coverage
