"""``vqclip tokenize``: turn image-text shards into token shards."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.cli.engine import add_engine, ray_options
from vqclip.data import mask_credentials, parse_source
from vqclip.data.remote import protocol_of
from vqclip.errors import ConfigError
from vqclip.runlog.console import log_to_stderr
from vqclip.tokenize_dataset.job import Options, tokenize, tokenize_on_ray

__all__ = ["main"]

_FIELDS = ("modality", "batch_size", "workers", "precision", "device", "threads", "tolerance")
_EXAMPLES = """\
examples:
  vqclip tokenize --tokenizer runs/base/tokenizer --data '/datasets/mine/{00000..00999}.tar' --out tokens/mine
  vqclip tokenize --tokenizer runs/eurosat/tokenizer --data /datasets/cls_eurosat split=train --out tokens/eurosat
  torchrun --standalone --nproc-per-node 8 -m vqclip tokenize --tokenizer ... --data ... --out ...
  vqclip tokenize --engine ray --ray-address auto --tokenizer ... --data 's3://bucket/{00000..09999}.tar' --out ...

Run the same command again to continue after a stop. docs/reuse.md describes the files that it writes.
"""


@command("vqclip tokenize", failure=1, after_interrupt="run the same command to continue")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; it returns when this process has done its part of the work."""
    options = _parser().parse_args(arguments)
    log_to_stderr(mask_credentials)
    dist.stop_with_launcher()
    ray = ray_options(options)
    paths, overrides = types.paths_and_overrides(options.data)
    if not paths:
        raise ConfigError(f"--data: got {' '.join(options.data)!r}; expected a path before it")
    at_urls = protocol_of(paths[0]) not in (None, "file")
    data = parse_source(paths, overrides, kind="shards" if at_urls else None)
    data.require_no_weight("vqclip tokenize")
    fields = {name: getattr(options, name) for name in ("tokenizer", *_FIELDS)}
    job = Options(data=data, out=options.out.expanduser().absolute(), **fields)
    done = tokenize(job) if ray is None else tokenize_on_ray(job, ray)
    who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    print(done.describe(options.out, who), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = types.Parser(
        prog="vqclip tokenize",
        description="Turn image-text shards into token shards with captions and sample ids, one for each input shard.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    help_text = "tokenizer folder, or hub name (owner/name)"
    add("--tokenizer", type=types.text, required=True, metavar="FOLDER", help=help_text)
    help_text = (
        "data set: a folder, table, tar, pattern or URL; several may follow, or repeat the option; and key=value of "
        "its configuration in data.sources, such as captions=text, json_keys=[long,short] or split=train"
    )
    add("--data", type=types.text, required=True, nargs="+", action="extend", metavar="PATTERN", help=help_text)
    add("--out", required=True, type=types.path, metavar="FOLDER", help="folder of the token shards and manifest.json")
    types.add_fields(parser, Options, *_FIELDS)
    add_engine(parser)
    return parser
