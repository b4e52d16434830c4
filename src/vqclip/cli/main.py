"""The command line ``vqclip``, also ``python -m vqclip``: each command is a module with a ``main(arguments)``.

Only the chosen command's module is imported. On several processes: ``torchrun ... -m vqclip tokenize ...``.
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
    """Module and description of a command."""

    module: str
    """Module whose ``main`` takes the arguments after the command's name and returns the exit status."""
    summary: str
    """Description in one line."""


COMMANDS = {
    "train": Command("vqclip.cli.train", "train image and text tokenizers together"),
    "plan": Command("vqclip.cli.plan", "say what a training step needs before it runs: memory by part, bytes sent"),
    "evaluate": Command("vqclip.cli.evaluate", "zero-shot, retrieval and probes: continuous, quantized and from codes"),
    "tokenize": Command("vqclip.cli.tokenize", "turn image-text shards into token shards"),
    "export": Command("vqclip.cli.export", "write a tokenizer as ONNX files, and compare their ids with its own"),
    "export-tokenizer": Command("vqclip.cli.export_tokenizer", "write the tokenizer folder of any checkpoint of a run"),
    "reconstruct": Command("vqclip.cli.reconstruct", "write a page of images beside what their ids decode to"),
    "report": Command("vqclip.cli.report", "write the page of a run, or one that compares several"),
    "copy-run": Command("vqclip.cli.copy_run", "copy a run from a URL to a folder, which the other commands read"),
    "clip-benchmark": Command("vqclip.cli.clip_benchmark", "evaluate models with clip_benchmark, on its data sets"),
    "data": Command("vqclip.cli.data", "pack, check and show data of any kind; draw the scenes data set"),
    "search": Command("vqclip.cli.search", "index images by their codes, and search them by words"),
    "demo": Command("vqclip.cli.demo", "try a tokenizer in the browser: codes, classes, nearest images"),
}


@unfailing_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status of the command; 2 for an unknown command, 130 for Ctrl-C.
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
    except KeyboardInterrupt:  # during the import; after it the command handles Ctrl-C
        return print_interrupt(f"vqclip {name}")
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: vqclip COMMAND ...\n\n" + "\n".join(lines) + "\n\nvqclip COMMAND --help lists the options of a command."
    )
