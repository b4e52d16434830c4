"""What commands write to a terminal: log lines, and the error that ends them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from vqclip.errors import printable


class PrintableFormatter(logging.Formatter):
    """Writes log lines so that nothing in them, a path or a caption, can steer the terminal; see `printable`.

    Args:
        form: of a line, as `logging.Formatter` has it.
        mask: what to make of each line before.
    """

    def __init__(self, form: str, mask: Callable[[str], str] = str):
        super().__init__(form)
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, of a record."""
        return printable(self._mask(super().format(record)))


def log_to_stderr(mask: Callable[[str], str]) -> None:
    """Let rank 0 tell what it does, and the others only what went wrong; ``mask`` as in `PrintableFormatter`."""
    level = logging.INFO if int(os.environ.get("RANK", "0")) == 0 else logging.WARNING
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(levelname).1s %(name)s: %(message)s", mask))
    logging.basicConfig(level=level, handlers=[handler])


def _told(error: Exception) -> str:
    """What an error says; of the system's, the file first and no number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def tell_error(program: str, error: Exception, mask: Callable[[str], str]) -> None:
    """Write the error that ends a command, with its rank where there are several; ``mask`` as above."""
    who = f"{program}: rank {os.environ['RANK']}" if "RANK" in os.environ else program
    text = printable(mask(_told(error)))
    print(f"{who}: {type(error).__name__}:\n{text}" if "\n" in text else f"{who}: {text}", file=sys.stderr)


def tell_interrupt(program: str, left: str = "") -> int:
    """Write that Ctrl-C ended a command, and what is ``left`` of it; returns its exit status."""
    print(f"{program}: interrupted{left and '; '}{left}", file=sys.stderr)
    return 130
