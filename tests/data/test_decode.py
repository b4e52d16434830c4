import io
import itertools
import struct
import time
import tracemalloc
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, features

from tests.data import hostile
from tests.data.hostile import scans_jpeg
from tests.data.making import caption_shards, encode, pixels
from vqclip.data import CaptionShardsConfig, TrainTransformConfig
from vqclip.data.decode import MAX_SCANS, decode_image, pil_to_uint8, read_image
from vqclip.data.samples import SampleMaker
from vqclip.errors import DataError

HEIGHT, WIDTH = 20, 24


def rgb(data: bytes) -> np.ndarray:
    """(H, W, 3) as decoded, after checking the contract."""
    image = decode_image(data)
    assert image.dtype == torch.uint8
    assert image.shape[0] == 3
    return image.permute(1, 2, 0).numpy()


def on_white(rgba: np.ndarray) -> np.ndarray:
    """The definition, in floats."""
    alpha = rgba[..., -1:] / 255
    colour = rgba[..., :-1] * alpha + 255 * (1 - alpha)
    return np.broadcast_to(colour, (*rgba.shape[:2], 3))


LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True, "exact": True}}
EXACT = [
    *((kind, {}) for kind in ("PNG", "BMP", "PPM", "TIFF")),
    *(("TIFF", {"compression": name}) for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits")),
    ("WEBP", LOSSLESS["WEBP"]),
]
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
needs_avif = pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")


@pytest.mark.parametrize(("kind", "options"), EXACT)
def test_lossless_rgb_is_exact(kind: str, options: dict) -> None:
    image = pixels(0, HEIGHT, WIDTH)
    assert np.array_equal(rgb(encode(image, kind, **options)), image)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", pytest.param("AVIF", marks=needs_avif), "MPO"])
def test_the_first_of_several_frames_is_read(kind: str) -> None:
    """Fails for a GIF where its second frame, or what disposes of the first one, counts."""
    first, second = Image.fromarray(pixels(0, 40, 48)), Image.fromarray(pixels(1, 40, 48))
    if kind == "GIF":
        first, second = first.quantize(64), second.quantize(64)
    options = {"quality": 100, "subsampling": 0 if kind == "MPO" else "4:4:4"} if kind in ("MPO", "AVIF") else {}
    data = encode(first, kind, save_all=True, append_images=[second], **LOSSLESS.get(kind, options))
    assert np.abs(rgb(data).astype(int) - np.asarray(first.convert("RGB"))).max() <= (6 if options else 0)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_transparency_is_composited_on_white(kind: str) -> None:
    image = pixels(1, HEIGHT, WIDTH, channels=4).copy()
    image[:2, :, 3], image[2:4, :, 3] = 0, 255
    result = rgb(encode(image, kind, **LOSSLESS[kind]))
    assert np.abs(result - on_white(image)).max() <= 0.5
    assert (result[:2] == 255).all()
    assert np.array_equal(result[2:4], image[2:4, :, :3])


def test_grey_with_and_without_transparency() -> None:
    image = pixels(2, HEIGHT, WIDTH, channels=2)
    assert np.abs(rgb(encode(Image.fromarray(image, "LA"), "PNG")) - on_white(image)).max() <= 0.5
    grey = image[..., 0]
    assert np.array_equal(rgb(encode(Image.fromarray(grey), "PNG")), np.stack([grey] * 3, -1))
    assert np.abs(rgb(encode(Image.fromarray(grey), "JPEG")).astype(int) - grey[..., None]).max() <= 40
    bits = grey > 127
    assert np.array_equal(rgb(encode(Image.fromarray(bits), "PNG")), np.stack([bits * 255] * 3, -1))


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("GIF", {"disposal": 2, "comment": b"a" * 1000})])
def test_palette_with_and_without_transparency(kind: str, options: dict) -> None:
    image = Image.fromarray(pixels(3, HEIGHT, WIDTH)).quantize(8)
    assert np.array_equal(rgb(encode(image, kind)), np.asarray(image.convert("RGB")))
    clear = int(np.asarray(image)[0, 0])
    result = rgb(encode(image, kind, transparency=clear, **options))
    assert (result[np.asarray(image) == clear] == 255).all()
    others = np.asarray(image) != clear
    assert np.array_equal(result[others], np.asarray(image.convert("RGB"))[others])


def test_one_transparent_colour() -> None:
    image = pixels(4, HEIGHT, WIDTH).copy()
    image[0, 0] = image[5, 5] = (1, 2, 3)
    result = rgb(encode(image, "PNG", transparency=(1, 2, 3)))
    assert (result[[0, 5], [0, 5]] == 255).all()
    assert np.array_equal(result[10], image[10])


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled(kind: str) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (HEIGHT, WIDTH), dtype=np.uint16)
    data = b"P5 24 20 65535\n" + values.astype(">u2").tobytes()  # which Pillow 10 cannot write
    data = data if kind == "PPM" else encode(Image.fromarray(values), kind)
    assert np.array_equal(rgb(data), np.stack([values >> 8] * 3, -1))
    assert read_image(data).largest == values.max()


def test_cmyk_jpeg() -> None:
    data = encode(Image.fromarray(pixels(5, 40, 40)).convert("CMYK"), "JPEG", quality=95)
    theirs = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(rgb(data) - theirs).max() <= 3


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", pytest.param("AVIF", marks=needs_avif)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    image = Image.fromarray(pixels(6, 16, 32))
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossy = {"JPEG": {"quality": 100, "subsampling": 0}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}
    data = encode(image, kind, exif=exif.tobytes(), **LOSSLESS.get(kind, lossy.get(kind, {})))
    expected = np.asarray(image.transpose(TURNS[orientation]) if orientation in TURNS else image).astype(int)
    result = rgb(data)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= (6 if kind in lossy else 0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("channels", [3, 4])
def test_pillow_images_give_the_same_tensor(kind: str, channels: int) -> None:
    image = Image.fromarray(pixels(7, HEIGHT, WIDTH, channels))
    if kind == "JPEG":
        image = image.convert("RGB")
    data = encode(image, kind, **LOSSLESS.get(kind, {}))
    opened = pil_to_uint8(Image.open(io.BytesIO(data)))
    assert opened.dtype == torch.uint8
    assert (opened.int() - decode_image(data).int()).abs().max() <= (3 if kind == "JPEG" else 0)


def test_pillow_modes_without_a_range_are_refused() -> None:
    with pytest.raises(DataError, match="mode F"):
        pil_to_uint8(Image.fromarray(np.zeros((3, 3), np.float32)))
    with pytest.raises(DataError, match="outside 0"):
        pil_to_uint8(Image.fromarray(np.full((3, 3), 70000, np.int32)))


def test_too_many_pixels_are_refused_by_the_header() -> None:
    data = hostile.huge_png(20_000)
    with pytest.raises(DataError, match="20000x20000.*at most 50000000 pixels"):
        decode_image(data)
    assert rgb(hostile.huge_png(800)).shape == (800, 800, 3)
    assert rgb(hostile.data_bomb_png()).shape == (1, 1, 3)  # the pixel is read, the rest is not
    with pytest.raises(DataError, match="at most 100 pixels"):
        decode_image(encode(pixels(0)), max_pixels=100)
    for options in ({}, {"lossless": True}, {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}):  # VP8, VP8L, VP8X
        data = encode(Image.new("RGB", (40, 56)), "WEBP", **options)
        assert decode_image(data, max_pixels=40 * 56).shape == (3, 56, 40)
        with (
            mock.patch("PIL.WebPImagePlugin.WebPImageFile", side_effect=AssertionError("its pixels were allocated")),
            pytest.raises(DataError, match="webp image of 40x56 pixels; at most 100 pixels are decoded"),
        ):
            decode_image(data, max_pixels=100)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_size_that_counts_is_the_decoders(kind: str) -> None:
    """Fails where the size is read from the first thing that looks like a header."""
    with pytest.raises(DataError) as error:
        decode_image(hostile.two_sizes(kind, 200), max_pixels=100 * 100)
    assert error.value.kind == "image size"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", pytest.param("AVIF", marks=needs_avif)])
def test_fields_of_exif_are_not_multiplied(kind: str) -> None:
    data = hostile.exif_bomb(kind)
    decode_image(encode(pixels(0), kind))  # imports the plugin
    tracemalloc.start()
    try:
        assert set(decode_image(data).shape[1:]) == {8, 16}
        assert tracemalloc.get_traced_memory()[1] < 8 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_parts_are_counted(kind: str) -> None:
    data = encode(pixels(0), kind)
    part = b"\xff\xfe\0\2" if kind == "JPEG" else hostile.png_chunk(b"abCd", b"")
    start = 2 if kind == "JPEG" else 33
    assert decode_image(data[:start] + part * 4000 + data[start:]).shape == (3, 20, 24)
    with pytest.raises(DataError, match="more than.* 4096 "):
        decode_image(data[:start] + part * 4100 + data[start:])


@pytest.mark.parametrize("start", [b"BM", b"<svg>", b"\x80\x04\x95pickle", b"RIFF\0\0\0\0WAVE", b"\0\0\0\x18ftypheic"])
def test_other_formats_are_refused(start: bytes) -> None:
    with pytest.raises(DataError, match=r"not a JPEG, .* or AVIF image: begins with b'"):
        decode_image(start + bytes(50))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_files_are_refused(kind: str, share: float) -> None:
    data = encode(pixels(9, 90, 90), kind)
    with pytest.raises(DataError):
        decode_image(data[: int(len(data) * share)])


def test_any_flipped_bit_of_a_png_is_detected_or_changes_no_pixel() -> None:
    data = encode(pixels(3), "PNG")
    good = decode_image(data)
    refused = 0
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        try:
            assert torch.equal(decode_image(bytes(damaged)), good)
        except DataError as error:
            assert error.kind in ("damaged image", "image format", "image size")  # noqa: PT017
            refused += 1
    assert refused == len(data)


def test_sixteen_bits_of_several_channels_are_scaled() -> None:
    for colour, row, expected in (
        (2, "123456789abc" * 2, [0x12, 0x56, 0x9A]),
        (4, "1234ffff" * 2, [0x12, 0x12, 0x12]),
        (6, "123456789abcffff" * 2, [0x12, 0x56, 0x9A]),
    ):
        image = rgb(hostile.png(2, 1, 16, colour, b"\0" + bytes.fromhex(row)))
        assert image.tolist() == [[expected, expected]]


@pytest.mark.parametrize(
    ("tag", "values", "message"),
    [
        (278, [1 << 20, 1], "values of type 4 in field 278"),
        (273, [8] * 40, "more parts or values"),
        (320, [0] * 70_000, "more parts or values"),
        (322, [1 << 14], "parts of 16384x0"),
        (259, [34925], "compression 34925"),
    ],
)
def test_tiffs_that_would_take_long_are_refused(tag: int, values: list[int], message: str) -> None:
    """Fails where Pillow decodes the same strip again and again, or a tile of gigabytes."""
    data = bytearray(encode(pixels(0), "TIFF"))
    (at,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, at)
    places = [at + 2 + 12 * number for number in range(count)]
    place = next((place for place in places if struct.unpack_from("<H", data, place)[0] == tag), places[-1])
    content = struct.pack("<I", values[0] if len(values) == 1 else len(data))
    data[place : place + 12] = struct.pack("<HHI", tag, 4, len(values)) + content
    data += struct.pack(f"<{len(values)}I", *values)
    with pytest.raises(DataError, match=message):
        decode_image(bytes(data))


def made_jpegs(shapes: list[tuple[int, int]], qualities: list[int]) -> list[bytes]:
    files = []
    for (height, width), quality, progressive in itertools.product(shapes, qualities, (False, True)):
        image = Image.fromarray(pixels(height, height, width))
        options = {"quality": quality, "progressive": progressive}
        files += [encode(image, subsampling=subsampling, **options) for subsampling in (0, 1, 2)]
        files += [encode(image.convert("L"), **options), encode(image, keep_rgb=True, **options)]
    return files


@pytest.mark.parametrize("min_side", [None, 30])
def test_simplejpeg_and_pillow_give_equal_pixels(min_side: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So results do not depend on which of them can read a file; fails where one upsamples in another way."""
    files = made_jpegs([(17, 33), (120, 250)], [20, 90])
    ours = [decode_image(data, min_side=min_side) for data in files]
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args, **options: np.zeros(0))
    assert all(torch.equal(a, decode_image(b, min_side=min_side)) for a, b in zip(ours, files, strict=True))


def test_jpegs_that_libjpeg_warns_of_are_read() -> None:
    data = encode(pixels(1, 90, 110))
    garbled = data.replace(b"\xff\xda", b"\0\0\0\xff\xda", 1)  # "extraneous bytes before marker"
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(garbled, "RGB")
    assert torch.equal(decode_image(garbled), decode_image(data))


@pytest.mark.parametrize(("side", "divisor"), [(104, 1), (53, 1), (52, 2), (26, 4), (14, 4), (13, 8), (1, 8)])
def test_the_shorter_side_decides_the_fraction(side: int, divisor: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(pixels(2, 104, 152))
    for options in ({}, {"exif": exif.tobytes()}):
        shape = decode_image(encode(image, **options), min_side=side).shape[1:]
        assert sorted(shape) == [104 // divisor, 152 // divisor]
    assert decode_image(encode(image.convert("CMYK")), min_side=side).shape[1] == 104 // divisor


def test_scaling_belongs_to_the_run_and_enlarges_no_crop(tmp_path: Path) -> None:
    config = TrainTransformConfig(scale=(0.25, 1.0))
    scaling = config.model_copy(update={"dct_scaling": True})
    assert [each.build(30).min_side for each in (config, scaling)] == [None, 70]  # 30 / sqrt(0.25 * 3 / 4)
    source = CaptionShardsConfig(path=str(caption_shards(tmp_path, (1,)))).build()
    file = encode(pixels(0, 150, 200))
    source.read = lambda index: types.SimpleNamespace(image=file, captions=("a",), label=-1)
    images = [SampleMaker([source], each.build(30), 0, 10**6).make(0, 0, 0)[0].image for each in (config, scaling)]
    assert not torch.equal(*images)
    assert (images[0].float() - images[1].float()).abs().mean() < 12


def test_scans_of_a_jpeg_are_counted_before_it_is_decoded() -> None:
    for scans in (7, MAX_SCANS):
        assert decode_image(scans_jpeg(scans)).shape == (3, 16, 16)
    for data in (scans_jpeg(MAX_SCANS + 1), scans_jpeg(MAX_SCANS + 1).replace(b"\xff\xda", b"\xff\xff\xff\xda")):
        with pytest.raises(DataError, match=f"^jpeg image of more than {MAX_SCANS} scans or 4096 seg") as error:
            decode_image(data)
        assert error.value.kind == "too many scans"
    # What looks like scans in a thumbnail, in padding or after the end is none.
    many = b"\xff\xda\x00\x02" * 300
    whole = encode(pixels(1), "JPEG", exif=b"Exif\0\0" + many)
    assert many in whole
    assert decode_image(whole + many).shape == (3, 20, 24)


def test_counting_scans_is_linear_in_the_bytes() -> None:
    times = []
    for megabytes in (4, 16):
        data = b"\xff\xd8" + b"\xff\xd0\xff\x00" * (megabytes << 18)  # nothing but marks that mean nothing
        start = time.process_time()
        with pytest.raises(DataError):
            decode_image(data)
        times.append(time.process_time() - start)
    assert times[1] < 16 * times[0] + 0.1
    assert times[1] < 2
