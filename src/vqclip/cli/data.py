"""``vqclip data``: draw the scenes data set, and a contact sheet of it."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from vqclip.cli.command import command
from vqclip.config import load_config
from vqclip.errors import ConfigError
from vqclip.scenes.contact_sheet import contact_sheet
from vqclip.scenes.make import ScenesConfig, make_scenes


@command("vqclip data")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="vqclip data",
        description="Draw the scenes data set. Splits: train, val: captioned; test, heldout: labelled, for zero-shot.",
    )
    parser.add_argument("--out", type=Path, help="folder to draw into (default: $VQCLIP_CACHE or ~/.cache/vqclip)")
    parser.add_argument(
        "--contact-sheet", type=Path, metavar="FILE", help="also write images with their captions as a PNG"
    )
    parser.add_argument(
        "--split", choices=("train", "val"), default="train", help="captioned split on the contact sheet"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. image_size=224 train=500 seed=1")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sheet = options.contact_sheet
    if sheet and not sheet.absolute().parent.is_dir():  # checked before the long work
        raise ConfigError(f"--contact-sheet: got {sheet}, but there is no folder {sheet.absolute().parent}")
    paths = make_scenes(options.out, load_config(ScenesConfig, None, options.overrides))
    for split in ("train", "val", "test", "heldout"):
        print(f"{split:8} {getattr(paths, split)}")
    if sheet:
        contact_sheet(getattr(paths, options.split)).save(sheet, format="PNG")
        print(f"sheet    {sheet}")
