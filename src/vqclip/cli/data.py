"""``vqclip data``: draw the scenes data set; pack, check and show data of any kind."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vqclip.cli import data_check, data_draw, data_pack
from vqclip.cli.command import command
from vqclip.data import mask_credentials
from vqclip.runlog.console import log_to_stderr

__all__ = ["main"]

_COMMANDS = {"draw": data_draw, "pack": data_pack, "check": data_check}
"""Name → module with a docstring and EXAMPLES, `configure` for its parser, and `run`."""


@command("vqclip data", failure=1, after_interrupt="run the same command again")
def main(arguments: Sequence[str] | None = None) -> int | None:
    """Run the command; the exit status is 1 for data that cannot be used, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="vqclip data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in _COMMANDS.items():
        text = (module.__doc__ or "").partition(": ")[2]
        made = commands.add_parser(
            name,
            help=text.splitlines()[0].removesuffix("."),
            description=text[0].upper() + text[1:],
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(made)
    options = parser.parse_args(arguments)
    log_to_stderr(mask_credentials)
    status: int | None = _COMMANDS[options.command].run(options)
    return status
