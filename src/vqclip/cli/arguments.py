"""Types of command-line arguments, for the ``type`` of `argparse.ArgumentParser.add_argument`.

Each converts the text of one option. An error says what was got and what was expected; argparse adds the option's name.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from vqclip.config import Config
from vqclip.data import mask_credentials
from vqclip.errors import ConfigError

if TYPE_CHECKING:
    pass

__all__ = [
    "WEIGHTS_HELP",
    "Parser",
    "add_captions",
    "add_fields",
    "batch_size",
    "count",
    "not_negative",
    "path",
    "paths_and_overrides",
    "positive",
    "require_page",
    "share",
    "text",
    "threads",
    "whole",
    "workers",
]


WEIGHTS_HELP = "averaged: the moving average of the weights, where there is one (train.ema); current: those of the step"
"""Help of ``--weights``."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the option or command that was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with status 2."""
        wrong = re.match(r"unrecognized arguments: (--[\w-]+)|.*invalid choice: '(.*?)' \(choose from (.*)\)", message)
        known = re.findall(r"--[\w-]+", self.format_usage()) if wrong and wrong[1] else []
        if wrong and wrong[2]:
            known = re.findall(r"[\w.-]+", wrong[3])
        close = difflib.get_close_matches((wrong[1] or wrong[2])[:80], known, n=1) if wrong else []
        super().error(f'{message}; did you mean "{close[0]}"?' if close else message)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a type that accepts whole numbers from ``least`` to ``most``, both included."""

    def convert(given: str) -> int:
        try:
            number = int(given)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"got {given!r}, expected a whole number from {least} to {most}")
        return number

    return convert


count = whole(1, 2**63 - 1)
"""Number of items."""
batch_size = whole(1, 2**16)
"""Samples in a batch."""
workers = whole(0, 512)
"""Worker processes; the same limit as in `vqclip.data.LoaderOptions` and `vqclip.evaluation`."""
threads = whole(1, 1024)
"""Threads in a process."""


def share(given: str) -> float:
    """Convert a number that is at least 0 and less than 1."""
    return _real(given, "a share: a number from 0 to less than 1", least=0, end=1)


def positive(given: str) -> float:
    """Convert a finite number above 0."""
    return _real(given, "a number above 0", least=1e-12)


def not_negative(given: str) -> float:
    """Convert a finite number that is at least 0."""
    return _real(given, "a number from 0", least=0)


def _real(given: str, expected: str, least: float, end: float = math.inf) -> float:
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not least <= number < end:  # also false for NaN
        raise argparse.ArgumentTypeError(f"got {given!r}, expected {expected}")
    return number


def add_fields(parser: argparse.ArgumentParser, schema: type[Config], *names: str) -> None:
    """Add an option for each of some fields of a configuration, with its choices or bounds, default and docstring."""
    for name in names:
        field: Any = schema.model_fields[name]
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        bounds = {key: value for each in field.metadata for key in ("ge", "le") if (value := getattr(each, key, None))}
        number = whole(bounds.get("ge", 0), bounds.get("le", 2**63 - 1)) if field.annotation is int else share
        help_text = f"{field.description[0].lower()}{field.description[1:].rstrip('.')} (%(default)s)"
        option = f"--{name.replace('_', '-')}"
        if choices:
            parser.add_argument(option, choices=choices, default=field.default, help=help_text)
        else:
            parser.add_argument(option, type=number, default=field.default, help=help_text)


def add_captions(parser: argparse.ArgumentParser) -> None:
    """Add ``--captions`` and ``--json-key``, which say where the captions of shards and folders are."""
    help_text = "of shards and folders: txt: the .txt is the caption; txt_lines: each line is one; json: see --json-key"
    parser.add_argument("--captions", choices=("txt", "txt_lines", "json"), help=f"{help_text} (shards: txt)")
    help_text = "keys of the .json that contain captions; several may follow, or repeat the option (caption)"
    parser.add_argument("--json-key", type=text, nargs="+", action="extend", metavar="KEY", help=help_text)


_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=")


def paths_and_overrides(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the values of ``--data`` into paths and ``key=value`` of their configuration."""
    overrides = [each for each in given if _OVERRIDE.match(each)]
    return [each for each in given if each not in overrides], overrides


def text(given: str) -> str:
    """Return a text that is not empty; an unset shell variable gives an empty one."""
    if not given.strip():
        raise argparse.ArgumentTypeError(f"got {given!r}, expected a text that is not empty")
    return given


def path(given: str) -> Path:
    """Convert a path that is not empty, which would be the current folder, and no URL."""
    if "://" in text(given):
        hint = "expected a path on this machine; a run at a URL is copied to one by `vqclip copy-run URL FOLDER`"
        raise argparse.ArgumentTypeError(f"got {mask_credentials(given)!r}, {hint}")
    return Path(given)


def require_page(option: str, output: Path, *, replace: bool = True) -> None:
    """Check that a page can be written: its name ends in .html, unlike config.yaml, and its folder exists.

    Raises:
        ConfigError: it cannot be written; or there is a file and ``replace`` is False.
    """
    if output.exists() and not output.is_file() and not output.is_dir():  # /dev/stdout, a pipe
        return
    if output.suffix not in (".html", ".htm") or output.is_dir():
        raise ConfigError(f"{option}: got {output}; expected a file whose name ends in .html")
    if not output.parent.is_dir():
        raise ConfigError(f"{option}: got {output}, but there is no folder {output.parent}")
    if output.exists() and not replace:
        raise ConfigError(f"{option}: {output} exists; name another file, or add --force to replace it")
