"""The command line ``vqclip``, also ``python -m vqclip``: a command is a module with a ``main(arguments)``.

Nothing heavy is imported before a command is chosen. Several processes: ``torchrun ... -m vqclip tokenize ...``.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from vqclip import __version__
from vqclip.errors import printable
from vqclip.runlog.console import print_error, print_interrupt, print_output, unfailing_streams

__all__ = ["COMMANDS", "main"]


class Command(NamedTuple):
    """A command, by the module that runs it."""

    module: str
    """Its ``main`` takes the arguments behind the command's name and returns the exit status."""
    summary: str
    """What it does, in a line."""


COMMANDS = {
    "train": Command("vqclip.cli.train", "train image and text tokenizers together"),
    "tokenize": Command("vqclip.cli.tokenize", "turn image-text shards into token shards"),
    "export": Command("vqclip.cli.export", "write a tokenizer as ONNX files, and compare their ids with its own"),
    "export-tokenizer": Command("vqclip.cli.export_tokenizer", "write the tokenizer folder of any checkpoint of a run"),
    "data": Command("vqclip.cli.data", "draw the data set of coloured shapes, and look at it"),
    "search": Command("vqclip.cli.search", "index pictures by their codes, and search them by words"),
}


@unfailing_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        Its exit status; 2 where there is no such command, 130 for Ctrl-C.
    """
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    try:
        if name in ("-h", "--help"):
            print_output(_help())
            return 0
        if name == "--version":
            print_output(__version__)
            return 0
    except OSError as error:
        print_error("vqclip", error, str)
        return 1
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        shown = printable(name, one_line=True)
        print(f"vqclip: got {shown!r}; expected one of {', '.join(COMMANDS)}{hint}", file=sys.stderr)
        return 2
    try:
        status: int = importlib.import_module(COMMANDS[name].module).main(rest)
    except KeyboardInterrupt:  # while it was imported; each command takes care of the rest
        return print_interrupt(f"vqclip {name}")
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return "usage: vqclip COMMAND ...\n\n" + "\n".join(lines) + "\n\nvqclip COMMAND --help says what a command takes."
