"""Tables of image files: one row for each sample, in arrays that take little memory for millions of rows."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vqclip.data.arrays import load_arrays, save_arrays

__all__ = ["FileTable", "TableBuilder", "Texts", "checksum", "input_state", "load_table", "versions"]


def versions(name: str) -> dict[str, object]:
    """Return the facts by which a stored table or index of image files is known; see `vqclip.data.arrays`."""
    return {"version": 2, "name": name}


@dataclass(frozen=True)
class Texts:
    """Strings one after the other."""

    content: np.ndarray
    """uint8: all strings in UTF-8; lone surrogates, as in file names that are not UTF-8, are kept."""
    ends: np.ndarray
    """int64: end of each string in `content`."""

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.content[start : int(self.ends[index])].tobytes().decode("utf-8", "surrogatepass")

    def span(self, start: int, stop: int) -> bytes:
        """Return the strings `start` to `stop` and their ends in bytes, for checksums."""
        ends = self.ends[start:stop]
        first = int(self.ends[start - 1]) if start else 0
        last = int(ends[-1]) if len(ends) else first
        return self.content[first:last].tobytes() + (ends - first).tobytes()


@dataclass(frozen=True)
class FileTable:
    """Image files with their captions and labels."""

    paths: Texts
    """Path of each of n image files, relative to the folder of the source, or absolute; "" in a row without one."""
    captions: Texts
    """Captions of all rows; empty if they are in files or are prompts."""
    caption_ends: np.ndarray
    """``(n,)`` int64: number of captions up to and including each row."""
    labels: np.ndarray
    """``(n,)`` int64: class number; -1 without one."""
    rows: np.ndarray
    """``(n,)`` int64: number of each row in the user's file, for messages; -1 without one."""
    classnames: tuple[str, ...]
    """Names of the classes."""
    templates: tuple[str, ...]
    """Prompts that are the captions; empty if there are other captions."""
    facts: dict[str, Any]
    """JSON-able: what else a kind has found out, such as ``notes``."""
    inputs: dict[str, list[int]]
    """Size and modification time of each file and folder that the table was made from."""

    def __len__(self) -> int:
        return len(self.labels)

    def row_captions(self, index: int) -> list[str]:
        """Return the captions of a row as they are in the table."""
        start = int(self.caption_ends[index - 1]) if index else 0
        return [self.captions[number] for number in range(start, int(self.caption_ends[index]))]


class TableBuilder:
    """Collects the rows of a `FileTable`."""

    def __init__(self) -> None:
        self._paths, self._captions = _Collector(), _Collector()
        self._caption_ends, self._labels, self._rows = array("q"), array("q"), array("q")
        self._inputs: dict[str, list[int]] = {}

    def read_from(self, path: Path) -> Path:
        """Record that the table depends on a file or folder, which is about to be read, and return it."""
        self._inputs[str(path)] = input_state(path)
        return path

    def add(self, path: str, captions: Iterable[str] = (), label: int = -1, row: int = -1) -> None:
        """Add a row."""
        self._paths.add(path)
        for caption in captions:
            self._captions.add(caption)
        self._caption_ends.append(len(self._captions.ends))
        self._labels.append(label)
        self._rows.append(row)

    def __len__(self) -> int:
        return len(self._labels)

    def finish(
        self, classnames: Sequence[str] = (), templates: Sequence[str] = (), facts: dict[str, Any] | None = None
    ) -> FileTable:
        """Return the table."""
        ends, labels, rows = (np.array(each, np.int64) for each in (self._caption_ends, self._labels, self._rows))
        return FileTable(
            paths=self._paths.finish(),
            captions=self._captions.finish(),
            caption_ends=ends,
            labels=labels,
            rows=rows,
            classnames=tuple(classnames),
            templates=tuple(templates),
            facts=facts or {},
            inputs=self._inputs,
        )


class _Collector:
    def __init__(self) -> None:
        self.content, self.ends = bytearray(), array("q")

    def add(self, text: str) -> None:
        self.content += text.encode("utf-8", "surrogatepass")
        self.ends.append(len(self.content))

    def finish(self) -> Texts:
        return Texts(np.frombuffer(bytes(self.content), np.uint8), np.array(self.ends, np.int64))


def input_state(path: str | Path) -> list[int]:
    """Return size and modification time of a file or folder; -1 if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return [-1, -1]
    return [status.st_size, status.st_mtime_ns]


def load_table(file: Path, name: str, make: Callable[[], FileTable]) -> FileTable:
    """Return the stored table if all files and folders that it was made from are unchanged, otherwise a new one.

    Args:
        file: `.npz` in the cache.
        name: the data, for messages.
        make: makes the table.

    Raises:
        DataError: from `make`, or the cache cannot be written.
    """
    stored = load_arrays(file, versions(name), name, _table)
    if stored is not None and all(input_state(path) == state for path, state in stored.inputs.items()):
        return stored
    table = make()
    facts = {
        "classnames": table.classnames,
        "templates": table.templates,
        "facts": table.facts,
        "inputs": table.inputs,
    }
    save_arrays(file, versions(name) | facts, dict(_arrays(table)), name)
    return table


def _arrays(table: FileTable) -> Iterator[tuple[str, np.ndarray]]:
    yield from (("paths", table.paths.content), ("path_ends", table.paths.ends))
    yield from (("captions", table.captions.content), ("text_ends", table.captions.ends))
    yield from (("caption_ends", table.caption_ends), ("labels", table.labels), ("rows", table.rows))


def _table(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> FileTable:
    return FileTable(
        paths=Texts(arrays["paths"], arrays["path_ends"]),
        captions=Texts(arrays["captions"], arrays["text_ends"]),
        caption_ends=arrays["caption_ends"],
        labels=arrays["labels"],
        rows=arrays["rows"],
        classnames=tuple(map(str, facts["classnames"])),
        templates=tuple(map(str, facts["templates"])),
        facts=dict(facts["facts"]),
        inputs=dict(facts["inputs"]),
    )


def checksum(*parts: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
