"""``vqclip tokenize``: its options, and ending with clear errors."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.data import CaptionShardsData, ClassShardsData, mask_credentials
from vqclip.data.sources.class_folder import SPLIT_HELP, choose_split
from vqclip.errors import ConfigError, VqclipError
from vqclip.io.json_files import problem_message
from vqclip.nn.precision import Precision
from vqclip.runlog.console import log_to_stderr, print_error, print_interrupt, unfailing_streams
from vqclip.tokenize_dataset.job import Done, Options, tokenize

__all__ = ["command_line", "main"]

_EXAMPLES = """\
examples:
  vqclip tokenize --tokenizer runs/base/tokenizer --data '/datasets/mine/{00000..00999}.tar' --out tokens/mine
  vqclip tokenize --tokenizer runs/eurosat/tokenizer --kind classes --data /datasets/cls_eurosat --split train \\
    --out tokens/eurosat
  torchrun --standalone --nproc-per-node 8 -m vqclip tokenize --tokenizer ... --data ... --out ...

The same command goes on where a killed one stopped. See docs/adr/0019 for what is written.
"""


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown, examples left as they are."""


def command_line() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog="vqclip tokenize",
        description="Turn image-text shards into token shards, one for each, with captions and sample ids.",
        epilog=_EXAMPLES,
        formatter_class=_Help,
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
        metavar="PATTERN",
        help="tars, folders of tars, patterns or URLs; the folder of the data set for --kind classes",
    )
    add("--out", required=True, type=types.path, metavar="FOLDER", help="where token shards and manifest.json go")
    add("--modality", choices=("image", "text", "both"), default="both", help="what to tokenize")
    add("--format", choices=("wds", "parquet"), default="wds", help="of the token shards: WebDataset tars or Parquet")
    add("--kind", choices=("shards", "classes"), default="shards", help="captions, or clip_benchmark's class folders")
    add("--split", help=f"of --kind classes: {SPLIT_HELP}")
    add("--captions", choices=("txt", "txt_lines", "json"), default="txt", help="where captions are, of --kind shards")
    add(
        "--json-key",
        type=types.text,
        nargs="+",
        default=["caption"],
        metavar="KEY",
        help="keys of the .json that hold captions",
    )
    add(
        "--batch-size",
        type=types.batch_size,
        default=64,
        help="samples at once; the last batch of a shard is filled up",
    )
    add("--workers", type=types.workers, default=0, help="processes that decode, for each process of the job")
    add(
        "--precision",
        choices=get_args(Precision),
        default="fp32",
        help="fp32: in the type of the weights; bf16, fp16: under autocast; fp64: everything in float64, several times "
        "slower; batch sizes, threads and machines then change ids about half a billion times less often",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add("--threads", type=types.threads, default=1, help="of each process on the CPU; start more processes instead")
    add(
        "--tolerance", type=types.share, default=0.01, help="share of the samples that may be unusable, and is left out"
    )
    return parser


@unfailing_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit status: 0 when this process's share is done, 1 for an error, 2 for options that cannot be used, 130 for
        Ctrl-C.
    """
    options = command_line().parse_args(arguments)
    log_to_stderr(mask_credentials)
    dist.stop_with_launcher()
    try:
        done = tokenize(_options(options))
    except VqclipError as error:
        return _fail(error, 2 if isinstance(error, ConfigError) else 1)
    except OSError as error:  # a disk that is full, a folder that may not be written to
        return _fail(error, 1)
    except KeyboardInterrupt:
        return print_interrupt("vqclip tokenize", "the same command goes on")
    print(_told(done, options.out), flush=True)
    return 0


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


def _data(options: argparse.Namespace) -> CaptionShardsData | ClassShardsData:
    try:
        if options.kind == "shards":
            return CaptionShardsData(
                path=tuple(options.data), captions=options.captions, json_keys=tuple(options.json_key)
            )
    except ValidationError as error:
        raise ConfigError(f"--data: {problem_message(error.errors()[0])}") from None
    if len(options.data) > 1:
        raise ConfigError(f"--data: got {len(options.data)} folders; expected one with --kind classes")
    return ClassShardsData(path=options.data[0], split=choose_split(options.data[0], options.split))


def _told(done: Done, out: Path) -> str:
    who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    rate = f", {done.samples / done.seconds:.0f} samples/s" if done.samples else ""
    text = f"{who}{done.made} shards made{rate}, {done.found} were there" + (f"\n{who}{done.cut}" if done.cut else "")
    if done.manifest is None:
        return f"{text}; {done.missing} are left to other processes, or to the same command run again"
    left_out = sum(done.manifest.bad.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in done.manifest.bad.items())
    bad = f", {left_out} left out ({kinds}; see bad_samples.jsonl)" if left_out else ""
    return f"{text}\n{out}: {done.manifest.samples:,} samples in {len(done.manifest.shards)} shards{bad}"


def _fail(error: VqclipError | OSError, status: int) -> int:
    print_error("vqclip tokenize", error, mask_credentials)
    return status
