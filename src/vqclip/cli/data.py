"""``vqclip data``: draw the scenes data set; pack, check and show data of any kind."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vqclip.cli.arguments import Parser
from vqclip.cli.command import command
from vqclip.data import mask_credentials
from vqclip.runlog.console import log_to_stderr

__all__ = ["main"]

COMMANDS = {
    "draw": "draw the scenes data set",
    "pack": "write data of any kind as WebDataset shards",
    "check": "read every sample, and report what is bad, duplicated or unusual",
    "index": "make the index of tars that training needs",
    "features": "store the features of a run's frozen towers before it starts",
    "plan": "say what a run needs before it starts",
    "show": "make a contact sheet of what the model sees",
}
"""Name → description in one line; the module ``vqclip.cli.data_<name>`` has `configure` for its parser, and `run`."""


@command("vqclip data", failure=1, after_interrupt="run the same command again")
def main(arguments: Sequence[str] | None = None) -> int | None:
    """Run the command; the exit status is 1 for data that cannot be used, 2 for wrong arguments."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    parser = Parser(prog="vqclip data", description="Draw, pack, check, index, plan and show data.")
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {
        name: commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, summary in COMMANDS.items()
    }
    if not given or given[0] not in parsers:
        parser.parse_args(given)  # shows the help or the mistake, and exits
    chosen = parsers[given[0]]
    module = importlib.import_module(f"vqclip.cli.data_{given[0]}")  # no other command's module is imported
    chosen.description, chosen.epilog = str(module.__doc__).partition(": ")[2], module.EXAMPLES
    module.configure(chosen)
    options = chosen.parse_intermixed_args(given[1:])  # key=value may follow options
    log_to_stderr(mask_credentials)
    status: int | None = module.run(options)
    return status
