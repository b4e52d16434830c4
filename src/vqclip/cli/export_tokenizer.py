"""``vqclip export-tokenizer``: write the tokenizer folder of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.runlog.best import read_best
from vqclip.runlog.console import print_output
from vqclip.train.export import export_checkpoint


@command("vqclip export-tokenizer")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    step = read_best(options.run) if options.best else options.step
    print_output(str(export_checkpoint(options.run, step, options.out, options.weights)))


def _parser() -> argparse.ArgumentParser:
    parser = types.Parser(
        prog="vqclip export-tokenizer", description="Write the tokenizer folder of any checkpoint of a run."
    )
    parser.add_argument("run", type=types.path, help="the run's folder, such as runs/base")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=types.whole(0, 2**63 - 1), help="step of the checkpoint (the newest)")
    which.add_argument("--best", action="store_true", help="take the best checkpoint; see train.keep_best")
    parser.add_argument("--out", type=types.path, help="folder to write (tokenizer-step-<step> in the run's folder)")
    parser.add_argument("--weights", choices=("averaged", "current"), default="averaged", help=types.WEIGHTS_HELP)
    return parser
