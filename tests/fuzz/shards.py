"""The shard reader on mutated tars: index, cached index, captions, labels, images."""

import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image

from tests.data.hostile import with_checksum
from tests.data.making import caption_members, encode, member_places, open_tars, pixels, tar_bytes
from tests.fuzz.mutate import NUMBERS, mutated
from vqclip.data.decode import decode_image
from vqclip.data.sources.columns import CaptionFiles, decode_text
from vqclip.data.tars.reader import TarReader
from vqclip.errors import DataError

_BLOCK = 512
_SAMPLES = 5
_MAX_PIXELS = 10**6


_FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
_WORDS = (*NUMBERS, b'"', b"\\ud800", b"[" * 200, b'{"caption":' * 50, b"\x1b[2J", b"\xed\xa0\x80", b"9" * 5000, b"/")


def _members() -> dict[str, bytes]:
    """Good samples with every kind of member."""
    images = {
        "a.jpg": encode(pixels(0)),
        "b.png": encode(pixels(1), "PNG"),
        "c.webp": encode(pixels(2), "WEBP"),
        "d.png": encode(Image.fromarray(pixels(3)).quantize(8), "PNG", transparency=1),
        "e.webp": encode(pixels(4, channels=4), "WEBP", lossless=True),
    }
    members = dict(images)
    for key in "abcde":
        members |= {f"{key}.txt": b"a cat\n\xc3\xa9", f"{key}.cls": b"2"}
        members[f"{key}.json"] = b'{"caption": ["x", "\\u00e9"], "n": 1e3}'
    return members


def seeds() -> list[bytes]:
    """Good tars of every notation."""
    long = {f"{'folder/' * 30}{name}": data for name, data in _members().items()}
    plain = [tar_bytes(_members(), tarfile.USTAR_FORMAT), tar_bytes(caption_members(0, 2), tarfile.USTAR_FORMAT)]
    return [*plain, tar_bytes(long, tarfile.GNU_FORMAT), tar_bytes(long | {"ünïcode.txt": b"x"}, tarfile.PAX_FORMAT)]


def case(draw: random.Random, known: list[bytes]) -> bytes:
    """One input: mutated, and mostly with checksums that fit, or the first header would end all."""
    if draw.random() < 0.5:
        return _case_of_members(draw)
    data = bytearray(mutated(draw, draw.choice(known), known))
    if draw.random() < 0.8:
        for at in range(0, len(data) - _BLOCK + 1, _BLOCK):
            if data[at + 257 : at + 262] == b"ustar" or draw.random() < 0.01:
                if draw.random() < 0.1:  # a header's type or size
                    data[at + draw.choice((124, 130, 134, 156))] = draw.choice(b"0123457LKxgS\0 \x80\xff")
                with_checksum(data, at)
    return bytes(data)


def _case_of_members(draw: random.Random) -> bytes:
    """A good tar of members that are not."""
    whole = _members()
    members: dict[str, bytes] = {}
    for name, data in whole.items():
        if draw.random() < 0.1:
            name = mutated(draw, name.encode(), [b"../", b"/etc/"], _WORDS).decode("utf-8", "replace").replace("\0", "")
        if draw.random() < 0.5:
            data = mutated(draw, data, list(whole.values()), _WORDS)
        members[name[:200]] = data
    try:
        return tar_bytes(members, draw.choice(_FORMATS))
    except ValueError:  # a name that this notation cannot hold
        return tar_bytes(members, tarfile.PAX_FORMAT)


@mock.patch.dict(os.environ)
def check(data: bytes, folder: Path) -> str:
    """Read it all; returns what happened in a word, raises anything that is no `DataError`, or a broken promise."""
    path, cache = folder / "case.tar", folder / "cache"
    os.environ["VQCLIP_CACHE"] = str(cache)
    shutil.rmtree(cache, ignore_errors=True)
    path.write_bytes(data)
    try:
        reader = open_tars(path)
    except DataError as error:
        _require_printable(error)
        return "refused"
    places = member_places(reader)
    assert (places.sum(axis=-1) <= len(data)).all()
    assert np.array_equal(member_places(open_tars(path)), places)
    for number in range(min(len(reader), _SAMPLES)):
        for read in _readers(reader, number):
            try:
                read()
            except DataError as error:
                _require_printable(error)
    reader.close()
    (part,), draw = (cache / "index").glob("*/*.part"), random.Random(data)
    part.write_bytes(mutated(draw, part.read_bytes(), [data]))
    reader.index.path.unlink()
    again = open_tars(path)
    assert np.array_equal(member_places(again), places)
    assert again.shards == reader.shards
    return "read"


def _readers(reader: TarReader, number: int) -> list[Callable[[], object]]:
    return [
        lambda: CaptionFiles("txt_lines").parse(reader.read(number, "txt")),
        lambda: CaptionFiles("json", ("caption", "n")).parse(reader.read(number, "json")),
        lambda: decode_text(reader.read(number, "cls"), "cls"),
        lambda: decode_image(reader.read(number, "image"), _MAX_PIXELS),
        lambda: reader.name(number).encode(),
    ]


def _require_printable(error: DataError) -> None:
    assert str(error).replace("\n", "").isprintable(), ascii(str(error))
