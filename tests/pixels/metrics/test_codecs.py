from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from vqclip.pixels.metrics import compare_images
from vqclip.pixels.metrics.codecs import best_within, compress


@pytest.fixture
def image():
    """48 x 64 pixels of soft waves, with some noise."""
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(64.0), indexing="ij")
    waves = torch.stack([torch.sin(x / 9), torch.cos(y / 7), torch.sin((x + y) / 11)])
    noise = torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(0))
    return (128 + 90 * waves + 12 * noise).clamp(0, 255).to(torch.uint8)


def error(found, image):
    return float(compare_images(found.pixels[None], image[None])["mse"])


@pytest.mark.parametrize("codec", ["webp", "jpeg"])
def test_files_fit_and_a_better_quality_would_not(image, codec):
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, codec, quality=50, method=6, optimize=True)
    [found] = compress(image, codec, file.tell(), factors=(1,))
    assert 0.97 * file.tell() <= found.bytes <= file.tell()
    assert found.pixels.shape == image.shape
    [less] = compress(image, codec, found.bytes - 1, factors=(1,))
    assert less.bytes < found.bytes
    assert error(less, image) > error(found, image)


@pytest.mark.parametrize("codec", ["webp", "jpeg"])
def test_without_a_file_that_fits_the_smallest_counts(image, codec):
    found = compress(image, codec, 10)
    assert [each.pixels.shape for each in found] == [image.shape] * 4
    best = best_within(found, image, 10)
    assert best.bytes == min(each.bytes for each in found) > 10


def test_a_reduced_size_wins_where_bytes_are_few(image):
    found = compress(image, "webp", 120)
    best = best_within(found, image, 120)
    assert found[0].bytes > 120 >= best.bytes
    assert error(best, image) == min(error(each, image) for each in found if each.bytes <= 120)
    rich = compress(image, "webp", 10_000)
    assert best_within(rich, image, 10_000) is rich[0]
