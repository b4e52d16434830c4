"""``vqclip data index``: make the index that training needs to read shards in chunks.

It reads every shard once and stores none. Any number of processes and machines may run the same command at once: they
share the work. Run it again after a stop, or when shards have changed: the others are not read again.
"""

from __future__ import annotations

import argparse

from vqclip.cli import arguments as types
from vqclip.cli.data_pack import OVERRIDES_HELP, SOURCE_HELP
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, parse_source
from vqclip.data.chunks.make import CHUNK
from vqclip.data_tools.index import index_shards
from vqclip.errors import ConfigError
from vqclip.runlog.console import print_output

__all__ = ["EXAMPLES", "configure", "run"]

EXAMPLES = """\
examples:
  vqclip data index s3://bucket/shards
  vqclip data index '/datasets/web/{00000..00999}.tar' --workers 8
  vqclip data index 'https://data.example.org/{00000..00999}.tar' --out /tmp/index
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("source", type=types.text, metavar="SOURCE", help=f"{SOURCE_HELP}: tars")
    add("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    add("--out", type=types.text, metavar="FOLDER", help="folder or its URL (beside the shards, else the cache)")
    add(
        "--chunk",
        type=types.whole(1, 1 << 20),
        default=CHUNK,
        help="samples of a chunk; data.order.chunk must be a multiple of it (%(default)s)",
    )
    add("--workers", type=types.whole(1, 512), default=4, help="shards that are read at a time (%(default)s)")


def run(options: argparse.Namespace) -> None:
    """Make the index, and print where it is and how training finds it."""
    config = parse_source(options.source, options.overrides)
    if not isinstance(config, CaptionShardsConfig | ClassShardsConfig):
        raise ConfigError(f"SOURCE: kind {config.kind} has no chunks; expected tars (kind shards or classes)")
    print_output(index_shards(config.shards(), options.chunk, options.workers, options.out).describe())
