"""Types of command-line arguments."""

from __future__ import annotations

import argparse

__all__ = ["positive"]


def positive(text: str) -> int:
    """A whole number from 1, as ``type`` of an argparse option.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1")
    return number
