"""Blind mutation of bytes, drawn from a generator that the caller keys."""

import random
from collections.abc import Sequence

NUMBERS = (b"\0", b"\xff", b"\x7f", b"\x80", b"0" * 11, b"7" * 11, b"-1", b"9" * 30, b"\x80" + b"\xff" * 11)


def mutated(draw: random.Random, data: bytes, others: Sequence[bytes], words: Sequence[bytes] = NUMBERS) -> bytes:
    """One to eight changes of some bytes; ``others`` give parts to splice in, ``words`` what means something."""
    result = bytearray(data)
    for _ in range(1 << draw.randrange(4)):
        _change(draw, result, others, words)
    return bytes(result)


def _change(draw: random.Random, data: bytearray, others: Sequence[bytes], words: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    length = min(1 << draw.randrange(11), len(data) - at)
    kind = draw.randrange(9)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = draw.randrange(256)
    elif kind == 2:
        word = draw.choice(words)
        data[at : at + len(word)] = word
    elif kind == 3:
        data[at:at] = draw.choice(words)
    elif kind == 4:
        del data[at : at + length]
    elif kind == 5:
        data[at:at] = data[at : at + length] * (1 + draw.randrange(3))
    elif kind == 6:
        data[at : at + length] = bytes(length)
    elif kind == 7:
        other = draw.choice(others)
        start = draw.randrange(len(other) + 1)
        data[at : at + length] = other[start : start + length]
    elif draw.random() < 0.2:
        del data[at:]
