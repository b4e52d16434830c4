"""The command line ``vqclip``, also ``python -m vqclip``.

A command has a row in `COMMANDS` and a class in a module of this package, a `vqclip.cli.options.Command`, which is
imported when the command is given: help and refusals wait for no torch. On several processes:
``torchrun ... -m vqclip tokenize ...``.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vqclip import __version__
from vqclip.errors import ConfigError, VqclipError, printable
from vqclip.runlog.console import (
    log_to_stderr,
    print_error,
    print_interrupt,
    print_output,
    unfailing_streams,
)

if TYPE_CHECKING:
    from vqclip.cli.options import Command

COMMANDS = {
    "train": ("train.Train", "train image and text tokenizers together"),
    "plan": ("plan.Plan", "say what a run needs before it starts: memory by part, bytes sent and read"),
    "evaluate": ("evaluate.Evaluate", "zero-shot, retrieval and probes: continuous, quantized and from codes"),
    "evaluate zero-shot": ("evaluate.EvaluateTask", "classify labelled images by prompts"),
    "evaluate retrieval": ("evaluate.EvaluateTask", "find the captions of images, and images by captions"),
    "evaluate linear-probe": ("evaluate.EvaluateTask", "fit logistic regression to the codes of labelled images"),
    "evaluate knn": ("evaluate.EvaluateTask", "classify images by the nearest codes of labelled ones"),
    "evaluate mteb": ("evaluate.EvaluateMteb", "evaluate models with mteb, on its tasks"),
    "tokenize": ("export.Tokenize", "turn image-text shards into token shards"),
    "search": ("", "index images by their codes, and search them by words"),
    "search build": ("pages.Build", "make an index of images or captions"),
    "search query": ("pages.Query", "search an index by words or an image"),
    "data": ("", "pack, check and show data of any kind; draw the scenes data set"),
    "data draw": ("data.Draw", "draw the scenes data set"),
    "data pack": ("data.Pack", "write data of any kind as WebDataset shards"),
    "data check": ("data.Check", "read every sample, and report what is bad, duplicated or unusual"),
    "data index": ("data.Index", "make the index of tars that training needs"),
    "data features": ("data.Features", "store the features of a run's frozen towers before it starts"),
    "data show": ("data.Show", "make a contact sheet of what the model sees"),
    "export": ("export.Export", "write a tokenizer as ONNX files, and compare their ids with its own"),
    "reconstruct": ("pages.Reconstruct", "write what the ids of images decode to: image files, or a page"),
    "report": ("pages.Report", "write the page of a run, or one that compares several"),
    "demo": ("pages.Demo", "try a tokenizer in the browser: codes, classes, nearest images"),
    "export-tokenizer": ("export.ExportTokenizer", "write the tokenizer folder of any checkpoint of a run"),
    "copy-run": ("export.CopyRun", "copy a run from a URL to a folder, which the other commands read"),
    "clip-benchmark": ("", "evaluate models with clip_benchmark, on its data sets"),
    "clip-benchmark eval": ("clip_benchmark.Eval", "evaluate models on data sets"),
    "clip-benchmark build": ("clip_benchmark.Build", "make one table of many results"),
}  # fmt: skip
"""Words of each command → its module and class (empty for the title of a group), and its description in one line; in
the order of the help. Several that begin with the same word are a group."""
_FIRST = 10
"""Commands before those that few need, in the help."""


def load_command(name: str) -> type[Command]:
    """Import the class of a command, such as ``data pack``."""
    module, _, attribute = COMMANDS[name][0].partition(".")
    found: type[Command] = getattr(importlib.import_module(f"vqclip.cli.{module}"), attribute)
    return found


@unfailing_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0 or what the command returns; 2 for an unknown command or a `ConfigError`; 130 for Ctrl-C;
        that of the command for other errors. Credentials in messages are masked.
    """
    name, rest = "", [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    while rest and rest[0] in _words(name):
        name = f"{name} {rest.pop(0)}".lstrip()
    program, failure, after_interrupt = f"vqclip {name.partition(' ')[0]}".rstrip(), 1, ""
    try:
        from vqclip.data.remote.urls import mask_credentials

        if not name and rest == ["--version"]:
            print_output(__version__)
            return 0
        is_command, words = bool(COMMANDS.get(name, ("",))[0]), _words(name)
        asks_for_help = not rest or rest[0] in ("-h", "--help")
        close = difflib.get_close_matches(rest[0], words, n=1) if rest else []
        if not asks_for_help and (not is_command or (close and not Path(rest[0]).exists())):
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise ConfigError(f"got {printable(rest[0], one_line=True)!r}; expected one of {', '.join(words)}{hint}")
        if not is_command:
            print_output(_help(name))
            return 0 if rest else 2
        from vqclip.cli.options import read_options  # needs pydantic, which the list of commands does not

        command = load_command(name)
        failure, after_interrupt = command.failure, command.after_interrupt
        options = read_options(name, command, rest, _list_of(name))
        log_to_stderr(mask_credentials)
        return options.run() or 0
    except KeyboardInterrupt:
        return print_interrupt(program, after_interrupt)
    except (VqclipError, OSError) as error:  # an OSError: a full disk, a folder without write permission
        print_error(program, error, mask_credentials)
        return 2 if isinstance(error, ConfigError) else failure


def _words(name: str) -> list[str]:
    """Return the words that may follow the name of a command; all first words for an empty name."""
    return [word for above, _, word in (f" {each}".rpartition(" ") for each in COMMANDS) if above.strip() == name]


def _list_of(name: str) -> str:
    """Return a line for each word that may follow."""
    names = {word: COMMANDS[f"{name} {word}".strip()][1] for word in _words(name)}
    width = max(map(len, names), default=0)
    return "\n".join(f"  {name:<{width}}  {summary}" for name, summary in names.items())


def _help(name: str) -> str:
    program = f"vqclip {name}".rstrip()
    ending = f"{program} COMMAND --help lists the options of a command."
    lines = _list_of(name).splitlines()
    more = ["", *lines[_FIRST:]] if lines[_FIRST:] else []
    return "\n".join([f"usage: {program} COMMAND ...", "", *lines[:_FIRST], *more, "", ending])
