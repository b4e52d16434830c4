import io
import json
import os
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vqclip.data.remote.files import Shard
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.tars.index import TarIndex
from vqclip.data.tars.make import CHUNK, IndexMaker, Parts
from vqclip.data.tars.open import TarSet
from vqclip.data.tars.reader import TarReader


def pixels(number: int, height: int = 20, width: int = 24, channels: int = 3) -> np.ndarray:
    """Smooth noise of its own for every number."""
    small = np.random.default_rng(number).integers(0, 256, (4, 4, channels), dtype=np.uint8)
    mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels]
    image = Image.fromarray(small.squeeze() if channels == 1 else small, mode=mode)
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def make_files(folder: Path, names: str, content: bytes = b"") -> Path:
    """A folder with files of these names, which are divided by blanks."""
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def write_parquet(path: Path, columns: Mapping[str, Any], group: int = 4, **options: Any) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path, row_group_size=group, **options)
    return path


def encode(image: np.ndarray | Image.Image, kind: str = "JPEG", **options) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def tar_bytes(members: Mapping[str, bytes], kind: int = tarfile.USTAR_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes], kind: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members, kind))
    return path


NOT_UTF8 = os.fsdecode(b"caf\xe9")
"""Name of a file in Latin-1."""


def caption_members(first: int, count: int) -> dict[str, bytes]:
    """Samples with .jpg, .txt and .json, as img2dataset writes them."""
    members: dict[str, bytes] = {}
    for number in range(first, first + count):
        key = f"{number:09d}"
        members[f"{key}.jpg"] = encode(pixels(number))
        members[f"{key}.txt"] = f"caption {number}".encode()
        facts = {"caption": f"json {number}", "many": [f"a{number}", f"b{number}"]}
        members[f"{key}.json"] = json.dumps(facts).encode()
    return members


def caption_shards(folder: Path, counts: tuple[int, ...], first: int = 0) -> Path:
    """A folder of tars with so many samples each."""
    for shard, count in enumerate(counts):
        write_tar(folder / f"{shard:05d}.tar", caption_members(first, count))
        first += count
    return folder


def class_folder(folder: Path, count: int = 6, split: str = "train") -> Path:
    """clip_benchmark's layout with three classes."""
    members: dict[str, bytes] = {}
    for number in range(count):
        members[f"s{number:07d}.jpg"] = encode(pixels(number))
        members[f"s{number:07d}.cls"] = str(number % 3).encode()
    write_tar(folder / split / "0.tar", members)
    (folder / split / "nshards.txt").write_text("1\n")
    (folder / "classnames.txt").write_text("cat\ndog\nred panda\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of a {c}\nthe {c}\n")
    return folder


def count_calls(function: Callable[[], None]) -> int:
    """The calls of Python functions while it runs: a measure of work that other load on the machine does not change."""
    calls = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def open_tars(*paths: Path, **options) -> TarReader:
    """A reader of tars on this machine; see `TarSet`."""
    return TarSet(paths, RemoteConfig(), **options).open()


def make_index(
    shards: Sequence[Shard], path: Path, chunk: int = CHUNK, parts: Parts | None = None, **options: Any
) -> TarIndex:
    """The index of some shards, made at a path; parts are in a folder beside it."""
    maker = IndexMaker(shards, parts or Parts(path.with_name(f"{path.name}.parts")), **options)
    maker.read_all()
    return maker.write(path, chunk)


def member_places(reader: TarReader) -> np.ndarray:
    """``(samples, 4, 2)``: offset and size of the members in an index of tars on this machine."""
    return np.array([[reader.index.member(row, column) for column in range(4)] for row in range(len(reader))])
