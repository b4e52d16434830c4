"""A self-contained HTML page of results: no script, no other file, no network."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from PIL import Image
from torch import Tensor

from vqclip.errors import printable

__all__ = ["Hit", "page", "thumbnail_uri"]

_SIDE = 160
"""Pixels of the longer side of a thumbnail."""
_STYLE = """
body { margin: 2rem; font: 16px/1.4 system-ui, sans-serif; color: #222; background: #fff; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 1rem; padding: 0; margin: 0; }
li { list-style: none; border: 1px solid #ddd; border-radius: 8px; padding: 8px; overflow-wrap: anywhere; }
img, .none { display: block; margin: 0 auto 6px; height: 160px; max-width: 100%; object-fit: contain; }
.none { line-height: 160px; text-align: center; color: #666; background: #eee; }
small { color: #666; }
"""


@dataclass(frozen=True)
class Hit:
    """One result."""

    name: str
    """Name of the item."""
    score: float
    """Cosine."""
    picture: Tensor | None = None
    """``(3, H, W)`` uint8, or None if it cannot be shown; the page then shows the name alone."""


def page(title: str, hits: Sequence[Hit], notes: str = "") -> str:
    """Return HTML with a grid of results, best first; images become thumbnails, all text is escaped.

    Names of files may contain bytes that are not UTF-8, and invisible characters: `printable` spells them out.
    """
    title, notes = _text(title), _text(notes)
    items = "\n".join(_item(rank, hit) for rank, hit in enumerate(hits, start=1))
    # The policy applies even if some data got past the escaping.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p><small>{notes}</small></p>
<ol>
{items}
</ol>
</body>
</html>
"""


def _text(text: str) -> str:
    return escape(printable(text, one_line=True))


def _item(rank: int, hit: Hit) -> str:
    name = _text(hit.name)
    none = '<span class="none">cannot be shown</span>'
    picture = none if hit.picture is None else f'<img src="{thumbnail_uri(hit.picture)}" alt="{name}">'
    return f"<li>{picture}{name}<br><small>{rank}. cosine {hit.score:.3f}</small></li>"


def thumbnail_uri(picture: Tensor) -> str:
    """Return an image ``(3, H, W)`` uint8, made smaller, as a ``data:`` address of a PNG."""
    image = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
    image.thumbnail((_SIDE, _SIDE))
    data = io.BytesIO()
    image.save(data, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
