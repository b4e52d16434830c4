"""Colours of objects and backgrounds, and the backgrounds with enough contrast to an object."""

from __future__ import annotations

import functools

import numpy as np

Rgb = tuple[int, int, int]

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
