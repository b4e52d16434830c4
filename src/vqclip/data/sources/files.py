"""Base of sources whose samples are image files that a table lists.

make the table (one rank of each cache) -> index its files, in parts (all ranks) -> read any sample

An index holds size, modification time and SHA-256 of every file, -1 for a missing one. A file that differs from its
index ends the run: if another sample replaced it, what is learned would depend on the moment of the change.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import os
import unicodedata
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vqclip.data.remote.urls import display_url, local_path
from vqclip.data.sources.base import MAX_BYTES, Place, Preparation, RawSample, SourceConfigBase, name_sample
from vqclip.data.sources.class_names import checksum_prompts, fill_templates
from vqclip.data.sources.columns import CaptionFiles, ColumnConfig, Row, require_usable
from vqclip.data.sources.listing import (
    PROBLEM,
    FileTable,
    Listed,
    TableBuilder,
    checksum,
    list_images,
    state_of,
    versions,
)
from vqclip.data.table_file import find_table, save_table
from vqclip.errors import ConfigError, DataError, StorageError, encodable, printable
from vqclip.io.files import Stamp, cache_folder, expand_home, open_regular
from vqclip.process import progress

logger = logging.getLogger("vqclip.data")

PART_SIZE = 5000
"""Files of a part: one part is indexed by one rank, and becomes one token shard."""
MISSING = -1
"""Size of a file that could not be read."""
_HEARTBEAT = 200
"""Files between two signs of life."""
_SHOWN = 200
"""Characters of a path in messages."""
_BASE64 = ("/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD", "SUkq", "TU0A", "Qk0", "Qk1", "Qk2", "Qk3")
"""Beginnings of images in base64."""


class FileSourceConfig(SourceConfigBase):
    """Configuration of a source of image files; a kind implements `table`, and has a `path`."""

    path: Place
    """The file, on this machine, that lists the images."""

    def table(self) -> FileTable:
        """List the images.

        Raises:
            DataError: there are none, or the list cannot be read.
        """
        raise NotImplementedError

    @property
    def listing(self) -> Path:
        """The file or folder that lists the images; absolute."""
        return self.local_file(self.path)

    @property
    def root(self) -> Path:
        """The folder that relative paths of images refer to; absolute."""
        return self.listing

    def local_file(self, path: str | Path) -> Path:
        """Return the absolute form of a path on this machine; raises ConfigError for a URL."""
        if (local := local_path(str(path))) is None:
            raise ConfigError(f"path: got {display_url(str(path))}; kind: {self.kind} reads files on this machine")
        return expand_home(local).absolute()

    def caption_files(self, table: FileTable) -> CaptionFiles | None:
        """Return the captions in files beside the images; None if they are in the table or are prompts."""
        return None

    def load_table(self) -> FileTable:
        """Return the table, from the cache if all that it was made from is unchanged.

        Raises:
            DataError: see `table`, or the cache cannot be written.
        """
        file, name = self._stem().with_suffix(".table.safetensors"), str(self.listing)
        stored = find_table(file, versions(name), name)
        if stored is None or not (table := FileTable(*stored)).is_current:
            table = self.table()
            save_table(file, table.facts | versions(name), table.arrays, name)
        return table

    def preparations(self) -> Sequence[Preparation]:
        """Return the parts that are indexed, after making the table; for `vqclip.data.open_sources`.

        Raises:
            DataError: see `table`.
        """
        table = self.load_table()
        return [partial(self.index, table, start) for start in range(0, len(table), PART_SIZE)]

    def index(self, table: FileTable, start: int, is_checked: bool = False) -> dict[str, np.ndarray]:
        """Return the index of the files of a part, after indexing those that have changed since.

        Args:
            table: the rows.
            start: first row of the part.
            is_checked: whether it has just been compared with the files.

        Returns:
            ``states``, ``(rows, files, 2)`` int64: size, -1 for a file that could not be read, and modification time.
            ``digests``, ``(rows, files, 32)`` uint8: SHA-256.

        Raises:
            DataError: a file is written to while it is read, or the cache cannot be written.
        """
        name, stop = str(self.listing), min(start + PART_SIZE, len(table))
        samples = [table.read(row) for row in range(start, stop)]
        text = "\0".join(path for each in samples for path in (each.path, each.text))
        facts = {**versions(name), "paths": checksum(text.encode("utf-8", "surrogatepass"))}
        file = self._stem().with_suffix(f".{start // PART_SIZE:05d}.safetensors")
        found = find_table(file, facts, name)
        if found is not None and is_checked:
            return found.arrays
        shape = (len(samples), 2 if self.caption_files(table) else 1)
        states, digests = np.full((*shape, 2), MISSING - 1, np.int64), np.zeros((*shape, 32), np.uint8)
        if found is not None:
            states[:], digests[:] = found.arrays["states"], found.arrays["digests"]
        index: dict[str, np.ndarray] = {"states": states, "digests": digests}
        changed, root = set[int](), self.root
        for row, known in enumerate(states.tolist()):  # lists are faster to index
            if row % _HEARTBEAT == 0:
                progress.heartbeat()
            try:
                files = _files_of(samples[row], root)
            except DataError:  # `FileSource.read` says what is wrong with it
                files = [""] * len(known)
            for column, path in enumerate(files):
                was_missing = known[column] == [MISSING, MISSING]
                if (state := state_of(path)) == [MISSING, MISSING]:
                    path = _as_on_disk(path)
                    state = state_of(path)
                if state != known[column] and (not was_missing or os.path.isfile(path)):
                    changed.add(row)
                    size, modified, digest = _hash(path)
                    states[row, column] = size, modified
                    digests[row, column] = np.frombuffer(digest, np.uint8)
        if changed or found is None:
            save_table(file, facts, index, name)
            logger.info("indexed %s: %d image files of samples %d to %d", name, len(changed), start, stop - 1)
        return index

    def build(self) -> FileSource:
        """Open the images, after indexing those without an index."""
        return FileSource(self)

    def _stem(self) -> Path:
        keys = self.model_dump(mode="json", exclude={"weight", "path"})
        text = json.dumps([os.fspath(self.listing), keys], sort_keys=True)  # ASCII
        return cache_folder() / "index" / checksum(text.encode())[:24]


class ListConfig(ColumnConfig, FileSourceConfig):
    """Configuration of a file that lists images; a kind implements `rows`.

    Relative paths refer to the folder of the file, or to `images`; they cannot leave it. Absolute paths are read
    wherever they point to: use tables from people that you trust with the images on your machine.
    """

    images: Path | None = None
    """Folder that relative paths of images refer to. null: the folder of the file, or one beside it that has the first
    images."""

    @property
    def root(self) -> Path:
        """The folder that relative paths refer to."""
        return self.listing.parent if self.images is None else self.local_file(self.images)

    def rows(self, path: Path, notes: list[str]) -> Iterator[Row]:
        """Yield the rows of the file, and add remarks to the notes.

        Raises:
            DataError: it cannot be read.
        """
        raise NotImplementedError

    def table(self) -> FileTable:
        """Read the file; raises DataError for a missing column, or one without rows."""
        builder = TableBuilder()
        path, beside = builder.read_from(self.listing), self.images is None
        return list_images(self.rows(path, builder.notes), self, builder, path, self.root, beside)


class FileSource:
    """A `Source` of image files that a table lists.

    Args:
        config: makes the table.
        is_checked: whether the indexes have just been compared with the files.

    Raises:
        DataError: see `FileSourceConfig.table`; or none of the files can be read.
    """

    def __init__(self, config: FileSourceConfig, is_checked: bool = False):
        self.config = config
        self._table = table = config.load_table()
        self._listing, self._root = config.listing, config.root  # once: a listing may look for files
        self._captions = config.caption_files(table)
        self.classnames: tuple[str, ...] = tuple(table.facts["classnames"])
        self.templates: tuple[str, ...] = tuple(table.facts["templates"])
        self.notes: tuple[str, ...] = tuple(table.facts["notes"])
        self._prompts = fill_templates(self.templates, self.classnames)
        self.shards: list[dict[str, str | int]] = []
        states = []
        for number, start in enumerate(range(0, len(table), PART_SIZE)):
            index = config.index(table, start, is_checked)
            states.append(index["states"])
            total = int(np.maximum(index["states"][..., 0], 0).sum())
            name, sha256 = f"{encodable(self._listing.stem)}-{number:05d}", checksum(index["digests"].tobytes())
            self.shards.append({"name": name, "bytes": total, "samples": len(index["states"]), "sha256": sha256})
        self._states = np.concatenate(states)
        self._require_some()

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int) -> RawSample:
        """Return image, captions and label of one sample; see `Source.read`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample = self._table.read(index)
        with name_sample(self.name(index)):
            if sample.label == PROBLEM:
                raise DataError(sample.captions[0], "damaged row")
            keys: Sequence[int] = sample.keys
            if self.templates:
                captions = self._prompts[sample.label]
            elif self._captions is not None:
                text = self._read_file(sample, index, 1, self._captions.kind)
                captions, keys = self._captions.parse(text)
            else:
                captions = require_usable(sample.captions)
            used = tuple(keys) if self.config.caption_weights else ()
            return RawSample(self._read_file(sample, index, 0, "image"), captions, sample.label, used)

    def key(self, index: int) -> str:
        """Return the number of the sample; see `ShardedSource.key`."""
        return f"{index:09d}"

    def name(self, index: int) -> str:
        """Return list, row and file, for messages: ``/data/train.csv: row 17: images/a.jpg``."""
        sample = self._table.read(index)
        path = _cut(sample.path)
        text = f"{self._listing}: row {sample.row}" if sample.row >= 0 else str(self._root / path)
        text += f": {path}" if sample.row >= 0 and path else ""
        return printable(text, one_line=True)

    def place(self, index: int) -> str:
        """Return the path of the file, and its row; see `ShardedSource.place`."""
        sample = self._table.read(index)
        return f"{sample.path} (row {sample.row})" if sample.row >= 0 else sample.path

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`; contents, captions and labels count, names and folders do not."""
        files = self._captions
        return {
            "kind": "files",
            "samples": len(self),
            "sha256": checksum(*(str(shard["sha256"]).encode() for shard in self.shards)),
            "captions_sha256": self._table.facts["texts_sha256"],
            "prompts_sha256": checksum_prompts(self._prompts),
            **({"captions": "table", "json_keys": []} if files is None else files.fingerprint),
        }

    def _require_some(self) -> None:
        """Raise DataError if no sample can be used: then the paths or the rows are wrong, not a single one."""
        usable = (number for number in range(len(self)) if self._table.read(number).label != PROBLEM)
        first = next(usable, None)
        if first is not None and any(self._states[each, 0, 0] >= 0 for each in itertools.chain([first], usable)):
            return
        try:
            self.read(first or 0)
        except DataError as error:
            hint = f". Relative paths refer to {self._root}; images names another folder"
            path = self._table.read(first or 0).path
            if os.path.isabs(path) or path[1:2] == ":":  # a drive of Windows
                hint = ". Is this a path of another machine? Write it relative to the table, or to a folder, images"
            hint = "" if first is None or error.kind in ("URL", "base64", "damaged row") else hint
            raise DataError(
                f"{self._listing}: none of the {len(self)} images can be read; the first: {error}{hint}"
            ) from None

    def _read_file(self, sample: Listed, index: int, column: int, kind: str) -> bytes:
        """Read the image (column 0) or the file of its captions (1)."""
        file, (size, modified) = _files_of(sample, self._root)[column], self._states[index, column].tolist()
        if size > MAX_BYTES[kind]:
            raise DataError(f"{kind} of {size} bytes; at most {MAX_BYTES[kind]} are read", "too many bytes")
        try:
            try:
                opened = open_regular(Path(file))
            except FileNotFoundError:
                opened = open_regular(Path(_as_on_disk(file)))
            with opened as stream:
                data = stream.read(max(size, 0))
                if Stamp.of(stream.fileno()) != (size, modified):
                    raise StorageError(f"{kind} has changed since it was indexed; start the run again", "changed file")
                return data
        except OSError as error:
            if size == MISSING and column == 1 and isinstance(error, FileNotFoundError):
                raise DataError(f"its captions are missing: {sample.text}", "missing member") from None
            error_type = DataError if size == MISSING else StorageError  # it was not readable, or is not so any more
            raise error_type(f"cannot be read: {error.strerror}", "unreadable file") from None


def _hash(path: str) -> tuple[int, int, bytes]:
    """Return size, time and SHA-256 of a file; one that is too large to be used is not read, a missing one has -1."""
    try:
        with open_regular(Path(path)) as file:
            before = Stamp.of(file.fileno())
            digest = hashlib.sha256(file.read() if before.size <= MAX_BYTES["image"] else b"")
            after = Stamp.of(file.fileno())
    except OSError:
        return MISSING, MISSING, bytes(32)
    if before != after:
        raise DataError(f"{path}: was written to while it was indexed; start again when it is complete")
    return *before, digest.digest()


def from_base64(text: str) -> bytes | None:
    """Return the image that a text holds in base64; None if the text is a path or URL."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    elif not text.startswith(_BASE64) or len(text) < 64:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def resolve_path(text: str, root: Path) -> str:
    """Return the path of a file that a table names, below a folder unless it is absolute.

    Raises:
        DataError: the path is empty, a URL or an image, or leaves the folder.
    """
    if not text:
        raise DataError("the path of the image is empty, or of several", "missing member")
    if from_base64(text) is not None:
        raise DataError("an image in base64, which Parquet may have; expected the path of a file", "base64")
    if (path := local_path(text)) is None:
        raise DataError(
            f"{display_url(text)}: a URL; expected a file (img2dataset downloads URLs; Parquet has urls: fetch)",
            "URL",
        )
    path = os.path.normpath(path) if os.pardir in path else path
    if path.split(os.sep, 1)[0] == os.pardir:
        raise DataError(
            f"{_cut(text)}: leaves the folder {root}; write the absolute path, or set images to another folder",
            "path outside",
        )
    return path


def _files_of(sample: Listed, root: Path) -> list[str]:
    """Return the image of a sample, and the file of its captions if there is one; see `resolve_path`."""
    return [os.path.join(root, each) for each in (resolve_path(sample.path, root), sample.text) if each]


def _as_on_disk(file: str) -> str:
    """Return the spelling of a file that was not found: macOS decomposes letters, endings may be in the other case."""
    stem, ending = os.path.splitext(file)
    spelled = [file, *(unicodedata.normalize(form, file) for form in ("NFC", "NFD"))]
    return next(filter(os.path.lexists, [*spelled, stem + ending.lower(), stem + ending.upper()]), file)


def _cut(text: str) -> str:
    """Return the beginning of a long path, for messages."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
