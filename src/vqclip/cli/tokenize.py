"""``vqclip tokenize``: turn image-text shards into token shards."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import get_args

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.data import SourceConfigBase, mask_credentials, parse_source
from vqclip.data.remote import protocol_of
from vqclip.errors import ConfigError
from vqclip.nn.precision import Precision
from vqclip.runlog.console import log_to_stderr
from vqclip.tokenize_dataset.job import Options, tokenize

__all__ = ["main"]

_EXAMPLES = """\
examples:
  vqclip tokenize --tokenizer runs/base/tokenizer --data '/datasets/mine/{00000..00999}.tar' --out tokens/mine
  vqclip tokenize --tokenizer runs/eurosat/tokenizer --data /datasets/cls_eurosat split=train --out tokens/eurosat
  torchrun --standalone --nproc-per-node 8 -m vqclip tokenize --tokenizer ... --data ... --out ...

Run the same command again to continue after a stop. docs/reuse.md describes the files that it writes.
"""


@command("vqclip tokenize", failure=1, after_interrupt="run the same command to continue")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; it returns when this process has done its part of the work."""
    options = _parser().parse_args(arguments)
    log_to_stderr(mask_credentials)
    dist.stop_with_launcher()
    done = tokenize(_options(options))
    who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    print(done.describe(options.out, "other processes", who), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vqclip tokenize",
        description="Turn image-text shards into token shards with captions and sample ids, one for each input shard.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--tokenizer",
        type=types.text,
        required=True,
        metavar="FOLDER",
        help="tokenizer folder, or hub name (owner/name)",
    )
    add(
        "--data",
        type=types.text,
        required=True,
        nargs="+",
        action="extend",
        metavar="PATTERN",
        help="data set: a folder, table, tar, pattern or URL; several may follow, or repeat the option; and key=value "
        "of its configuration in data.sources, such as captions=text, json_keys=[long,short] or split=train",
    )
    add("--out", required=True, type=types.path, metavar="FOLDER", help="folder of the token shards and manifest.json")
    add("--modality", choices=("image", "text", "both"), default="both", help="what to tokenize (%(default)s)")
    add(
        "--format",
        choices=("wds", "parquet"),
        default="wds",
        help="format of the token shards: WebDataset tars or Parquet (%(default)s)",
    )
    add(
        "--batch-size",
        type=types.batch_size,
        default=64,
        help="samples in a batch; the last batch of a shard is padded (%(default)s)",
    )
    add(
        "--workers",
        type=types.workers,
        default=0,
        help="worker processes that decode images, for each process of the job (%(default)s)",
    )
    add(
        "--precision",
        choices=get_args(Precision),
        default="fp32",
        help="fp32: in the type of the weights; bf16, fp16: under autocast; fp64: everything in float64, several times "
        "slower, but batch size, threads and machine change ids about half a billion times less often (%(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one (%(default)s)")
    add(
        "--threads",
        type=types.threads,
        default=1,
        help="threads of each process on the CPU; more processes are faster than more threads (%(default)s)",
    )
    add(
        "--tolerance",
        type=types.share,
        default=0.01,
        help="largest share of samples that may be unusable; they are left out (%(default)s)",
    )
    return parser


def _options(options: argparse.Namespace) -> Options:
    return Options(
        tokenizer=options.tokenizer,
        data=_data(options),
        out=options.out.expanduser().absolute(),
        modality=options.modality,
        storage=options.format,
        batch_size=options.batch_size,
        workers=options.workers,
        precision=options.precision,
        device=options.device,
        threads=options.threads,
        tolerance=options.tolerance,
    )


def _data(options: argparse.Namespace) -> SourceConfigBase:
    paths, overrides = types.paths_and_overrides(options.data)
    if not paths:
        raise ConfigError(f"--data: got {' '.join(options.data)!r}; expected a path before it")
    at_urls = protocol_of(paths[0]) not in (None, "file")
    data = parse_source(paths, overrides, kind="shards" if at_urls else None)
    data.require_no_weight("vqclip tokenize")
    return data
