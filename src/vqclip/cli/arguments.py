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
from typing import NoReturn

from vqclip.data.on_ray import RayOptions
from vqclip.data.remote.urls import mask_credentials
from vqclip.errors import ConfigError

__all__ = [
    "Parser",
    "add_engine",
    "batch_size",
    "context_length",
    "count",
    "folder_name",
    "large_number",
    "not_negative",
    "path",
    "paths_and_overrides",
    "positive",
    "ray_options",
    "require_page",
    "share",
    "text",
    "threads",
    "whole",
    "workers",
]


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the option or command that was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with status 2."""
        wrong = re.match(r"unrecognized arguments: (--[\w-]+)|.*invalid choice: '(.*?)' \(choose from (.*)\)", message)
        known = re.findall(r"--[\w-]+", self.format_usage()) if wrong and wrong[1] else []
        if wrong and wrong[2]:
            known = re.findall(r"[\w.-]+", wrong[3])
        close = difflib.get_close_matches((wrong[1] or wrong[2])[:80], known, n=1) if wrong else []
        hint = f'; did you mean "{close[0]}"?' if close else ""
        if wrong and wrong[1] and not close and "key=value" in self.format_help():
            hint = f"; keys of the configuration are written {wrong[1].lstrip('-').replace('-', '_')}=..."
        super().error(message + hint)


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
context_length = whole(3, 4096)
"""Tokens of a caption; the same limit as in `vqclip.towers.vocabulary`."""


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


_OVERRIDE = re.compile(r"[a-z_][a-z0-9_]*(\[\d+\])?(\.[a-z_][a-z0-9_]*(\[\d+\])?)*=")


def paths_and_overrides(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide models, or the values of ``--data``, into paths and ``key=value`` of their configuration."""
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


def large_number(given: str) -> int:
    """Convert a whole number of at least 1, also written as 1.3e9."""
    try:
        number = float(given)
        assert number == int(number) >= 1
    except (ValueError, OverflowError, AssertionError):
        raise argparse.ArgumentTypeError(f"got {given!r}, expected a whole number from 1, such as 1.3e9") from None
    return int(number)


def folder_name(given: str) -> str:
    """Return the name of one folder."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", given) is None:
        raise argparse.ArgumentTypeError(f"got {given!r}, expected the name of a folder, such as train")
    return given


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add ``--engine`` and the options of Ray."""
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: this process, or those of torchrun. ray: workers of Ray, on this machine or on a cluster whose "
        "machines share the output folder (local)",
    )
    group = parser.add_argument_group("with --engine ray")
    for name, field in RayOptions.model_fields.items():
        kind = {"address": text, "actors": whole(1, 2**20), "gpus": _gpus}.get(name, _cpus)
        help_text = str(field.description).replace("%", "%%").rstrip(".")
        group.add_argument(f"--ray-{name}", type=kind, metavar="N" if name != "address" else "ADDRESS", help=help_text)


def ray_options(options: argparse.Namespace) -> RayOptions | None:
    """Return the options of Ray; None for the local engine.

    Raises:
        ConfigError: options of Ray for the local engine.
    """
    given = {name: getattr(options, f"ray_{name}") for name in RayOptions.model_fields}
    if options.engine == "ray":
        return RayOptions(**given)
    if names := [f"--ray-{name}" for name, value in given.items() if value is not None]:
        raise ConfigError(f"{', '.join(names)}: got the local engine; expected --engine ray with it")
    return None


def _cpus(given: str) -> float:
    number = _gpus(given)
    if number == 0:
        raise argparse.ArgumentTypeError("got 0, expected a positive number")
    return number


def _gpus(given: str) -> float:
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1024 or (number > 1 and number != int(number)):
        raise argparse.ArgumentTypeError(f"got {given!r}, expected a whole number up to 1024, or one from 0 to 1")
    return number
