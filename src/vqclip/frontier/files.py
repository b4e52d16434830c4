"""Files of accuracy against bits: JSON, CSV, SVG and PNG."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

from vqclip.data import mask_credentials
from vqclip.frontier.plot import draw, require_matplotlib
from vqclip.frontier.points import Frontier, Point
from vqclip.io.atomic import write_text


def save(frontier: Frontier, folder: str | Path) -> list[Path]:
    """Write ``frontier.json``, ``.csv``, ``.svg`` and ``.png`` to a folder, which is made if necessary.

    Returns:
        The four files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    files = [Path(folder) / f"frontier.{ending}" for ending in ("json", "csv", "svg", "png")]
    Path(folder).mkdir(parents=True, exist_ok=True)
    body = mask_credentials(dataclasses.asdict(frontier))
    write_text(files[0], json.dumps(body, indent=2, allow_nan=False) + "\n")
    write_text(files[1], mask_credentials(_csv(frontier)))
    for file in files[2:]:
        draw(frontier, file)
    return files


def _csv(frontier: Frontier) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in dataclasses.fields(Point)])
    for point in frontier.points:
        row = vars(point) | {"rates": " ".join(map(str, point.rates))}
        writer.writerow(["" if value is None else value for value in row.values()])
    return text.getvalue()
