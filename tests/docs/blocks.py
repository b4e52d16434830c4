"""The code blocks of a page, as a CommonMark parser finds them."""

import re
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->\s*\Z", re.DOTALL)


class Block(NamedTuple):
    """A fenced block of code."""

    language: str
    """Its tag; "" without one."""
    source: str
    line: int
    """Of the page, on which the source begins."""
    note: str
    """What an HTML comment directly above it says; "" without one."""

    @property
    def why_not_run(self) -> str | None:
        """The reason that the page gives, in ``<!-- not run: reason -->``; None for a block that is run."""
        return self.note.removeprefix("not run:").strip() if self.note.startswith("not run:") else None


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks, those in lists included.

    Raises:
        ValueError: a block is indented instead of fenced, and so has no language.
    """
    found = []
    before = None
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "code_block":
            raise ValueError(
                f"line {token.map[0] + 1}: got an indented block of code; expected a fence with a language"
            )
        if token.type == "fence":
            above = before is not None and before.type == "html_block" and before.map[1] == token.map[0]
            note = _COMMENT.search(before.content) if above else None
            language = token.info.split()[0] if token.info else ""
            found.append(Block(language, token.content, token.map[0] + 2, note.group(1) if note else ""))
        before = token
    return found
