"""Tables of image files: one row for each sample, in arrays that take little memory for millions of rows.

A lister adds rows in its own order. Rows that name the same image with the same class become one sample with the
captions of all; rows that cannot be used stay as bad samples, with what is wrong with them in place of captions.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vqclip.data.table_file import Table, Texts, find_table, save_table
from vqclip.io.files import Stamp

__all__ = ["PROBLEM", "FileTable", "TableBuilder", "checksum", "input_state", "load_table", "span", "versions"]

PROBLEM = -2
"""Label of a row that cannot be used; its one caption says why."""


def versions(name: str) -> dict[str, object]:
    """Return the facts by which a stored table or index of image files is known."""
    return {"format": "vqclip-files", "version": 1, "name": name}


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
    """``(n,)`` int64: class number; -1 without one; `PROBLEM` in a row that cannot be used."""
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
        return [self.captions.read(number) for number in range(start, int(self.caption_ends[index]))]


class TableBuilder:
    """Collects the rows of a `FileTable`."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Sentences on what is left out, grouped or ambiguous."""
        self._paths: list[str] = []
        self._captions: list[str] = []
        self._counts, self._labels, self._rows = array("q"), array("q"), array("q")
        self._inputs: dict[str, list[int]] = {}

    def read_from(self, path: Path) -> Path:
        """Record that the table depends on a file or folder, which is about to be read, and return it."""
        self._inputs[str(path)] = input_state(path)
        return path

    def add(self, path: str, captions: Iterable[str] = (), label: int = -1, row: int = -1) -> None:
        """Add a row."""
        before = len(self._captions)
        self._paths.append(path)
        self._captions += captions
        self._counts.append(len(self._captions) - before)
        self._labels.append(label)
        self._rows.append(row)

    def add_problem(self, path: str, problem: str, row: int = -1) -> None:
        """Add a row that cannot be used, with what is wrong with it."""
        self.add(path, [problem], PROBLEM, row)

    def relabel(self, labels: Mapping[int, int]) -> None:
        """Replace labels."""
        self._labels = array("q", [labels.get(label, label) for label in self._labels])

    def __len__(self) -> int:
        return len(self._labels)

    def finish(
        self, classnames: Sequence[str] = (), templates: Sequence[str] = (), facts: dict[str, Any] | None = None
    ) -> FileTable:
        """Return the table, rows of the same image and class as one; the notes become ``facts["notes"]``."""
        counts, labels, rows = (np.array(each, np.int64) for each in (self._counts, self._labels, self._rows))
        first, sample = self._samples(labels)
        starts = np.cumsum(counts) - counts
        order = np.argsort(sample, kind="stable")  # rows in the order of their samples
        captions = [self._captions[n] for row in order.tolist() for n in range(starts[row], starts[row] + counts[row])]
        return FileTable(
            paths=Texts.join([self._paths[row] for row in first.tolist()]),
            captions=Texts.join(captions),
            caption_ends=np.cumsum(np.bincount(sample, counts, len(first)).astype(np.int64)),
            labels=labels[first],
            rows=rows[first],
            classnames=tuple(classnames),
            templates=tuple(templates),
            facts={**(facts or {}), "notes": self.notes},
            inputs=self._inputs,
        )

    def _samples(self, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first row of each sample, and the sample of each row, and note what was grouped."""
        alone = labels == PROBLEM
        first, sample = _number(map(_plain, self._paths), alone)
        images = sample
        if (labels >= 0).any():
            keys = (f"{image} {label}" for image, label in zip(images.tolist(), labels.tolist(), strict=True))
            first, sample = _number(keys, alone)
        if several := int((np.bincount(sample) > 1).sum()):
            rows = len(sample) - len(first) + several
            self.notes.append(
                f"rows of the same image file are one sample with all their captions: "
                f"{_count(several, 'image', 'images')}, {rows} rows"
            )
        if several := int((np.bincount(images[first]) > 1).sum()):
            self.notes.append(
                f"{_count(several, 'image has', 'images have')} rows of different classes: a sample for each class"
            )
        return first, sample


def _number(keys: Iterable[str], alone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number equal keys in the order of their first places; empty and ``alone`` ones are equal to no other.

    Returns:
        The first place of each number, and the number at each place.
    """
    numbers: dict[str, int] = {}
    first, found = array("q"), array("q")
    for place, (key, is_alone) in enumerate(zip(keys, alone.tolist(), strict=True)):
        number = numbers.setdefault(key, len(first)) if key and not is_alone else len(first)
        if number == len(first):
            first.append(place)
        found.append(number)
    return np.array(first, np.int64), np.array(found, np.int64)


def _plain(path: str) -> str:
    return os.path.normpath(path) if "./" in path or "//" in path else path


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def input_state(path: str | Path) -> list[int]:
    """Return size and modification time of a file or folder; -1 if there is none."""
    try:
        return [*Stamp.of(path)]
    except (OSError, ValueError):
        return [-1, -1]


def load_table(file: Path, name: str, make: Callable[[], FileTable]) -> FileTable:
    """Return the stored table if all files and folders that it was made from are unchanged, otherwise a new one.

    Args:
        file: place in the cache.
        name: the data, for messages.
        make: makes the table.

    Raises:
        DataError: from `make`, or the cache cannot be written.
    """
    stored = find_table(file, versions(name), name, _read_table)
    if stored is not None and all(input_state(path) == state for path, state in stored.inputs.items()):
        return stored
    table = make()
    facts = {"classnames": table.classnames, "templates": table.templates, "facts": table.facts}
    inputs = Texts.join(table.inputs)  # as many as there are folders
    arrays = {"inputs": inputs.content, "input_ends": inputs.ends}
    arrays |= {"input_states": np.array(list(table.inputs.values()), np.int64).reshape(-1, 2)}
    arrays |= {"paths": table.paths.content, "path_ends": table.paths.ends}
    arrays |= {"captions": table.captions.content, "text_ends": table.captions.ends}
    arrays |= {"caption_ends": table.caption_ends, "labels": table.labels, "rows": table.rows}
    save_table(file, versions(name) | facts, arrays, name)
    return table


def _read_table(table: Table) -> FileTable:
    facts, arrays = table
    inputs, states = Texts(arrays["inputs"], arrays["input_ends"]), arrays["input_states"].tolist()
    return FileTable(
        paths=Texts(arrays["paths"], arrays["path_ends"]),
        captions=Texts(arrays["captions"], arrays["text_ends"]),
        caption_ends=arrays["caption_ends"],
        labels=arrays["labels"],
        rows=arrays["rows"],
        classnames=tuple(map(str, facts["classnames"])),
        templates=tuple(map(str, facts["templates"])),
        facts=dict(facts["facts"]),
        inputs={inputs.read(index): state for index, state in enumerate(states)},
    )


def span(texts: Texts, start: int, stop: int) -> bytes:
    """Return the strings ``start`` to ``stop`` and their ends in bytes, for checksums."""
    ends = texts.ends[start:stop]
    first = int(texts.ends[start - 1]) if start else 0
    return texts.content[first : int(ends[-1]) if len(ends) else first].tobytes() + (ends - first).tobytes()


def checksum(*parts: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
