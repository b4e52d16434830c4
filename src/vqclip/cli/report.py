"""Write the page of a run: figures, curves, codes on images, and a verdict. Several runs: one page that compares them.

vqclip report runs/base
vqclip report runs/small runs/large --output comparison.html

The page is one file that needs no network and runs no script. Neither the model nor the data is read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.errors import ConfigError
from vqclip.report import write_comparison, write_report
from vqclip.runlog.console import print_output

__all__ = ["main"]


@command("vqclip report")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    if options.output is not None:
        types.require_page("--output", options.output)
    try:
        path = _write(options.runs, options.output)
    except OSError as error:
        raise ConfigError(
            f"--output: {error.filename or options.output}: cannot be written ({error.strerror})"
        ) from error
    print_output(f"{path}: {path.stat().st_size:,} bytes; open it in a browser")


def _write(runs: list[Path], output: Path | None) -> Path:
    if len(runs) == 1:
        return write_report(runs[0], output)
    if output is None:
        raise ConfigError(
            f"--output: missing, expected a file for the comparison of {len(runs)} runs, such as comparison.html"
        )
    return write_comparison(runs, output)


def _parser() -> argparse.ArgumentParser:
    parser = types.Parser(
        prog="vqclip report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=types.path, nargs="+", metavar="RUN", help="folder of a run, such as runs/base")
    parser.add_argument(
        "--output", type=types.path, metavar="FILE", help="the page; for one run report.html in its folder"
    )
    return parser
