"""``vqclip data pack``: write data of any kind as WebDataset shards.

Captioned images become OUT/00000.tar, ... as img2dataset writes them; labelled ones OUT/SPLIT/0.tar, ... beside the
class names and prompts, as clip_benchmark does. Images keep their bytes, and samples their order. Run the same command
again to continue after a stop; machines that share OUT run it at the same time.
"""

from __future__ import annotations

import argparse
import re

from vqclip.cli import arguments as types
from vqclip.data import FolderConfig, open_source, parse_source
from vqclip.data.sources.packed import PackedConfig
from vqclip.data_tools.pack import Options, pack
from vqclip.errors import ConfigError
from vqclip.io.files import expand_home

__all__ = ["GIVEN_HELP", "OVERRIDES_HELP", "SOURCE_HELP", "configure", "run"]

_FIELDS = ("shard_size", "workers", "bad_fraction", "max_pixels")
EXAMPLES = """\
examples:
  vqclip data pack photos.csv shards/photos
  vqclip data pack /datasets/flowers shards/flowers --split train --workers 8
  vqclip data pack annotations.json shards/coco --workers 8      # on each of four machines that share the folder
"""
SOURCE_HELP = "file, folder, pattern or URL of the data"
"""Help of ``SOURCE``."""
OVERRIDES_HELP = "keys of the source, such as kind=csv captions=title; see docs/data.md"
"""Help of ``key=value``."""
GIVEN_HELP = f"{SOURCE_HELP}, and its keys; with --config: keys of the configuration"
"""Help of commands that take a source or a configuration."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("source", type=types.text, metavar="SOURCE", help=SOURCE_HELP)
    add("out", type=types.path, metavar="OUT", help="folder to write to: a new one, or one that was begun")
    add("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    add("--split", type=_split, default="train", help="folder of the shards of labelled data (%(default)s)")
    types.add_fields(parser, Options, *_FIELDS)


def run(options: argparse.Namespace) -> None:
    """Pack the source, and print where it is and how it is read."""
    config, out = parse_source(options.source, options.overrides), expand_home(options.out).absolute()
    if isinstance(config, FolderConfig) and out.resolve().is_relative_to(config.listing.resolve()):
        raise ConfigError(f"OUT: {out} is inside SOURCE, whose folders are data; expected a folder elsewhere")
    data = config if isinstance(config, PackedConfig) and config.image_files() is None else open_source(config)
    done = pack(data, Options(out=out, **{name: getattr(options, name) for name in ("split", *_FIELDS)}))
    print(done.describe(out), flush=True)


def _split(given: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", given) is None:
        raise argparse.ArgumentTypeError(f"got {given!r}, expected the name of a folder, such as train")
    return given
