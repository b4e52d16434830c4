"""Token shards as WebDataset tars: ``KEY.image.npy``, ``KEY.text.npy``, ``KEY.txt`` and ``KEY.json`` for each sample.

The arrays contain no pickle, so webdataset's ``.decode()`` reads them with its defaults. ``text.npy`` is the
concatenation of the ids of all captions of a sample; ``text_lengths`` in the JSON gives the number of tokens of each.
``.txt`` is the first caption, ``captions`` in the JSON are all. Headers contain no time, user or machine, so equal
samples make equal bytes (webdataset's writer stores users, and changes them between versions).
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vqclip.data.tar import walk
from vqclip.data.tokens.layout import IdLayout, TokenRecord, require_valid
from vqclip.errors import DataError, printable
from vqclip.io.files import open_regular

__all__ = ["TarShard", "write_tar"]

_MEMBERS = ("image.npy", "text.npy", "txt", "json")
_NAME = re.compile(r"^((?:.*/)?[^./]+)\.(" + "|".join(map(re.escape, _MEMBERS)) + ")$", re.DOTALL)
_MAX_BYTES = 64 << 20
"""Largest size of a sample."""
_MAX_JSON = 4 << 20
"""Largest size of its JSON; docs/security.md promises this limit."""


def write_tar(file: BinaryIO, records: Iterable[TokenRecord]) -> None:
    """Write samples in their order, with the end-of-archive mark."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for record in records:
            for name, data in _members(record):
                info = tarfile.TarInfo(f"{record.key}.{name}")  # time, user and group are 0, names are empty
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def _members(record: TokenRecord) -> Iterable[tuple[str, bytes]]:
    facts: dict[str, Any] = {"key": record.key, "sample_id": record.sample_id, "captions": record.captions}
    if record.label >= 0:
        facts["label"] = record.label
    if record.image is not None:
        yield "image.npy", _npy(record.image)
    if record.texts is not None:
        yield "text.npy", _npy(np.concatenate(record.texts))
        facts["text_lengths"] = [len(ids) for ids in record.texts]
    yield "txt", record.captions[0].encode()
    text = json.dumps(facts, sort_keys=True).encode()
    if len(text) > _MAX_JSON:  # the reader would refuse it
        raise DataError(
            printable(
                f"sample {record.key}: captions of {len(text)} bytes as JSON; expected at most {_MAX_JSON}: take "
            )
            + "it out, or use --format parquet"
        )
    yield "json", text


def _npy(ids: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(ids), version=(1, 0), allow_pickle=False)
    return stream.getvalue()


class TarShard:
    """Reads the samples of a tar in any order; each is one read of the file.

    Args:
        path: the tar.
        image: layout of image ids; None without them.
        text: layout of text ids; None without them.

    Raises:
        DataError: it cannot be opened, is damaged, or contains other members than those of token shards.
    """

    def __init__(self, path: Path, image: IdLayout | None, text: IdLayout | None):
        self._path, self._image, self._text = path, image, text
        self._file = -1  # first, since `close` needs it even after an error here
        try:
            with open_regular(path) as file:
                self._file = os.dup(file.fileno())
            self._places = self._index()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None

    def __len__(self) -> int:
        return len(self._places)

    def read(self, row: int) -> TokenRecord:
        """Read one sample.

        Raises:
            DataError: it is damaged; the message names it.
        """
        start = int(self._places[row, 0, 0])
        last = self._places[row, -1]
        data = os.pread(self._file, int(last.sum()) - start, start)
        parts = {
            name: data[offset - start : offset - start + size]
            for name, (offset, size) in zip(self._expected, self._places[row].tolist(), strict=True)
        }
        place = f"{self._path}: sample {row}"
        try:
            facts = json.loads(parts["json"])
            key, sample_id, captions = facts["key"], facts["sample_id"], _strings(facts["captions"])
            place = printable(f"{self._path}: sample {key}", one_line=True)
            texts = self._texts(parts["text.npy"], facts["text_lengths"], place) if self._text else None
            label = facts.get("label", -1)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{place}: damaged ({type(error).__name__}: {error})", "damaged ids") from None
        image = self._image.require(_array(parts["image.npy"], place), place) if self._image else None
        if texts is not None and len(texts) != len(captions):
            raise DataError(f"{place}: ids of {len(texts)} captions; it has {len(captions)}", "damaged ids")
        return require_valid(TokenRecord(key, sample_id, label, captions, image, texts), place)

    def _texts(self, data: bytes, lengths: list[int], place: str) -> tuple[np.ndarray, ...]:
        assert self._text is not None
        ids = _array(data, place)
        if sum(lengths) != len(ids):
            raise DataError(f"{place}: {len(ids)} tokens; text_lengths says {sum(lengths)}", "damaged ids")
        return tuple(self._text.require(part, place) for part in np.split(ids, np.cumsum(lengths)[:-1]))

    @property
    def _expected(self) -> tuple[str, ...]:
        here = {"image.npy": self._image is not None, "text.npy": self._text is not None}
        return tuple(name for name in _MEMBERS if here.get(name, True))

    def _index(self) -> np.ndarray:
        """Return ``(samples, members, 2)`` int64: offset and size of each member."""
        expected, places, key = self._expected, [], ""
        for number, member in enumerate(walk(self._path, self._file, os.fstat(self._file).st_size)):
            match = _NAME.match(member.name)
            first = number % len(expected) == 0
            if match is None or match[2] != expected[number % len(expected)] or not (first or match[1] == key):
                raise DataError(
                    f"{self._path}: member {member.name!r} at offset {member.offset}; expected "
                    f"{'KEY' if first else key}.{expected[number % len(expected)]}: a damaged or a foreign shard"
                )
            key = match[1]
            places.append((member.offset, member.size))
        if len(places) % len(expected):
            raise DataError(f"{self._path}: ends within sample {key}")
        table = np.array(places, dtype=np.int64).reshape(-1, len(expected), 2)
        if len(table) and (table[:, -1].sum(axis=1) - table[:, 0, 0]).max() > _MAX_BYTES:
            raise DataError(f"{self._path}: a sample of more than {_MAX_BYTES} bytes")
        if len(table) and table[:, -1, 1].max() > _MAX_JSON:
            raise DataError(f"{self._path}: JSON of more than {_MAX_JSON} bytes")
        return table

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError("captions: expected a list of strings")
    return tuple(value)


def _array(data: bytes, place: str) -> np.ndarray:
    try:
        array: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        return array
    except Exception as error:  # numpy evaluates the header as a literal, which raises nearly anything
        raise DataError(f"{place}: .npy cannot be read ({type(error).__name__}: {error})", "damaged ids") from None
