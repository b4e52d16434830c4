"""``vqclip data index``: make the index of tars that training needs.

It reads every shard once and stores none. Any number of processes and machines may run the same command at once: they
share the work. Run it again after a stop, or when shards have changed: the others are not read again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vqclip.cli import arguments as types
from vqclip.cli.data_pack import OVERRIDES_HELP, SOURCE_HELP
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, parse_source
from vqclip.data.remote import is_tar, protocol_of
from vqclip.data.remote.urls import split_query
from vqclip.data.tars.make import CHUNK
from vqclip.data_tools.index import index_shards
from vqclip.errors import ConfigError
from vqclip.runlog.console import print_output

__all__ = ["EXAMPLES", "configure", "parse_tars", "run"]

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
    help_text = "samples of a chunk; data.order.chunk must be a multiple of it (%(default)s)"
    add("--chunk", type=types.whole(1, 1 << 20), default=CHUNK, help=help_text)
    help_text = "shards that are read at a time; on fast disks start several processes instead (%(default)s)"
    add("--workers", type=types.whole(1, 512), default=4, help=help_text)


def run(options: argparse.Namespace) -> None:
    """Make the index, and print where it is and how training finds it."""
    tars = parse_tars(options.source, options.overrides).tar_set()
    print_output(index_shards(tars, options.chunk, options.workers, options.out))


def parse_tars(path: str, overrides: Sequence[str]) -> CaptionShardsConfig | ClassShardsConfig:
    """Return the configuration of a source of tars; a folder at a URL is of kind classes if a split is named.

    Raises:
        ConfigError: it is of another kind.
    """
    keys = {each.partition("=")[0] for each in overrides}
    if "kind" not in keys and protocol_of(path) not in (None, "file") and not is_tar(split_query(path)[0]):
        overrides = [f"kind={'classes' if 'split' in keys else 'shards'}", *overrides]
    config = parse_source(path, overrides)
    if not isinstance(config, CaptionShardsConfig | ClassShardsConfig):
        raise ConfigError(f"SOURCE: kind {config.kind} has no chunks; expected tars (kind shards or classes)")
    return config
