"""Shapes as outlines, and their signed distance fields, which give soft edges at any size and rotation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

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


def _circle() -> Outline:
    return [_regular(96, 0.9)]


def _ring() -> Outline:
    return [_regular(96, 0.92), _regular(72, 0.46)]


def _square() -> Outline:
    side = 0.72
    return [np.array([[-side, -side], [side, -side], [side, side], [-side, side]])]


def _triangle() -> Outline:
    return [_regular(3, 0.97) + [0, 0.14]]


def _diamond() -> Outline:
    return [np.array([[0, -0.98], [0.6, 0], [0, 0.98], [-0.6, 0]])]


def _star() -> Outline:
    points = _regular(10, 0.98)
    points[1::2] *= 0.44
    return [points + [0, 0.04]]


def _cross() -> Outline:
    arm, half = 0.88, 0.28
    corner = np.array([[half, -arm], [half, -half], [arm, -half]])
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    turns = [np.linalg.matrix_power(turn, k) for k in range(4)]
    return [np.concatenate([corner @ t.T for t in turns])]


def _heart() -> Outline:
    t = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return [np.stack([x, -y], axis=1) / 17.5 + [0, -0.1]]


def _crescent() -> Outline:
    bite, radius, offset = 0.76, 0.94, 0.5
    # The two circles meet at (x, ±y); walk the outer arc from the upper to the lower tip, then the inner one back.
    x = (radius**2 - bite**2 + offset**2) / (2 * offset)
    y = np.sqrt(radius**2 - x**2)
    outer = np.linspace(np.arctan2(-y, x), np.arctan2(y, x) - 2 * np.pi, 80)
    inner = np.linspace(np.arctan2(y, x - offset), np.arctan2(-y, x - offset) + 2 * np.pi, 60)[1:-1]
    arcs = [np.stack([radius * np.cos(outer), radius * np.sin(outer)], 1)]
    arcs.append(np.stack([offset + bite * np.cos(inner), bite * np.sin(inner)], 1))
    return [np.concatenate(arcs) + [0.16, 0]]


def _flower() -> Outline:
    return [_polar(lambda a: 0.38 + 0.6 * np.abs(np.cos(2.5 * a)) ** 0.7, 200)]


def _drop() -> Outline:
    t = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    x = 0.92 * np.sin(t) * np.sin(t / 2) ** 1.35
    return [np.stack([x, -np.cos(t)], axis=1) * 0.96]


OUTLINES: dict[str, Callable[[], Outline]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "ring": _ring,
    "cross": _cross,
    "diamond": _diamond,
    "crescent": _crescent,
    "flower": _flower,
    "drop": _drop,
}

SHAPES: tuple[str, ...] = tuple(OUTLINES)

# Degrees to either side: enough to vary the image, too little to turn a square into a diamond.
MAX_TILT = {shape: 12.0 for shape in SHAPES} | {"flower": 36.0, "circle": 0.0, "ring": 0.0, "crescent": 20.0}

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
    for contour in OUTLINES[shape]():
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
