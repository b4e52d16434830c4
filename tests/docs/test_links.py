"""Links between the pages of the repository lead to files that exist."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from tests.docs.blocks import PAGES, ROOT

LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def links_of(text: str) -> list[str]:
    """Where the links and images of a page lead, as they are written; those of HTML last."""
    blocks = MarkdownIt().parse(text)
    inline = [token for block in blocks for token in block.children or ()]
    html = "".join(token.content for token in [*blocks, *inline] if token.type in ("html_block", "html_inline"))
    targets = [str(target) for token in inline if (target := token.attrs.get("href") or token.attrs.get("src"))]
    return targets + re.findall(r'\b(?:href|src|srcset)="([^" ]+)"', html)


def test_links_are_found():
    text = "[a](b/c.md#d), [e][f] and ![g](h.png)\n\n- `[no](link)` <https://host/>\n\n[f]: ../i.md\n"
    text += '<picture>\n<source srcset="j.png">\n</picture>\n\nand <img src="k.png">\n'
    assert links_of(text) == ["b/c.md#d", "../i.md", "h.png", "https://host/", "j.png", "k.png"]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_to_files(page):
    parts = [urlsplit(link) for link in links_of(page.read_text(encoding="utf-8"))]
    paths = [unquote(part.path) for part in parts if not part.scheme and not part.netloc and part.path]
    assert [path for path in paths if not (page.parent / path).exists()] == []
