"""Texts of unknown origin, made fit for a page."""

from __future__ import annotations

from vqclip.errors import printable

MAX_TEXT = 2000
"""Characters of a text; the rest is cut."""


def plain(text: object, most: int = MAX_TEXT) -> str:
    """Return a text with invisible characters made visible, and cut if it is long. It may still contain markup."""
    text = str(text)
    return printable(text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)")
