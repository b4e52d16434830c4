"""Contact sheets: images with their captions on one page."""

from __future__ import annotations

import io
import tarfile
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_SIDE, _GAP, _TEXT = 144, 18, 76


def contact_sheet(split: Path, columns: int = 8, rows: int = 5) -> Image.Image:
    """Draw the first images of a caption split's first shard, with their captions, as one RGB image."""
    samples = _read(sorted(split.glob("*.tar"))[0], columns * rows)
    rows = -(-len(samples) // columns)
    size = (_GAP + columns * (_SIDE + _GAP), _GAP + rows * (_SIDE + _TEXT + _GAP))
    sheet = Image.new("RGB", size, (252, 252, 250))
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for index, (image, caption) in enumerate(samples):
        row, column = divmod(index, columns)
        x, y = _GAP + column * (_SIDE + _GAP), _GAP + row * (_SIDE + _TEXT + _GAP)
        sheet.paste(image.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), (x, y))
        pen.multiline_text(
            (x, y + _SIDE + 5),
            "\n".join(textwrap.wrap(caption, 24, break_on_hyphens=False)),
            (60, 60, 66),
            font,
            spacing=2,
        )
    return sheet


def _read(shard: Path, count: int) -> list[tuple[Image.Image, str]]:
    with tarfile.open(shard) as tar:
        members = {member.name: member for member in tar}
        found = []
        for name in [n for n in members if n.endswith(".jpg")][:count]:
            image, text = (tar.extractfile(members[name[:-4] + end]) for end in (".jpg", ".txt"))
            assert image is not None
            assert text is not None
            found.append((Image.open(io.BytesIO(image.read())).convert("RGB"), text.read().decode()))
    return found
