"""A page of the results of a search."""

from __future__ import annotations

from collections.abc import Sequence

from vqclip.errors import printable
from vqclip.report.images import thumbnail_uri
from vqclip.report.page import render
from vqclip.search.hits import Hit


def search_page(title: str, hits: Sequence[Hit], notes: str = "") -> str:
    """Return HTML with a grid of results, best first; images become thumbnails, all text is escaped.

    Names of files may contain bytes that are not UTF-8, and invisible characters: they are spelt out.
    """
    rows = [(_text(hit.name), hit.score, None if hit.picture is None else thumbnail_uri(hit.picture)) for hit in hits]
    return render("search.html", title=_text(title), notes=_text(notes), hits=rows)


def _text(text: str) -> str:
    return printable(text, one_line=True)
