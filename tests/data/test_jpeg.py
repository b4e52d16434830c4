"""Pixels of JPEGs are the same with and without simplejpeg, and at a fraction of the size those of Pillow."""

from __future__ import annotations

import io
import itertools
import logging
import random
import tarfile
import time
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.making import caption_shards, encode, pixels
from tests.fuzz import images as crafted
from vqclip.data import CaptionShardsConfig, TrainTransformConfig, jpeg
from vqclip.data.decode import decode_image
from vqclip.data.samples import SampleMaker
from vqclip.errors import DataError

simplejpeg = pytest.importorskip("simplejpeg")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The decoders that were used, in order."""
    found: list[str] = []
    assert jpeg._find_simplejpeg() is simplejpeg  # compares the decoders once
    for name in ("simplejpeg", "pillow", "torchvision"):
        function = getattr(jpeg, f"_by_{name}")
        monkeypatch.setattr(
            jpeg, f"_by_{name}", lambda *args, _f=function, _name=name: found.append(_name) or _f(*args)
        )
    return found


def both_ways(data: bytes, min_side: int | None = None) -> tuple[torch.Tensor | DataError, torch.Tensor | DataError]:
    """Decode with simplejpeg and without."""
    results = []
    for find in (jpeg._find_simplejpeg, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jpeg, "_find_simplejpeg", find)
            try:
                results.append(decode_image(data, 10**6, min_side))
            except DataError as error:
                results.append(error)
    return results[0], results[1]


def same(data: bytes, min_side: int | None = None) -> bool:
    one, other = both_ways(data, min_side)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return str(one) == str(other)


def made(shapes: list[tuple[int, int]], qualities: list[int]) -> Iterator[bytes]:
    for (height, width), quality, progressive in itertools.product(shapes, qualities, (False, True)):
        image, options = (
            Image.fromarray(pixels(height, height, width)),
            {"quality": quality, "progressive": progressive},
        )
        for subsampling in (0, 1, 2):
            yield encode(image, subsampling=subsampling, **options)
        yield encode(image.convert("L"), **options)
        yield encode(image, keep_rgb=True, **options)
        if not progressive:
            for subsampling in ("411", "440"):
                yield simplejpeg.encode_jpeg(np.array(image), quality=quality, colorsubsampling=subsampling)


@pytest.mark.parametrize("min_side", [None, 30])
def test_pixels_do_not_depend_on_the_library(calls: list[str], min_side: int | None) -> None:
    files = list(made([(17, 33), (120, 250)], [20, 90]))
    assert all(same(data, min_side) for data in files)
    assert calls.count("simplejpeg") == len(files)
    scaled = len(files) // 2 if min_side else 0
    assert calls.count("pillow") == scaled
    assert calls.count("torchvision") == len(files) - scaled


def test_other_files_are_decoded_by_torchvision(calls: list[str]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(pixels(0, 90, 110))
    for data in (encode(image, exif=exif.tobytes()), encode(image.convert("CMYK"))):
        assert same(data, 20)
    assert set(calls) == {"torchvision"}
    assert decode_image(encode(image, exif=exif.tobytes()), min_side=20).shape == (3, 110, 90)


def test_damage_is_judged_alike(calls: list[str]) -> None:
    data = encode(pixels(1, 90, 110))
    for cut in (len(data) // 2, len(data) - 2):
        for min_side in (None, 20):
            assert same(data[:cut], min_side)
    assert {"simplejpeg", "pillow", "torchvision"} == set(calls)
    with pytest.raises(DataError, match=r"cannot be decoded.*truncated"):
        decode_image(data[: len(data) // 2], min_side=20)


@pytest.mark.parametrize(("side", "divisor"), [(104, 1), (53, 1), (52, 2), (26, 4), (14, 4), (13, 8), (1, 8)])
def test_the_shorter_side_decides_the_fraction(side: int, divisor: int) -> None:
    data = encode(pixels(2, 104, 152))
    image = decode_image(data, min_side=side)
    assert image.shape == (3, 104 // divisor, 152 // divisor)
    opened = Image.open(io.BytesIO(data))
    opened.draft(None, (152 // divisor, 104 // divisor))
    assert np.array_equal(np.asarray(opened), image.permute(1, 2, 0))


def test_a_second_size_is_refused() -> None:
    data = encode(pixels(3, 100, 150))
    frame = data.index(b"\xff\xc0")
    second = bytearray(data[frame : frame + 19])
    second[5:9] = b"\0\x40\0\x40"
    for answer in both_ways(data[:frame] + bytes(second) + data[frame:], 16):
        assert isinstance(answer, DataError)


@pytest.mark.parametrize("differs", [False, True])
def test_the_libraries_are_compared_first(
    differs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def decode(*args, **options):
        return simplejpeg.decode_jpeg(*args, **options) + np.uint8(differs)

    monkeypatch.setitem(__import__("sys").modules, "simplejpeg", types.SimpleNamespace(decode_jpeg=decode))
    with caplog.at_level(logging.WARNING):
        found = jpeg._find_simplejpeg.__wrapped__()
    assert (found is None) == differs
    assert ("simplejpeg is not used" in caplog.text) == differs
    monkeypatch.setitem(__import__("sys").modules, "simplejpeg", None)
    assert jpeg._find_simplejpeg.__wrapped__() is None


def test_scaling_belongs_to_the_run_and_enlarges_no_crop(tmp_path: Path, calls: list[str]) -> None:
    config = TrainTransformConfig(scale=(0.25, 1.0))
    scaling = config.model_copy(update={"dct_scaling": True})
    assert "dct_scaling" not in config.model_dump()
    assert TrainTransformConfig(**scaling.model_dump()) == scaling
    assert [each.build(30).min_side for each in (config, scaling)] == [None, 70]  # 30 / sqrt(0.25 * 3 / 4)
    source = CaptionShardsConfig(path=str(caption_shards(tmp_path, (1,)))).build()
    file = encode(pixels(0, 150, 200))
    source.read = lambda index: types.SimpleNamespace(image=file, captions=("a",), label=-1)
    images = [SampleMaker([source], each.build(30), 0, 10**6).make(0, 0, 0)[0].image for each in (config, scaling)]
    assert not torch.equal(*images)
    assert (images[0].float() - images[1].float()).abs().mean() < 12


def real_files(real_data: Path) -> Iterator[bytes]:
    for path in sorted(real_data.glob("*/*/*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith((".jpg", ".jpeg")):
                    file = tar.extractfile(member)
                    assert file is not None
                    yield file.read()


@pytest.mark.slow
def test_real_and_made_files(real_data: Path) -> None:
    sizes = [(1, 1), (1, 7), (7, 1), (3, 5), (8, 8), (9, 17), (16, 15), (31, 64), (100, 99), (333, 500)]
    for number, data in enumerate(itertools.chain(real_files(real_data), made(sizes, [1, 30, 75, 95, 100]))):
        assert same(data), number
        assert same(data, 24), number


@pytest.mark.faults
def test_damaged_files() -> None:
    """Seconds of flipped bytes, cut files and crafted headers."""
    draw, end, read = random.Random(time.time_ns()), time.monotonic() + 60, 0
    files = list(made([(40, 56), (17, 33), (120, 90)], [75]))
    known = crafted.seeds() + files
    while time.monotonic() < end:
        data = bytearray(draw.choice(files))
        for _ in range(draw.choice((1, 1, 2, 5))):
            data[draw.randrange(len(data))] = draw.choice((draw.randrange(256), 0, 255))
        damaged = draw.choice((bytes(data), bytes(data), bytes(data[: draw.randrange(len(data))])))
        damaged = crafted.case(draw, known) if draw.random() < 0.3 else damaged
        min_side = draw.choice((None, 10))
        one, other = both_ways(damaged, min_side)
        assert isinstance(one, DataError) == isinstance(other, DataError), damaged.hex()
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), (min_side, damaged.hex())
            read += 1
    assert read > 1000
