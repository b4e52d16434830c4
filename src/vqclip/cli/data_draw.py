"""``vqclip data draw``: draw the scenes data set.

Splits: train, val: captioned; test, heldout: labelled, for zero-shot.
"""

from __future__ import annotations

import argparse

from vqclip.cli import arguments as types
from vqclip.config import load_config
from vqclip.data import CaptionShardsConfig
from vqclip.data_tools.show import render_sheet, source_tiles
from vqclip.io.atomic import write_text
from vqclip.scenes.make import ScenesConfig, make_scenes

__all__ = ["configure", "run"]

EXAMPLES = """\
examples:
  vqclip data draw --contact-sheet sheet.html train=500 image_size=128
"""

_COUNT = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("--out", type=types.path, help="folder to draw into (default: $VQCLIP_CACHE or ~/.cache/vqclip)")
    add(
        "--contact-sheet", type=types.path, metavar="FILE", help="also write images with their captions as an HTML page"
    )
    add("--split", choices=("train", "val"), default="train", help="captioned split on the contact sheet (%(default)s)")
    add("overrides", nargs="*", metavar="key=value", help="e.g. image_size=224 train=500 seed=1")


def run(options: argparse.Namespace) -> None:
    """Draw the data set, and the sheet."""
    if options.contact_sheet:
        types.require_page("--contact-sheet", options.contact_sheet)  # before the long work
    paths = make_scenes(options.out, load_config(ScenesConfig, None, options.overrides))
    for split in ("train", "val", "test", "heldout"):
        print(f"{split:8} {getattr(paths, split)}")
    if options.contact_sheet:
        source = CaptionShardsConfig(path=str(getattr(paths, options.split))).build(options.out)
        tiles = source_tiles(source, _COUNT)
        write_text(options.contact_sheet, render_sheet(tiles, f"{options.split} of scenes"))
        print(f"sheet    {options.contact_sheet}")
