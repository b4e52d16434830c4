from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tokenizer.test_base import PICTURE, built
from vqclip.errors import ShapeError


def test_images_come_as_pictures_or_tensors():
    tokenizer = built().image.eval()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    tensor = tokenizer.preprocess(picture)
    assert tensor.dtype == torch.uint8
    ids = tokenizer.encode(picture)
    assert torch.equal(ids, tokenizer.encode(tensor[None]))
    assert torch.equal(ids, tokenizer.encode([picture]))
    assert tokenizer.encode(Image.new("RGBA", (50, 20))).shape == (1, 4, 1)


@pytest.mark.parametrize("value", [-0.01, 1.01, 255.0, float("nan")])
def test_floats_that_are_no_pixels_are_refused(value):
    tokenizer = built().image.eval()
    images = torch.rand(2, 3, 16, 16)
    tokenizer.encode(images)
    images[1, 2, 3, 4] = value
    with pytest.raises(ShapeError, match=r"images: got floating point from .*, expected 0 to 1: neither 0..255"):
        tokenizer.encode(images)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("cat.jpg", r"^images: got 'cat.jpg' \(str\), expected a PIL image; PIL.Image.open reads a file"),
        (["cat.jpg"], r"^images\[0\]: got 'cat.jpg' \(str\)"),
        (None, "^images: got None, expected a PIL image"),
        ([PICTURE, None], r"^images\[1\]: got None"),
        ([3], r"^images\[0\]: got 3 \(int\)"),
        (np.zeros((16, 16, 3), np.uint8), r"^images: got a ndarray of shape \(16, 16, 3\) and dtype uint8.*fromarray"),
        ([torch.zeros(3, 16, 16)], r"^images\[0\]: got a Tensor of shape.*torch.stack"),
        (
            (picture for picture in [PICTURE]),
            r"^images: got <generator.*a list of PIL images or a \(B, 3, H, W\) tensor",
        ),
    ],
)
def test_what_is_no_picture_is_refused(images, message):
    tokenizer = built().image
    with pytest.raises(ShapeError, match=message):
        tokenizer.encode(images)
    if not isinstance(images, list):
        with pytest.raises(ShapeError, match=message.replace("images", "image", 1)):
            tokenizer.preprocess(images)
