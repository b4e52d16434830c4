"""Draw the two images of the README from a trained run, each for light and for dark pages.

Writes four files of PNG, after about 15 seconds on two CPU cores.

    make train
    make readme-images        # python scripts/readme_images.py runs/base --out docs/images

`idea`: an image and its caption, their codes and ids, and the joint space. `result`: figures of the run's final table,
and images that captions find. All codes, ids and embeddings are those of the run, on the split `val` of the drawn data
set, whose combinations of colour and shape no training image shows. The same run gives the same bytes. Each file
contains the figures as text (`tests/docs/test_docs.py` compares the README's table with them).

    python scripts/readme_images.py runs/base --pixels runs/pixels/tokenizer kind=scenes split=val

also draws `reconstructed`: images of a data set, spread evenly over it, above what their ids decode to; --pixels may be
repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torch.nn.functional import pad

import vqclip
from vqclip.config import load_config
from vqclip.data import EvalSet, ScenesSourceConfig, parse_source
from vqclip.errors import ConfigError, VqclipError
from vqclip.evaluation.reconstructions import pixel_transform
from vqclip.pixels.metrics import compare_images, mean_figures, to_uint8
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.train import TrainConfig

SHOWN = 46
"""Sample of `val` in `idea`."""
PLOTTED = 60
"""Pairs whose embeddings are drawn in `idea`."""
QUERIES = (46, 119, 20)
"""Samples of `val` whose captions are searched in `result`; the tokenizer of `make train` misses the last one."""
FOUND = 4
"""Images of a query."""
DECODED = 7
"""Images of a data set in `reconstructed`."""
WIDTH = 800
PIXELS_PER_UNIT = 1.5
_COLOURS = 200
"""Colours of an image, without that of the page."""
MONOSPACE = {"family": "monospace", "fontsize": 13}


class Theme(NamedTuple):
    """Colours."""

    page: str
    text: str
    muted: str
    box: str
    image: str
    caption: str
    right: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#59636e", "#f6f8fa", "#0969da", "#bc4c00", "#1a7f37"),
    "dark": Theme("#0d1117", "#f0f6fc", "#9198a1", "#151b23", "#4493f8", "#f0883e", "#3fb950"),
}


class Pairs(NamedTuple):
    """Images and captions of `val`, with their ids and the embeddings of these."""

    pixels: Tensor
    """``(B, 3, H, W)`` uint8."""
    captions: list[str]
    """B captions."""
    image_ids: Tensor
    """``(B, N, C)`` int64."""
    text_ids: Tensor
    """``(B, N, C)`` int64, -1 at padding."""
    image: Tensor
    """``(B, E)``."""
    text: Tensor
    """``(B, E)``."""


class Decoded(NamedTuple):
    """Images of a data set, and what their ids decode to."""

    originals: Tensor
    """``(B, 3, S, S)`` uint8."""
    decoded: Tensor
    """``(B, 3, S, S)`` uint8."""
    bits: float
    """Bits an image."""
    psnr: float
    """Mean PSNR of these images, in dB."""


class Row(NamedTuple):
    """Figure of one evaluation, in percent."""

    name: str
    continuous: float
    codes_only: float
    chance: float


@torch.no_grad()
def encode(image: ImageTokenizer, text: TextTokenizer) -> Pairs:
    """Encode the split `val`."""
    batches = list(EvalSet(ScenesSourceConfig(split="val").build(), image.transform, batch_size=250))
    pixels = torch.cat([batch.images for batch in batches])
    captions = [captions[0] for batch in batches for captions in batch.captions]
    ids = torch.cat([image.encode(batch.images) for batch in batches])
    words = text.encode(text.preprocess.with_lengths(captions)[0])  # some are cut: no warning
    return Pairs(pixels, captions, ids, words, image.embed(ids), text.embed(words))


@torch.no_grad()
def decode(folder: str, data: Sequence[str]) -> Decoded:
    """Decode the ids of some images of a data set, given as on the command line."""
    image = vqclip.load_tokenizer(folder, modality="image")
    if image.pixels is None:
        raise ConfigError(f"--pixels: {folder}: has no pixel decoder; expected the tokenizer of a run that trained one")
    path = [each for each in data if "=" not in each]
    source = parse_source(path, [each for each in data if "=" in each]).build()
    transforms = image.transform, pixel_transform(image)
    (seen,), (originals,) = (EvalSet(source, each, DECODED, limit=DECODED) for each in transforms)
    decoded = to_uint8(image.decode_pixels(image.encode_pixels(seen.images)))
    detail = image.pixels.detail
    bits = image.bits_per_sample + (0 if detail is None else image.num_tokens * detail.quantizer.bits)
    return Decoded(originals.images, decoded, bits, mean_figures(compare_images(decoded, originals.images))["psnr"])


def read_figures(run: Path) -> tuple[str, list[Row]]:
    """Return what the run is, in a line, and one figure of each of its evaluations.

    Raises:
        ConfigError: the folder contains no finished run.
    """
    if not (run / "summary.json").is_file():
        raise ConfigError(f"{run}: contains no summary.json; expected the folder of a finished run: make train")
    config, summary = load_config(TrainConfig, run / "config.yaml"), json.loads((run / "summary.json").read_text())
    rows = []
    for result in summary["results"]:
        zero_shot = result["kind"] == "zero_shot"
        name = "top1" if zero_shot else "t2i_r1"
        title = (
            f"{result['name']}, {result['classes']} classes"
            if zero_shot
            else f"captions to {result['samples']:,} images"
        )
        modes = (result["figures"]["continuous"], result["figures"]["codes_only"], result["chance"])
        rows.append(Row(title, *(round(100 * each[name], 1) for each in modes)))
    bits = summary["bits_per_sample"]["image"]
    return f"run {config.run.name}, seed {config.run.seed}, {summary['step']:,} steps, {bits:,.0f} bits an image", rows


class Canvas:
    """Drawing with the origin at the top left, in units of which `WIDTH` are as wide as the README's column."""

    def __init__(self, theme: Theme, height: int):
        self.theme = theme
        self.figure = Figure(figsize=(WIDTH / 100, height / 100), dpi=100 * PIXELS_PER_UNIT)
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0), autoscale_on=False)
        self.axes.axis("off")

    def image(self, pixels: np.ndarray, x: float, y: float, width: float, height: float, smooth: bool = False) -> None:
        """Draw ``(H, W, 3)``."""
        how = "bicubic" if smooth else "nearest"
        self.axes.imshow(pixels, extent=(x, x + width, y + height, y), interpolation=how, aspect="auto")

    def text(self, x: float, y: float, text: str, **options: Any) -> None:
        """Write text, centred."""
        self.axes.text(
            x, y, text, **{"fontsize": 15, "color": self.theme.text, "ha": "center", "va": "center"} | options
        )

    def box(self, x: float, y: float, width: float, height: float, text: str = "") -> None:
        """Draw a box with text in it."""
        colours = {"facecolor": self.theme.box, "edgecolor": self.theme.muted, "linewidth": 1.2}
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=8", **colours))
        self.text(x + width / 2, y + height / 2, text)

    def line(self, *points: tuple[float, float], style: str = "-") -> None:
        """Draw a line through points; with the style ``"-|>"`` an arrow."""
        path = {"arrowstyle": style, "mutation_scale": 14, "shrinkA": 0, "shrinkB": 0, "capstyle": "round"}
        for start, end in itertools.pairwise(points):
            self.axes.add_patch(FancyArrowPatch(start, end, color=self.theme.muted, linewidth=1.8, **path))

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw an arrow."""
        self.line(start, end, style="-|>")

    def grid(self, x: float, y: float, width: float, height: float, columns: int, rows: int) -> None:
        """Draw gaps between the cells of a table."""
        style = {"color": self.theme.page, "linewidth": 2, "solid_capstyle": "butt", "zorder": 3}
        for number in range(1, columns):
            self.axes.plot([x + width * number / columns] * 2, [y, y + height], **style)
        for number in range(1, rows):
            self.axes.plot([x, x + width], [y + height * number / rows] * 2, **style)


def code_map(tokenizer: ImageTokenizer | TextTokenizer, ids: Tensor, columns: int) -> np.ndarray:
    """Return ids ``(N, C)`` as RGB: a square for each token, in it a cell for each codebook, coloured by its vector."""
    books = len(tokenizer.codebook_sizes)
    side = math.ceil(books**0.5)
    cells = torch.empty(len(ids), books, 3)
    for book in range(books):
        vectors = tokenizer.codebook(book)
        low, high = vectors.amin(dim=0), vectors.amax(dim=0)
        some = (high > low).nonzero()[:3, 0]  # a product's codebook has zeros in the channels of the others
        cells[:, book] = ((vectors - low) / (high - low))[:, some][ids[:, book]]
    empty = (0, 0, 0, side * side - books, 0, -len(ids) % columns)
    cells = pad(0.2 + 0.7 * cells, empty, value=torch.nan)  # NaN is transparent
    table = cells.view(-1, columns, side, side, 3).permute(0, 2, 1, 3, 4)
    return table.reshape(-1, columns * side, 3).numpy()


def draw_idea(pairs: Pairs, image: ImageTokenizer, text: TextTokenizer, theme: Theme) -> Figure:
    """Draw an image and its caption, their ids, and what these are for."""
    canvas = Canvas(theme, 430)
    ids, words = pairs.image_ids[SHOWN], pairs.text_ids[SHOWN]
    words = words[(words >= 0).all(dim=1)]
    side, columns = int(len(ids) ** 0.5), (len(words) + 1) // 2
    height = 320 / columns
    top = 333 - height / 2

    canvas.text(85, 14, "image", color=theme.image, weight="bold")
    canvas.image(to_pixels(pairs.pixels[SHOWN]), 5, 32, 160, 160, smooth=True)
    canvas.grid(5, 32, 160, 160, side, side)
    canvas.arrow((175, 112), (208, 112))
    canvas.text(298, 14, "codes", weight="bold")
    canvas.image(code_map(image, ids, side), 218, 32, 160, 160)
    canvas.grid(218, 32, 160, 160, side, side)
    canvas.text(298, 212, first_ids(ids), **MONOSPACE)

    canvas.text(85, 262, "caption", color=theme.caption, weight="bold")
    canvas.box(5, 282, 160, 126, textwrap.fill(f"“{pairs.captions[SHOWN]}”", 14))
    canvas.arrow((175, 345), (208, 345))
    canvas.text(298, 262, "codes", weight="bold")
    canvas.image(code_map(text, words, columns), 218, top, 160, height)
    canvas.grid(218, top, 160, height, columns, 2)
    canvas.text(298, top + height + 20, first_ids(words), **MONOSPACE)

    canvas.line((388, 112), (413, 112), (413, 345), (388, 345))
    canvas.arrow((413, 174), (437, 174))
    canvas.text(530, 66, "one joint space", weight="bold")
    plot_space(canvas, pairs, (440, 84, 180, 180))
    for y, use in ((112, "search"), (236, "classification")):
        canvas.arrow((623, y), (645, y))
        canvas.box(648, y - 26, 147, 52, use)
    canvas.arrow((413, 345), (645, 345))
    canvas.text(530, 330, "ids")
    canvas.box(648, 313, 147, 64, "language\nmodels")
    return canvas.figure


def to_pixels(image: Tensor) -> np.ndarray:
    """Return an image ``(3, H, W)`` as ``(H, W, 3)``."""
    return image.permute(1, 2, 0).numpy()


def first_ids(ids: Tensor) -> str:
    """Return the first three ids of the first token."""
    return " ".join(str(each) for each in ids[0, :3].tolist()) + " …"


def plot_space(canvas: Canvas, pairs: Pairs, box: tuple[float, float, float, float]) -> None:
    """Draw embeddings of some pairs in the plane of their largest variance, with a line between the two of a pair."""
    some = slice(SHOWN, SHOWN + PLOTTED)
    both = torch.stack([pairs.image[some], pairs.text[some]], dim=1).double()
    centred = both - both.mean(dim=(0, 1))
    axes = torch.linalg.svd(centred.flatten(0, 1), full_matrices=False).Vh[:2]
    axes = axes * axes.gather(1, axes.abs().argmax(dim=1, keepdim=True)).sign()  # an axis has no direction of its own
    plane = centred @ axes.T
    low, high = plane.amin(dim=(0, 1)), plane.amax(dim=(0, 1))
    x, y, width, height = box
    canvas.box(*box)
    points = 12 + ((plane - low) / (high - low)).numpy() * (width - 24, height - 24) + (x, y)
    for number, pair in enumerate(points):
        size, edge, order = (11.0, 1.5, 5) if number == 0 else (3.5, 0.0, 4)
        canvas.axes.plot(*pair.T, color=canvas.theme.muted, linewidth=0.8, zorder=3)
        for point, form, colour in zip(pair, "so", (canvas.theme.image, canvas.theme.caption), strict=True):
            style = {"color": colour, "markeredgecolor": canvas.theme.text, "markeredgewidth": edge, "zorder": order}
            canvas.axes.plot(*point, form, markersize=size, **style)


def draw_result(pairs: Pairs, run: str, rows: Sequence[Row], theme: Theme) -> Figure:
    """Draw the figures of a run, and the images that captions find."""
    canvas = Canvas(theme, 470)
    plot_figures(canvas, rows)
    canvas.text(585, 14, f"found by ids among {len(pairs.pixels):,} images", weight="bold")
    scores = pairs.text[list(QUERIES)] @ pairs.image.T
    for number, (query, found) in enumerate(zip(QUERIES, scores.topk(FOUND).indices.tolist(), strict=True)):
        y = 30 + 137 * number
        canvas.text(374, y + 12, f"“{pairs.captions[query]}”", fontsize=12.5, ha="left", color=theme.caption)
        for place, item in enumerate(found):
            x = 376 + 106 * place
            canvas.image(to_pixels(pairs.pixels[item]), x, y + 27, 98, 98, smooth=True)
            if item == query:
                corners = np.array([[0, 0], [98, 0], [98, 98], [0, 98], [0, 0]]) + (x, y + 27)
                canvas.axes.plot(*corners.T, color=theme.right, linewidth=4, solid_joinstyle="miter")
    canvas.text(4, 450, run, fontsize=11, color=theme.muted, ha="left")
    canvas.text(792, 450, "framed: the image of the caption", fontsize=11, color=theme.right, ha="right")
    return canvas.figure


def plot_figures(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Draw two bars and a mark for chance for every figure."""
    theme = canvas.theme
    canvas.text(4, 14, "right answers, %", weight="bold", ha="left")
    for number, (name, continuous, codes_only, chance) in enumerate(rows):
        y = 42 + 130 * number
        canvas.text(4, y, name, fontsize=13, ha="left")
        bars = (("continuous", continuous, theme.muted), ("from ids alone", codes_only, theme.image))
        for line, (mode, rate, colour) in enumerate(bars):
            middle = y + 33 + 35 * line
            canvas.axes.barh(middle, 2.8 * rate, left=4, height=30, color=colour)
            canvas.text(16, middle, mode, fontsize=13, ha="left", color=theme.page)
            canvas.text(12 + 2.8 * rate, middle, f"{rate:.1f}", ha="left", weight="bold" if line else "normal")
        canvas.axes.plot([4 + 2.8 * chance] * 2, [y + 15, y + 86], color=theme.caption, linewidth=2.5)
        canvas.text(4, y + 98, f"chance {chance:.1f}", fontsize=11, ha="left", color=theme.caption)


def draw_reconstructed(sets: Sequence[Decoded], theme: Theme) -> Figure:
    """Draw images of each data set above what their ids decode to."""
    canvas = Canvas(theme, 210 * len(sets))
    for number, each in enumerate(sets):
        for row, (images, title) in enumerate(((each.originals, "originals"), (each.decoded, "from ids"))):
            y = 210 * number + 102 * row
            note = f"{each.bits:,.0f} bits\n{each.psnr:.1f} dB" if row else ""
            canvas.text(52, y + (28 if row else 49), title, weight="bold", color=theme.image if row else theme.text)
            canvas.text(52, y + 66, note, fontsize=13, color=theme.muted)
            for place, image in enumerate(images):
                canvas.image(to_pixels(image), 108 + 99 * place, y, 96, 96, smooth=True)
    return canvas.figure


def save(figure: Figure, path: Path, theme: Theme, comment: str) -> None:
    """Write a PNG of 201 colours, one of which is transparent: that of the page."""
    figure.set_facecolor(theme.page)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    few = drawn.quantize(_COLOURS, Image.Quantize.MEDIANCUT, kmeans=3)
    palette, indices = few.getpalette() or [], np.array(few)
    page = (np.asarray(drawn) == np.asarray(drawn)[0, 0]).all(axis=2)  # similar colours inside of images stay
    few = Image.fromarray(np.where(page, _COLOURS, indices).astype(np.uint8), "P")
    few.putpalette([*palette[: 3 * _COLOURS], *drawn.getpixel((0, 0))])
    info = PngInfo()
    info.add_text("Comment", comment)
    path.parent.mkdir(parents=True, exist_ok=True)
    few.save(path, optimize=True, transparency=_COLOURS, pnginfo=info)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Encode, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run of configs/base.yaml")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the images")
    parser.add_argument(
        "--pixels",
        nargs="+",
        action="append",
        metavar=("TOKENIZER", "DATA"),
        default=[],
        help="tokenizer with a pixel decoder, and the path or key=value of the images to draw as `reconstructed`",
    )
    options = parser.parse_args(arguments)
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    torch.set_num_threads(1)
    run, rows = read_figures(options.run)
    image, text = (vqclip.load_tokenizer(str(options.run / "tokenizer"), modality=each) for each in ("image", "text"))
    pairs, comment = encode(image, text), json.dumps({"run": run, "figures": rows})
    sets = [decode(folder, data) for folder, *data in options.pixels]
    for name, theme in THEMES.items():
        if sets:
            about = json.dumps({"reconstructed": [(round(each.bits), round(each.psnr, 1)) for each in sets]})
            save(draw_reconstructed(sets, theme), options.out / f"reconstructed-{name}.png", theme, about)
        save(draw_idea(pairs, image, text, theme), options.out / f"idea-{name}.png", theme, comment)
        save(draw_result(pairs, run, rows, theme), options.out / f"result-{name}.png", theme, comment)


if __name__ == "__main__":
    try:
        main()
    except VqclipError as error:
        sys.exit(f"error: {error}")
