"""The README's images: both are there for light and dark pages, and show what its table says."""

from __future__ import annotations

import json
import re

import pytest
from PIL import Image

from tests.docs.blocks import ROOT, blocks_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
IMAGES = sorted((ROOT / "docs" / "images").glob("*.png"))


def test_a_command_is_on_the_first_screen_and_both_images_follow():
    first = blocks_of(README)[0]
    assert first.language == "bash"
    assert first.line < 12
    assert 0 < README.index(first.source) < README.index("idea-light.png") < README.index("result-light.png")


def test_each_image_is_small_and_has_a_light_and_a_dark_variant():
    assert [path.name for path in IMAGES] == [
        f"{name}-{theme}.png" for name in ("idea", "result") for theme in ("dark", "light")
    ]
    assert all(path.stat().st_size < 200_000 for path in IMAGES)
    for name in ("idea", "result"):
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="docs/images/{name}-dark.png">'
        assert re.search(
            re.escape(dark) + rf'\s+<img src="docs/images/{name}-light.png" [^>]*alt="[^"]{{50,}}"', README
        )


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_the_table_has_the_figures_of_the_images(path):
    rows = json.loads(Image.open(path).info["Comment"])["figures"]
    assert len(rows) == 3
    assert [row for name, *rates in rows if (row := f"| {name} | {' | '.join(map(str, rates))} |") not in README] == []
