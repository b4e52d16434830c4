"""Every kind of bad sample: one in a shard of ten is counted once by its kind, named, and replaced by the same sample
on every number of ranks; without tolerance it ends the run.
"""

import io
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.data import hostile
from tests.data.loading import global_batch, global_batches, open_data, same
from tests.data.making import caption_members, class_folder, encode, pixels, write_tar
from vqclip import dist
from vqclip.data import Batch, CaptionShardsConfig, ClassShardsConfig, TrainData
from vqclip.data.batch import BadSample
from vqclip.errors import DataError
from vqclip.runlog.metrics import JsonLines
from vqclip.runlog.records import BadSamples

JPEG = encode(pixels(3), "JPEG")
PNG = encode(pixels(3), "PNG")
TXT, JSON = b"a good caption", json.dumps({"caption": "a good one"}).encode()


class Case(NamedTuple):
    """A bad sample: its members by extension, how it is counted, and what is said of it (a pattern, as a whole)."""

    members: dict[str, bytes]
    kind: str
    message: str
    captions: str = "txt"


def image(data: bytes, kind: str, message: str, extension: str = "jpg") -> Case:
    return Case({extension: data, "txt": TXT}, kind, message)


def text(data: bytes, kind: str, message: str) -> Case:
    return Case({"jpg": JPEG, "txt": data}, kind, message)


def facts(data: bytes, kind: str, message: str) -> Case:
    return Case({"jpg": JPEG, "json": data}, kind, message, "json")


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


NOT_AN_IMAGE = r"not a JPEG, .* PPM or AVIF image: begins with b'{}.*' \(\d+ bytes\); convert it to one of these"
CUT = r"\.json cannot be read: "
TOO_LARGE = "{0} image of {1}x{1} pixels; at most 50000000 pixels are decoded"
BOMB = r"png image cannot be decoded: Decompressed [Dd]ata [Tt]oo [Ll]arge.*"  # Pillow 10 has no more

CASES = {
    "no caption": Case({"jpg": JPEG}, "missing member", r"has no \.txt"),
    "no image": Case({"txt": TXT}, "missing member", r"has no image \(\.jpg, \.png, \.webp, \.\.\.\)"),
    "empty caption": text(b"", "no caption", r"the caption \(\.txt\) is empty"),
    "gigantic caption": text(b"a" * 70_000, "caption too long", "caption of 70000 characters; at most 65536 are read"),
    "caption of megabytes": text(b"a" * (2 << 20), "too many bytes", "txt of 2097152 bytes; at most 1048576 are read"),
    "caption in Latin-1": text(b"caf\xe9 au lait", "not UTF-8", r"\.txt is not UTF-8: .* at byte 3; save it in UTF-8"),
    "JSON cut short": facts(JSON[:-3], "damaged JSON", CUT + "Unterminated string .*"),
    "deep JSON": facts(b"[" * 100_000, "damaged JSON", CUT + ".*(recursion|Stack overflow).*"),
    "JSON that is no object": facts(b"[1]", "damaged JSON", CUT + "it contains a list; expected an object"),
    "number as caption": facts(b'{"caption": 3}', "damaged JSON", CUT + "'caption' contains a int; expected text or.*"),
    "other keys": facts(b'{"x": 0}', "no caption", r"\.json: no caption under 'caption'; its keys: 'x'; json_keys .*"),
    "half character": facts(rb'{"caption": "a \ud800"}', "not UTF-8", r".* lone surrogate at character 2: 'a \\ud800'"),
    "empty image": image(b"", "image format", "not a JPEG, .* PPM or AVIF image: is empty"),
    "EPS": image(encode(pixels(0), "EPS"), "image format", NOT_AN_IMAGE.format("%!PS")),
    "truncated JPEG": image(JPEG[:300], "damaged image", "(image ends inside its header|jpeg image cannot be dec.*)"),
    "truncated PNG": image(PNG[: len(PNG) // 2], "damaged image", "png image cannot be decoded: .*", "png"),
    "flipped bit": image(flipped(PNG, 600), "damaged image", "png image .* wrong checksum of its chunk b'IDAT'", "png"),
    "PNG of 20000²": image(hostile.huge_png(20_000), "image size", TOO_LARGE.format("png", 20000), "png"),
    "JPEG of 5,000 scans": image(hostile.scans_jpeg(5000), "too many scans", "jpeg image of more than 100 scans or .*"),
    "WebP of two sizes": image(hostile.lying_webp(2000), "damaged image", "webp image cannot be decoded: .*", "webp"),
    "text bomb": image(hostile.text_bomb_png(), "damaged image", BOMB, "png"),
    "profile bomb": image(hostile.profile_bomb_png(), "damaged image", BOMB, "png"),
    "16 bits with a transparent colour": image(
        hostile.png(1, 1, 16, 0, b"\0\x12\x34", before=hostile.png_chunk(b"tRNS", b"\x12\x34")),
        "image mode",
        "16-bit png image with one transparent colour, which Pillow would miss",
        "png",
    ),
}


def shard_with(folder: Path, cases: dict[str, Case], good: int = 9) -> Path:
    """A shard of good samples, 000000000 ..., and after them one for each case."""
    members = caption_members(0, good)
    for number, case in enumerate(cases.values()):
        members |= {f"bad{number}.{extension}": data for extension, data in case.members.items()}
    return write_tar(folder / "00000.tar", members)


def opened(shard: Path, captions: str = "txt", **options: Any) -> TrainData:
    options = {"max_bad_fraction": 0.5, **options}
    return open_data(shard.parent, sources=(CaptionShardsConfig(path=str(shard), captions=captions),), **options)


def recorded(data: TrainData, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The lines of bad_samples.jsonl, and the figures for the log."""
    path = folder / "bad_samples.jsonl"
    path.unlink(missing_ok=True)
    lines = JsonLines(path)
    bad = BadSamples(data, {}, lines)
    bad.collect()
    lines.close()
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [], bad.figures()


def test_the_file_is_bounded_and_a_resumed_run_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vqclip.runlog.records.MOST_LINES", 7)
    bad = [(step, BadSample(step, "no caption", "other", 0)) for step in range(10)]

    def collected(file: Path, parts: list[list[tuple[int, BadSample]]]) -> str:
        counts: dict[str, int] = {}
        for part in parts:
            lines = JsonLines(file, part[0][0])
            data = mock.Mock(take_replaced=lambda part=part: part, take_lengths=dict)
            samples = BadSamples(data, {"replaced": counts}, lines)
            assert samples.collect() == part[-1][0] + 1
            lines.close()
            counts = dict(samples.counts)
        return file.read_text()

    whole = collected(tmp_path / "whole", [bad])
    assert len(whole.splitlines()) == 7
    assert collected(tmp_path / "resumed", [bad[:5], bad[5:]]) == whole
    assert collected(tmp_path / "late", [bad[:8], bad[8:]]) == whole


@pytest.mark.parametrize("name", CASES)
def test_each_is_counted_named_and_replaced(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    shard = shard_with(tmp_path, {name: case})
    data = opened(shard, case.captions)
    (batch,) = data.batches(0, 1)
    (line,), figures = recorded(data, tmp_path)
    assert figures == {"data/replaced": 1, f"data/replaced/{case.kind.replace(' ', '_')}": 1}
    substitute = line.pop("substitute_id")
    assert line.pop("reason").startswith(prefix := f"{shard}: sample bad0: ")
    assert re.fullmatch(re.escape(prefix) + case.message, data.last_replaced[0].reason, re.DOTALL)
    assert line == {"step": 1, "sample_id": 9, "kind": case.kind}
    assert sorted(batch.sample_ids.tolist()) == sorted([*range(9), substitute])

    again = opened(shard, case.captions)
    parts = [next(iter(again.batches(0, 1, rank, (0,) * 4))) for rank in range(4)]
    assert [len(part) for part in parts] == [3, 3, 2, 2]
    assert same([global_batch(parts)], [global_batch([batch])])
    assert recorded(again, tmp_path)[0][0]["substitute_id"] == substitute

    with pytest.raises(DataError, match=r"^1 bad samples among 10: more than data\.max_bad_fraction=0 allows") as error:
        list(opened(shard, case.captions, max_bad_fraction=0).batches(0, 1))
    assert data.last_replaced[0].reason in str(error.value)


def test_an_image_of_more_bytes_than_are_read(tmp_path: Path) -> None:
    members = caption_members(0, 9) | {"bad.jpg": bytes((64 << 20) + 1), "bad.txt": TXT}
    data = opened(shard := write_tar(tmp_path / "00000.tar", members))
    list(data.batches(0, 1))
    (line,), _ = recorded(data, tmp_path)
    assert line["kind"] == "too many bytes"
    assert line["reason"] == f"{shard}: sample bad: image of 67108865 bytes; at most 67108864 are read"


@pytest.mark.parametrize("label", [b"3", b"-1", b"cat", b"", b"1e0", "²".encode(), b"9" * 60])
def test_a_label_without_a_class(tmp_path: Path, label: bytes) -> None:
    folder = class_folder(tmp_path)
    members = {f"{n}.{kind}": data for n in range(9) for kind, data in (("jpg", JPEG), ("cls", b"1"))}
    shard = write_tar(folder / "train" / "0.tar", members | {"bad.jpg": JPEG, "bad.cls": label})
    data = open_data(folder, sources=(ClassShardsConfig(path=folder),), max_bad_fraction=0.5)
    list(data.batches(0, 1))
    (line,), _ = recorded(data, tmp_path)
    shown = repr(label.decode()[:20])
    assert line["kind"] == "class number"
    hint = "; if they are 1 to 3, a blank line before the names in classnames.txt" if label == b"3" else ""
    assert line["reason"] == f"{shard}: sample bad: .cls contains {shown}; expected a class number, 0 to 2{hint}"


def whole(count: int, world_size: int) -> list[int]:
    return [len(range(rank, count, world_size)) for rank in range(world_size)]


def read_on_this_rank(folder: str) -> tuple[list[Batch], list[dict[str, Any]], dict[str, float]]:
    """A good epoch of all cases at once."""
    os.environ["VQCLIP_CACHE"] = f"{folder}/cache"
    data = opened(Path(folder) / "00000.tar", max_bad_fraction=0.9, batch_size=13)
    batches = list(data.batches(0, 10))
    place = Path(folder) / f"{dist.world_size()}-{dist.rank()}"
    place.mkdir()
    return batches, *recorded(data, place)


def test_batches_are_equal_on_all_ranks_whatever_happens(tmp_path: Path, ranks: Any) -> None:
    """Four real ranks: the same global batches, shares of the right size, the same lines and counts on all of them."""
    cases = {name: case for name, case in CASES.items() if case.captions == "txt" and "bomb" not in name}
    shard_with(tmp_path, cases, good=40)
    ((alone, lines, figures),) = ranks(1, read_on_this_rank, str(tmp_path))
    assert {line["kind"] for line in lines} == {case.kind for case in cases.values()}
    assert len({line["sample_id"] for line in lines}) == len(cases)
    assert figures["data/replaced"] == len(lines)
    shown = torch.cat([batch.sample_ids for batch in alone])
    assert len(shown) == 10 * 13
    assert int(shown.max()) < 40  # good ones alone
    results = ranks(4, read_on_this_rank, str(tmp_path))
    for step, parts in enumerate(zip(*(batches for batches, _, _ in results), strict=True)):
        assert [len(part) for part in parts] == whole(13, 4)
        assert same([global_batch(list(parts))], [global_batch([alone[step]])])
    later = opened(tmp_path / "00000.tar", max_bad_fraction=0.9, batch_size=13, workers=2)
    assert same(global_batches(later, 7, 10, 2), [global_batch([batch]) for batch in alone[7:]])
    for _, theirs, counted in results:
        assert theirs == lines
        assert counted == figures


def test_names_cannot_forge_lines_or_steer_a_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "\x1b[2Jx\nstep 1: sample 0 replaced by 7: \u202egpj"
    members = {f"{name}.jpg": JPEG, f"{'x' * 5000}.jpg": JPEG, **caption_members(0, 8)}
    data = opened(shard := write_tar(tmp_path / "00000.tar", members, kind=2))
    list(data.batches(0, 1))
    spelt = r"\x1b[2Jx\nstep 1: sample 0 replaced by 7: \u202egpj"
    lines, _ = recorded(data, tmp_path)
    for shown in (spelt, f"{'x' * 200}... (5000 characters)"):
        assert f"{shard}: sample {shown}: has no .txt" in [line["reason"] for line in lines]
    messages = [record.getMessage() for record in caplog.records if "replaced" in record.getMessage()]
    assert len(messages) == len(lines) == 2
    assert all(message.isprintable() for message in messages)
    with pytest.raises(DataError) as error:
        list(opened(shard, max_bad_fraction=0).batches(0, 1))
    assert str(error.value).count("\n") == len(lines)
    assert str(error.value).replace("\n", "").isprintable()


def test_pickles_in_a_shard_are_bytes(tmp_path: Path) -> None:
    """Whatever extension they have; nothing is unpickled, those with extensions of ours are bad images and captions."""
    marker = tmp_path / "was here"
    evil = hostile.marking_pickle(marker)
    torch.save({"a": hostile.Marker(marker)}, stream := io.BytesIO())
    extensions = ("pkl", "pickle", "pth", "pt", "npy", "npz", "pyd", "ten", "mp", "msg", "cbor", "dill", "joblib")
    members = caption_members(0, 9)
    for number, payload in enumerate((evil, stream.getvalue())):
        members |= {f"{n:09d}.{'x' * number}{extension}": payload for n in range(9) for extension in extensions}
    members |= {"bad.jpg": evil, "bad.txt": TXT, "worse.jpg": JPEG, "worse.txt": evil, "worst.jpg": JPEG}
    members |= {"worst.json": evil, "index.pkl": evil, "000000000.__module__": evil}
    shard = write_tar(tmp_path / "00000.tar", members)
    data = opened(shard, batch_size=12)
    list(data.batches(0, 1))
    kinds = {bad.sample_id: bad.kind for bad in data.last_replaced}
    assert kinds == {9: "image format", 10: "not UTF-8", 11: "missing member"}
    reasons = {bad.sample_id: bad.reason for bad in data.last_replaced}
    assert re.match(rf"{shard}: sample bad: " + NOT_AN_IMAGE.format(r"\\x80\\x04\\x95"), reasons[9])
    assert reasons[10].startswith(f"{shard}: sample worse: .txt is not UTF-8: invalid start byte at byte 0")
    assert not marker.exists()
