"""``vqclip data``: draw the data set and look at it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from vqclip.config import load_config
from vqclip.errors import VqclipError
from vqclip.runlog.console import unfailing_streams
from vqclip.scenes.contact_sheet import contact_sheet
from vqclip.scenes.make import ScenesConfig, make_scenes


@unfailing_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="vqclip data", description="Draw the scenes data set.")
    parser.add_argument("--out", type=Path, help="folder to draw into (default: $VQCLIP_CACHE or ~/.cache/vqclip)")
    parser.add_argument("--contact-sheet", type=Path, metavar="FILE", help="also write pictures with captions as PNG")
    parser.add_argument("--split", choices=("train", "val"), default="train", help="split on the contact sheet")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. image_size=224 train=500 seed=1")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sheet = options.contact_sheet
    if sheet and not sheet.absolute().parent.is_dir():  # told now, not when all is drawn
        print(f"--contact-sheet: got {sheet}, but there is no folder {sheet.absolute().parent}", file=sys.stderr)
        return 2
    try:
        paths = make_scenes(options.out, load_config(ScenesConfig, None, options.overrides))
        for split in ("train", "val", "test", "heldout"):
            print(f"{split:8} {getattr(paths, split)}")
        if sheet:
            contact_sheet(getattr(paths, options.split)).save(sheet, format="PNG")
            print(f"sheet    {sheet}")
    except (VqclipError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
