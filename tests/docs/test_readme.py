"""The README's images: both are there for light and dark pages, and show what its table says."""

from __future__ import annotations

import json
import re
import runpy
import sys

import pytest
import torch
from PIL import Image

from tests.docs.blocks import ROOT, blocks_of
from tests.models import PRODUCT, tiny_model
from tests.training import run_tree

README = (ROOT / "README.md").read_text(encoding="utf-8")
IMAGES = sorted((ROOT / "docs" / "images").glob("*.png"))
FIGURES = [path for path in IMAGES if not path.name.startswith("reconstructed")]
"""Images of the run of `make train`."""


def test_a_command_is_on_the_first_screen_and_both_images_follow():
    first = blocks_of(README)[0]
    assert first.language == "bash"
    assert first.line < 12
    assert 0 < README.index(first.source) < README.index("idea-light.png") < README.index("result-light.png")


def test_each_image_is_small_and_has_a_light_and_a_dark_variant():
    assert [path.name for path in IMAGES] == [
        f"{name}-{theme}.png" for name in ("idea", "reconstructed", "result") for theme in ("dark", "light")
    ]
    assert all(path.stat().st_size < 200_000 for path in IMAGES)
    for name in ("idea", "result"):
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="docs/images/{name}-dark.png">'
        assert re.search(
            re.escape(dark) + rf'\s+<img src="docs/images/{name}-light.png" [^>]*alt="[^"]{{50,}}"', README
        )


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_the_table_has_the_figures_of_the_images(path):
    rows = json.loads(Image.open(path).info["Comment"])["figures"]
    assert len(rows) == 3
    assert [row for name, *rates in rows if (row := f"| {name} | {' | '.join(map(str, rates))} |") not in README] == []


def draw(run, out, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["readme_images.py", str(run), "--out", str(out), *arguments])
    runpy.run_path(str(ROOT / "scripts" / "readme_images.py"), run_name="__main__")


def test_a_folder_without_a_finished_run_is_named(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"^error: .*none: contains no summary.json; .*make train"):
        draw(tmp_path / "none", tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    run, rates = tmp_path / "run", {"top1": 0.5, "t2i_r1": 0.25}
    tiny_model(PRODUCT, PRODUCT).build().eval().save_pretrained(run / "tokenizer")
    (run / "config.yaml").write_text(json.dumps(run_tree(tmp_path, tmp_path, run__name="one")))
    results = [
        {"name": kind, "kind": kind, "classes": 3, "samples": 4, "chance": rates}
        | {"figures": {"continuous": rates, "codes_only": rates}}
        for kind in ("zero_shot", "retrieval")
    ]
    (run / "summary.json").write_text(json.dumps({"results": results, "step": 2, "bits_per_sample": {"image": 48.0}}))
    for out in ("first", "second"):
        draw(run, tmp_path / out, monkeypatch)
    torch.set_num_threads(threads)
    first, second = (sorted((tmp_path / out).iterdir()) for out in ("first", "second"))
    assert [path.name for path in first] == [path.name for path in FIGURES]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    rows = json.loads(Image.open(first[-1]).info["Comment"])["figures"]
    assert rows == [["zero_shot, 3 classes", 50.0, 50.0, 50.0], ["captions to 4 images", 25.0, 25.0, 25.0]]
