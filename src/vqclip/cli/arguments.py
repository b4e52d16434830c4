"""Types of command-line arguments: argparse calls them with what stands behind an option.

A refusal says what was got and what was expected; argparse puts the name of the option in front.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

__all__ = ["batch_size", "count", "path", "share", "text", "threads", "whole", "workers"]


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of whole numbers from ``least`` to ``most``; it raises ArgumentTypeError for anything else."""

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
"""So many of something."""
batch_size = whole(1, 2**16)
"""Samples at once; so many images hardly fit into any memory."""
workers = whole(0, 512)
"""Processes; as many as `vqclip.data.config` and `vqclip.evaluation` allow."""
threads = whole(1, 1024)
"""Threads of a process."""


def share(given: str) -> float:
    """A number from 0 to less than 1.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:  # nan neither
        raise argparse.ArgumentTypeError(f"got {given!r}, expected a share: a number from 0 to less than 1")
    return number


def text(given: str) -> str:
    """What is not empty, as an unset variable of the shell is.

    Raises:
        argparse.ArgumentTypeError: for an empty text.
    """
    if not given.strip():
        raise argparse.ArgumentTypeError(f"got {given!r}, expected a text that is not empty")
    return given


def path(given: str) -> Path:
    """A `text` that is a path; ``Path("")`` would be the current folder."""
    return Path(text(given))
