"""Headers that are read many at a time give what they give one by one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.data.making import count_calls, write_tar
from tests.fuzz import shards
from vqclip.data.tars.headers import Member, TarWalk
from vqclip.errors import DataError


def outcome(data: bytes, block: int) -> tuple[list[Member], str]:
    """The members, and the message that ends them; and all bytes come again."""
    members: list[Member] = []
    again = b""
    try:
        tar = TarWalk(Path("a.tar"), len(data))
        for part, found in tar.walk(data[at : at + block] for at in range(0, len(data), block)):
            assert all(len(again) <= member.begin for member in found)
            again += part
            assert all(member.begin < len(again) for member in found)
            members += found
    except DataError as error:
        return members, str(error)
    assert again == data
    return members, ""


def cases(first: int, count: int) -> list[bytes]:
    known = shards.seeds()
    return [*known, *(shards.case(random.Random(number), known) for number in range(first, first + count))]


def check(data: bytes) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TarWalk, "_read_ordinary", lambda *_: None)
        members, message = outcome(data, len(data) or 1)
    fast, same = outcome(data, len(data) or 1)
    assert (same, fast[: len(members)]) == (message, members[: len(fast)])
    if not message:
        assert fast == members
        for block in (512, 700, 4096):
            assert outcome(data, block) == (members, message)
    return message


def test_many_at_a_time() -> None:
    messages = [check(data) for data in cases(0, 60)]
    assert 10 < sum(map(bool, messages)) < len(messages) - 10


@pytest.mark.parametrize("size", [b"-0000000777", b"+0000000777", b"0o000000100", b"0_000000100", b" 0000000100"])
def test_sizes_that_python_reads_and_tar_does_not(tmp_path: Path, size: bytes) -> None:
    data = bytearray(write_tar(tmp_path / "a.tar", {f"{n}.jpg": bytes(100) for n in range(4)}).read_bytes())
    data[1024 + 124 : 1024 + 135] = size
    data[1024 + 148 : 1024 + 156] = b" " * 8
    data[1024 + 148 : 1024 + 156] = b"%06o\0 " % sum(data[1024:1536])
    message = check(bytes(data))
    assert ("has no valid size" in message) == (not size.startswith(b" "))


def test_headers_take_few_calls(tmp_path: Path) -> None:
    """Measured: 2.3 us a member; 20 us one by one."""
    data = write_tar(tmp_path / "a.tar", {f"{n:05d}.jpg": b"x" for n in range(5000)}).read_bytes()

    def read() -> None:
        assert len(outcome(data, len(data))[0]) == 5000

    assert count_calls(read) < 8 * 5000
