"""The command line ``vqclip``, also ``python -m vqclip``.

A command has a row in `COMMANDS`, a function in `vqclip.cli.options` that adds its arguments, and a function that does
it, whose module is imported when the arguments have been read: help and refusals wait for no torch. On several
processes: ``torchrun ... -m vqclip tokenize ...``.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vqclip import __version__
from vqclip.errors import ConfigError, VqclipError, printable
from vqclip.runlog.console import log_to_stderr, print_error, print_interrupt, print_output, unfailing_streams

__all__ = ["COMMANDS", "main"]


class Command(NamedTuple):
    """A command of one or two words; several that begin with the same word are a group."""

    function: str
    """Module in `vqclip.cli` and its function, which takes the options and returns the exit status (None: 0); empty for
    the title of a group."""
    summary: str
    """Description in one line."""
    failure: int = 2
    """Exit status of errors other than `ConfigError`, whose status is 2."""
    after_interrupt: str = ""
    """Remark on the state that Ctrl-C leaves behind."""
    logs: bool = False
    """Whether the log is shown on stderr."""
    takes_others: bool = False
    """Whether the function gets options that the parser does not know, as ``options.others``."""


_TRAIN: Any = {
    "failure": 1,
    "after_interrupt": "what is not in a checkpoint is not kept",
    "logs": True,
    "takes_others": True,
}
_TOKENIZE: Any = {"failure": 1, "after_interrupt": "run the same command to continue", "logs": True}
_DATA: Any = {"failure": 1, "after_interrupt": "run the same command again", "logs": True}
COMMANDS = {
    "train": Command("train.run", "train image and text tokenizers together", **_TRAIN),
    "plan": Command("plan.run", "say what a training step needs before it runs: memory by part, bytes sent", failure=1),
    "evaluate": Command("evaluate.run", "zero-shot, retrieval and probes: continuous, quantized and from codes"),
    "evaluate zero-shot": Command("evaluate.run", "classify labelled images by prompts"),
    "evaluate retrieval": Command("evaluate.run", "find the captions of images, and images by captions"),
    "evaluate linear-probe": Command("evaluate.run", "fit logistic regression to the codes of labelled images"),
    "evaluate knn": Command("evaluate.run", "classify images by the nearest codes of labelled ones"),
    "evaluate pixels": Command(
        "evaluate.run", "decode stored ids, and compare the images with the originals, WebP and JPEG"
    ),
    "tokenize": Command("tokenize.run", "turn image-text shards into token shards", **_TOKENIZE),
    "search": Command("", "index images by their codes, and search them by words"),
    "search build": Command("search.run", "make an index of images or captions"),
    "search query": Command("search.run", "search an index by words or an image"),
    "data": Command("", "pack, check and show data of any kind; draw the scenes data set"),
    "data draw": Command("data.draw", "draw the scenes data set", **_DATA),
    "data pack": Command("data.pack_source", "write data of any kind as WebDataset shards", **_DATA),
    "data check": Command("data.check", "read every sample, and report what is bad, duplicated or unusual", **_DATA),
    "data index": Command("data.index", "make the index of tars that training needs", **_DATA),
    "data features": Command("data.features", "store the features of a run's frozen towers before it starts", **_DATA),
    "data plan": Command("data_plan.run", "say what the data of a run need before it starts", **_DATA),
    "data show": Command("data.show", "make a contact sheet of what the model sees", **_DATA),
    "export": Command("export.run", "write a tokenizer as ONNX files, and compare their ids with its own"),
    "reconstruct": Command("reconstruct.run", "write a page of images beside what their ids decode to"),
    "report": Command("runs.report", "write the page of a run, or one that compares several"),
    "demo": Command("demo.run", "try a tokenizer in the browser: codes, classes, nearest images"),
    "export-tokenizer": Command("runs.export_tokenizer", "write the tokenizer folder of any checkpoint of a run"),
    "copy-run": Command("runs.copy", "copy a run from a URL to a folder, which the other commands read"),
    "clip-benchmark": Command("", "evaluate models with clip_benchmark, on its data sets"),
    "clip-benchmark eval": Command("clip_benchmark.run", "evaluate models on data sets", takes_others=True),
    "clip-benchmark build": Command("clip_benchmark.run", "make one table of many results", takes_others=True),
}
"""Words of each command; in the order of the help."""
_FIRST = 10
"""Commands before those that few need, in the help."""


@unfailing_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0 or what the command returns; 2 for an unknown command or a `ConfigError`; 130 for Ctrl-C;
        that of the command for other errors. Credentials in messages are masked.
    """
    first, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    program = "vqclip" if first not in COMMANDS else f"vqclip {first}"
    failure, after_interrupt = 1, ""
    try:
        if first in ("-h", "--help"):
            print_output(_help(""))
            return 0
        if first == "--version":
            print_output(__version__)
            return 0
        if first not in COMMANDS:
            return _refuse("vqclip", first, _words(""))
        name = f"{first} {rest[0]}" if rest else first
        if rest and name in COMMANDS:
            del rest[0]
        elif not COMMANDS[first].function:
            if rest and rest[0] not in ("-h", "--help"):
                return _refuse(program, rest[0], _words(first))
            print_output(_help(first))
            return 0 if rest else 2
        elif rest and not Path(rest[0]).exists() and difflib.get_close_matches(rest[0], _words(first), n=1):
            return _refuse(program, rest[0], _words(first))
        else:
            name = first
        command = COMMANDS[name]
        failure, after_interrupt = command.failure, command.after_interrupt
        options = _parse(name, command, rest)
        module, _, function = command.function.partition(".")
        run: Callable[..., int | None] = getattr(importlib.import_module(f"vqclip.cli.{module}"), function)
        if command.logs:
            from vqclip.data.remote.urls import mask_credentials

            log_to_stderr(mask_credentials)
        return run(options) or 0
    except KeyboardInterrupt:
        return print_interrupt(program, after_interrupt)
    except (VqclipError, OSError) as error:  # an OSError: a full disk, a folder without write permission
        from vqclip.data.remote.urls import mask_credentials

        print_error(program, error, mask_credentials)
        return 2 if isinstance(error, ConfigError) else failure


def _parse(name: str, command: Command, arguments: list[str]) -> argparse.Namespace:
    """Read the arguments of a command; key=value may follow options.

    Raises:
        SystemExit: with status 0 for --help, 2 for arguments that cannot be read; help or mistake have been printed.
    """
    from vqclip.cli.options import make_parser  # argparse's types need pydantic, which the list of commands does not

    parser = make_parser(name, command.summary, _list_of(name))
    if command.takes_others:
        options, others = parser.parse_known_intermixed_args(arguments)
        options.others = others
    else:
        options = parser.parse_intermixed_args(arguments)
    options.task, options.given_words = name.partition(" ")[2], arguments
    return options


def _words(first: str) -> list[str]:
    """Return the words that may follow ``first``; all first words for an empty text."""
    if not first:
        return [name for name in COMMANDS if " " not in name]
    return [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{first} ")]


def _list_of(first: str) -> str:
    """Return a line for each word that may follow."""
    names = {word: COMMANDS[f"{first} {word}".strip()].summary for word in _words(first)}
    width = max(map(len, names), default=0)
    return "\n".join(f"  {name:<{width}}  {summary}" for name, summary in names.items())


def _help(first: str) -> str:
    program = f"vqclip {first}".rstrip()
    ending = f"{program} COMMAND --help lists the options of a command."
    lines = _list_of(first).splitlines()
    more = ["", *lines[_FIRST:]] if lines[_FIRST:] else []
    return "\n".join([f"usage: {program} COMMAND ...", "", *lines[:_FIRST], *more, "", ending])


def _refuse(program: str, given: str, known: Sequence[str]) -> int:
    near = difflib.get_close_matches(given, known, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    shown = printable(given, one_line=True)
    print(f"{program}: got {shown!r}; expected one of {', '.join(known)}{hint}", file=sys.stderr)
    return 2
