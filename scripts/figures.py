"""Write the tables of pages that come from docs/results, between ``<!-- table: NAME -->`` and ``<!-- end -->``.

python scripts/figures.py

docs/results/pretrained.csv has a row for each run and mode of evaluation, figures in percent:

    hidden      1024: configs/pretrained.yaml as it is; 512: smaller heads and fewer steps, see docs/families.md
    bits        of an image
    bottleneck  open_steps+close_steps of train.bottleneck
    machine     CPU or H200
    i2t, t2i    image to text, text to image

A run is added by its rows: the script takes means and ranges, and says how many seeds there are where it is not 3.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results" / "pretrained.csv"
SEEDS = 3

QUANTIZERS = {
    "linf": "FSQ, 8 levels, `normalize: linf`",
    "fsq-8-levels": "FSQ, 8 levels",
    "fsq": "FSQ, 4 levels",
    "lfq": "LFQ",
    "bsq": "BSQ",
    "vq": "VQ, 256 codes",
    "residual-vq": "residual VQ, 4 stages",
}
FIGURES = (
    ("emoji", "emoji, 400 held-out pairs", "R@1", ("i2t_r1", "t2i_r1"), "0.25"),
    ("emoji", "", "R@10", ("i2t_r10", "t2i_r10"), "2.5"),
    ("eurosat", "EuroSAT test, zero-shot", "top-1", ("top1",), "10.0"),
    ("pomological", "pomological, 300 held-out pairs", "R@1", ("i2t_r1", "t2i_r1"), "0.33"),
    ("pomological", "", "R@10", ("i2t_r10", "t2i_r10"), "3.3"),
)
"""Data, its name, figure, columns of the file, chance."""


def read_cell(mode: str, figures: Iterable[str], with_range: bool = False, **run: str) -> str:
    """Return the means of figures over the seeds of a run, divided by slashes, or a dash if there is none.

    Args:
        mode: continuous or codes_only.
        figures: columns of the file.
        with_range: add smallest and largest value.
        run: column=value of the run.
    """
    with RESULTS.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == mode and run.items() <= row.items()]
    if not rows:
        return "–"
    seeds = {row["seed"] for row in rows}
    if len(seeds) != len(rows):
        raise ValueError(f"{RESULTS.name}: {run}: got {len(rows)} rows of {len(seeds)} seeds; expected one a seed")
    means, ranges = list[str](), list[str]()
    for figure in figures:
        values = [float(row[figure]) for row in rows]
        means.append(f"{statistics.mean(values):.1f}")
        ranges.append(f"{min(values):.1f}–{max(values):.1f}")
    text = " / ".join(means)
    if with_range:
        text += f" ({', '.join(ranges)})"
    return text if len(rows) == SEEDS else f"{text} ({len(rows)})"


def bits() -> str:
    """Return the table of quantizers and numbers of bits."""
    columns = (
        ("emoji", ("i2t_r1", "t2i_r1")),
        ("emoji", ("i2t_r5", "t2i_r5")),
        ("pomological", ("i2t_r5", "t2i_r5")),
        ("pomological", ("i2t_r10", "t2i_r10")),
        ("eurosat", ("top1",)),
    )
    lines = ["| quantizer | bits | emoji R@1 | emoji R@5 | pomological R@5 | pomological R@10 | EuroSAT top-1 |"]
    lines += ["|---|---:|---|---|---|---|---|"]
    first = [
        read_cell("continuous", figures, hidden="512", data=data, quantizer="identity") for data, figures in columns
    ]
    lines.append(f"| none (`identity`, 128 channels) | | {' | '.join(first)} |")
    for quantizer, name in QUANTIZERS.items():
        for number in ("96", "192", "384", "768"):
            run = {"hidden": "512", "bits": number, "quantizer": quantizer, "normalize": "none"}
            if quantizer == "linf":
                run |= {"quantizer": "fsq-8-levels", "normalize": "linf"}
            cells = [read_cell("codes_only", figures, data=data, **run) for data, figures in columns]
            if set(cells) != {"–"}:
                lines.append(f"| {name} | {number} | {' | '.join(cells)} |")
    lines.append("| chance | | 0.25 | 1.25 | 1.7 | 3.3 | 10.0 |")
    return "\n".join(lines)


def recipe() -> str:
    """Return the table of configs/pretrained.yaml as it is."""
    lines = ["| data | figure | codes only, 384 bits | the same model, continuous | `identity` | 96 bits | chance |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for data, name, figure, columns, chance in FIGURES:
        run = {"hidden": "1024", "normalize": "linf", "data": data}
        full = run | {"quantizer": "fsq-8-levels", "bits": "384", "bottleneck": ""}
        few = run | {"quantizer": "fsq-8-levels", "bits": "96", "bottleneck": "150+150"}
        cells = [read_cell(mode, columns, True, **full) for mode in ("codes_only", "continuous")]
        cells.append(read_cell("continuous", columns, **run, quantizer="identity"))
        cells.append(read_cell("codes_only", columns, **few))
        lines.append(f"| {name} | {figure} | {' | '.join(cells)} | {chance} |")
    return "\n".join(lines)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {"bits": ("families.md", bits), "recipe": ("pretrained.md", recipe)}
"""Name of a table → its page, and what makes it."""


def contents() -> dict[Path, str]:
    """Return the text of each page, with its tables."""
    pages = dict[Path, str]()
    for name, (page, make) in TABLES.items():
        path = DOCS / page
        text = pages.get(path) or path.read_text(encoding="utf-8")
        place = re.compile(rf"(?<=<!-- table: {name} -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
        if len(found := place.findall(text)) != 1:
            raise ValueError(f"{page}: got {len(found)} places of the table {name!r}, expected 1")
        pages[path] = text.replace(found[0], make())
    return pages


if __name__ == "__main__":
    for path, text in contents().items():
        path.write_text(text, encoding="utf-8")
