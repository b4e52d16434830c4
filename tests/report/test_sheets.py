from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from vqclip.evaluation.details import (
    Candidate,
    Codebook,
    CodeMap,
    Codes,
    DecodedImage,
    Details,
    Example,
    Examples,
    Reconstruction,
    ShownImage,
)
from vqclip.report.images import code_colour
from vqclip.report.sheets import GAP, SIDE, draw_sheets

HOSTILE = "<b>" + "W" * 200 + "\x00\n\u202e " * 10


def shown(colour, text="a caption"):
    file = io.BytesIO()
    Image.new("RGB", (20, 20), colour).save(file, "PNG")
    return ShownImage(index=0, name="0", thumbnail=file.getvalue(), text=text)


def example(rank, found, text="a caption"):
    return Example(image=shown("blue"), text=text, score=0.5, rank=rank, candidates=9, found=found)


def colour(pixel):
    return "#{:02x}{:02x}{:02x}".format(*pixel)


@pytest.mark.parametrize("text", ["a caption of several words that fill more than one line", HOSTILE, ""])
def test_hits_are_green_and_misses_red(text):
    captions = (Candidate(text=text, image=None, score=0.1, right=True),)
    images = tuple(Candidate(text="", image=shown("yellow"), score=0.1, right=number == 2) for number in range(10))
    missing = ShownImage(index=1, name="1", thumbnail=None, text=text)
    hit, miss = example(1, captions, text), example(4, images).model_copy(update={"image": missing})
    examples = Examples(direction="image_to_text", hits=(hit,), misses=(miss,))
    ((name, sheet),) = draw_sheets("pairs", Details(samples=9, intervals={}, examples=(examples,))).items()
    assert name == "retrieved/pairs image to text"
    pixels = np.asarray(sheet)
    rows = (sheet.height - GAP) // 2
    assert colour(pixels[20, GAP - 2]) == "#1a7f37"
    assert colour(pixels[rows + 20, GAP - 2]) == "#c0392b"
    assert colour(pixels[20, 20]) == "#0000ff"
    assert {"#ffff00", "#1a7f37", "#c0392b"} <= {colour(pixel) for pixel in pixels[rows + 20, 100:]}
    assert (pixels[:, 1 - GAP :] == 255).all()  # nothing is cut off at the right


def test_code_maps_have_one_colour_a_code():
    maps = (CodeMap(image=shown("blue"), ids=((0, 5), (1, 5), (2, 5), (-1, 7))),)
    books = (Codebook(name="stage 1", size=8), Codebook(name="stage 2", size=8))
    codes = Codes(codebooks=books, all_codebooks=2, grid=(2, 2), maps=maps, looked_at=1, galleries=())
    ((name, sheet),) = draw_sheets("pairs", Details(samples=1, intervals={}, codes=codes)).items()
    assert name == "code maps/pairs"
    pixels, left, top = np.asarray(sheet), GAP + SIDE + GAP, GAP
    corners = [(top + 2 + row * SIDE // 2, left + 2 + column * SIDE // 2) for row in (0, 1) for column in (0, 1)]
    assert [colour(pixels[place]) for place in corners] == [*map(code_colour, (0, 1, 2)), "#ffffff"]
    assert draw_sheets("pairs", Details(samples=1, intervals={}, codes=codes.model_copy(update={"grid": None}))) == {}


def test_reconstructions_are_beside_their_originals():
    decoded = [
        DecodedImage(label=HOSTILE, bits=bits, figures={"psnr": 20.0}, image=shown(name).thumbnail)
        for bits, name in ((10, "red"), (20, "lime"))
    ]
    missing = decoded[0].model_copy(update={"image": None, "figures": {}})
    rows = tuple(Reconstruction(image=shown("blue"), decoded=tuple(each)) for each in (decoded, [missing, decoded[1]]))
    ((name, sheet),) = draw_sheets("pixels", Details(samples=2, intervals={}, reconstructions=rows)).items()
    assert name == "reconstructed/pixels"
    pixels, pitch = np.asarray(sheet), SIDE + 8
    assert [colour(pixels[20, 20 + column * pitch]) for column in range(3)] == ["#0000ff", "#ff0000", "#00ff00"]
    second = sheet.height // 2 + 20
    assert [colour(pixels[second, 20 + column * pitch]) for column in range(3)] == ["#0000ff", "#ffffff", "#00ff00"]
    assert (pixels[:, -8:] == 255).all()
