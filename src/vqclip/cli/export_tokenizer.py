"""``vqclip export-tokenizer``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vqclip.cli import arguments as types
from vqclip.data import mask_credentials
from vqclip.errors import VqclipError
from vqclip.runlog.best import read_best
from vqclip.runlog.console import print_error, print_interrupt, print_output
from vqclip.train.export import export_checkpoint


def command_line() -> argparse.ArgumentParser:
    """The options of ``vqclip export-tokenizer``."""
    parser = argparse.ArgumentParser(
        prog="vqclip export-tokenizer", description="Write the tokenizer folder of any checkpoint of a run."
    )
    parser.add_argument("run", type=types.path, help="the run's folder, such as runs/base")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=types.whole(0, 2**63 - 1), help="of the checkpoint; the newest by default")
    which.add_argument("--best", action="store_true", help="the checkpoint that train.keep_best names")
    parser.add_argument("--out", type=types.path, help="folder to write; tokenizer-step-<step> in the run's by default")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 2 for anything that the user can mend, 130 for Ctrl-C.
    """
    options = command_line().parse_args(arguments)
    try:
        step = read_best(options.run) if options.best else options.step
        print_output(str(export_checkpoint(options.run, step, options.out)))
    except (VqclipError, OSError) as error:
        print_error("vqclip export-tokenizer", error, mask_credentials)
        return 2
    except KeyboardInterrupt:
        return print_interrupt("vqclip export-tokenizer")
    return 0
