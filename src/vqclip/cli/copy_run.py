"""``vqclip copy-run``: copy a run from a URL to a folder, which the other commands read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.runlog.console import print_output
from vqclip.train.run_store import copy_run


@command("vqclip copy-run")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    print_output(str(copy_run(options.url, options.folder)))


def _parser() -> argparse.ArgumentParser:
    parser = types.Parser(
        prog="vqclip copy-run",
        description="Copy a run whose run.folder is a URL: its files, and its newest checkpoint, verified.",
    )
    parser.add_argument("url", help="of the run, such as s3://bucket/runs/base")
    parser.add_argument("folder", type=types.path, help="folder to write, such as runs/base")
    return parser
