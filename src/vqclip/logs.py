"""Log lines on a terminal."""

from __future__ import annotations

import logging
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
