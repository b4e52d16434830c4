"""Log lines on a terminal."""

from __future__ import annotations

import logging

from vqclip.errors import printable


class PrintableFormatter(logging.Formatter):
    """Writes log lines so that nothing in them, a path or a caption, can steer the terminal; see `printable`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, of a record."""
        return printable(super().format(record))
