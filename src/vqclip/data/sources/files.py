"""Base of sources whose samples are image files, listed by a table.

make the table (one rank of each cache) -> index its files, in parts (all ranks) -> read any sample

An index holds size, modification time and SHA-256 of every file, -1 for a missing one. A file that differs from its
index ends the run: if another sample replaced it, what is learned would depend on the moment of the change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import PrivateAttr

from vqclip.data.remote import display_url, local_path, protocol_of
from vqclip.data.shard import Part
from vqclip.data.sources.base import NumberedSource, RawSample, SourceConfigBase
from vqclip.data.sources.captions import CaptionFiles, Prompts, caption_path, require_usable
from vqclip.data.sources.file_table import PROBLEM, FileTable, checksum, load_table, span, versions
from vqclip.data.sources.reader import MAX_BYTES, MAX_IMAGE_BYTES
from vqclip.data.table_file import find_table, save_table
from vqclip.errors import ConfigError, DataError, StorageError, encodable, printable
from vqclip.io.files import Stamp, cache_folder, expand_home, open_regular
from vqclip.process import progress

__all__ = ["FilePart", "FileSource", "FileSourceConfig", "local_file", "skip_next_check"]

logger = logging.getLogger("vqclip.data")

PART_SIZE = 5000
"""Files of a part: one part is indexed by one rank, and becomes one token shard."""
MISSING = -1
"""Size of a file that could not be read."""
_HEARTBEAT = 200
"""Files between two signs of life."""
_SHOWN = 200
"""Characters of a path in messages."""


class FileSourceConfig(SourceConfigBase):
    """Configuration of a source of image files; a kind implements `table`, `listing` and `root`."""

    _checked: set[Path] = PrivateAttr(default_factory=set)
    """Indexes that all ranks together have just compared with their files, so that `build` need not repeat it."""

    def table(self) -> FileTable:
        """List the images.

        Raises:
            DataError: there are none, or the list cannot be read.
        """
        raise NotImplementedError

    @property
    def listing(self) -> Path:
        """The file or folder that lists the images; absolute."""
        raise NotImplementedError

    @property
    def root(self) -> Path:
        """The folder that relative paths of images refer to; absolute."""
        raise NotImplementedError

    def caption_files(self, table: FileTable) -> CaptionFiles | None:
        """Return the captions in files beside the images; None if they are in the table or are prompts."""
        return None

    def load_table(self, cache: Path | None = None) -> FileTable:
        """Return the table, from the cache where it is up to date."""
        return load_table(self._stem(cache).with_suffix(".table.safetensors"), str(self.listing), self.table)

    def parts(self, table: FileTable, cache: Path | None = None) -> list[FilePart]:
        """Divide the table into parts for indexing."""
        stem, second = self._stem(cache), self.caption_files(table)
        name, root = str(self.listing), self.root
        return [
            FilePart(
                table=table,
                root=root,
                second="" if second is None else second.ending,
                start=start,
                stop=min(start + PART_SIZE, len(table)),
                name=name,
                file=stem.with_suffix(f".{start // PART_SIZE:05d}.safetensors"),
                checked=self._checked,
            )
            for start in range(0, len(table), PART_SIZE)
        ]

    def shards(self) -> Sequence[Part]:
        """Return the parts, after making the table; for `vqclip.data.prepare_sources`.

        Raises:
            DataError: see `table`.
        """
        return self.parts(self.load_table())

    def build(self, cache: Path | None = None) -> FileSource:
        """Open the images, after indexing those without an index."""
        return FileSource(self, cache)

    def _stem(self, cache: Path | None) -> Path:
        keys = self.model_dump(mode="json", exclude={"weight", "path"})
        text = json.dumps([os.fspath(self.listing), keys], sort_keys=True)  # ASCII
        return (cache or cache_folder()) / "index" / checksum(text.encode())[:24]


def local_file(path: str | Path, kind: str) -> Path:
    """Return the absolute form of a path on this machine.

    Raises:
        ConfigError: it is a URL.
    """
    protocol = protocol_of(str(path))
    if protocol not in (None, "file"):
        raise ConfigError(
            f"path: got {display_url(str(path))}; kind: {kind} reads files on this machine (shards may be at URLs)"
        )
    return expand_home(path if protocol is None else local_path(str(path))).absolute()


class FileSource(NumberedSource):
    """A `Source` of image files that a table lists.

    Args:
        config: makes the table.
        cache: folder of the table and the indexes; default `vqclip.io.files.cache_folder()`.

    Raises:
        DataError: see `FileSourceConfig.table`; or none of the files can be read.
    """

    def __init__(self, config: FileSourceConfig, cache: Path | None = None):
        self.config = config
        self._table = table = config.load_table(cache)
        self._listing, self._root = config.listing, config.root  # once: a listing may look for files
        self._captions = config.caption_files(table)
        self.classnames, self.templates = table.classnames, table.templates
        self.notes = tuple(table.facts.get("notes", ()))
        self._prompts = Prompts(self.templates, self.classnames)
        indexes = []
        self.shards = []
        for part in config.parts(table, cache):
            index = part.load()
            indexes.append(index)
            total = int(np.maximum(index.sizes, 0).sum())
            name = f"{encodable(self._listing.stem)}-{part.start // PART_SIZE:05d}"
            sha256 = checksum(index.digests.tobytes())
            self.shards.append({"name": name, "bytes": total, "samples": part.stop - part.start, "sha256": sha256})
        none = np.zeros((0, 1), np.int64)
        self._sizes = np.concatenate([none, *(index.sizes for index in indexes)][bool(indexes) :])
        self._modified_ns = np.concatenate([none, *(index.modified_ns for index in indexes)][bool(indexes) :])
        self._require_some()

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int) -> RawSample:
        """Return image, captions and label of one sample; see `Source.read`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        label = int(self._table.labels[index])
        if label == PROBLEM:
            raise DataError(f"{self.name(index)}: {self._table.row_captions(index)[0]}", "damaged row")
        if self.templates:
            captions = self._prompts.of(label, self.name(index))
        elif self._captions is not None:
            captions = self._captions.parse(self._read_text(index), self.name(index))
        else:
            captions = tuple(text for each in self._table.row_captions(index) if (text := each.strip()))
            if not captions:
                raise DataError(f"{self.name(index)}: the caption is empty", "no caption")
            captions = require_usable(captions, self.name(index))
        return RawSample(self._read_file(index, 0), captions, label)

    def name(self, index: int) -> str:
        """Return list, row and file, for messages: ``/data/train.csv: row 17: images/a.jpg``."""
        path, row = _cut(self._table.paths.read(index)), int(self._table.rows[index])
        text = f"{self._listing}: row {row}" if row >= 0 else str(self._root / path)
        text += f": {path}" if row >= 0 and path else ""
        return printable(text, one_line=True)

    def place(self, index: int) -> str:
        """Return the path of the file, and its row; see `vqclip.data.prepare.ImageSource.place`."""
        path, row = self._table.paths.read(index), int(self._table.rows[index])
        return f"{path} (row {row})" if row >= 0 else path

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`; contents, captions and labels count, names and folders do not."""
        table, files = self._table, self._captions
        texts = [table.captions.content.tobytes(), table.captions.ends.tobytes(), table.caption_ends.tobytes()]
        return {
            "kind": "files",
            "samples": len(self),
            "sha256": self.sha256,
            "captions_sha256": checksum(*texts, table.labels.tobytes()),
            "prompts_sha256": self._prompts.sha256,
            **({"captions": "table", "json_keys": []} if files is None else files.fingerprint),
        }

    def _require_some(self) -> None:
        """Raise DataError if no sample can be used: then the paths or the rows are wrong, not a single one."""
        has_file, is_row = self._sizes[:, 0] >= 0, self._table.labels != PROBLEM
        if (has_file & is_row).any():
            return
        try:
            self.read(int(is_row.argmax()))
        except DataError as error:
            hint = f". Relative paths refer to {self._root}; images names another folder" if is_row.any() else ""
            raise DataError(
                f"{self._listing}: none of the {len(self)} images can be read; the first: {error}{hint}"
            ) from None

    def _read_text(self, index: int) -> str:
        data = self._read_file(index, 1)
        try:
            return data.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name(index)}: the file of its caption is not UTF-8: {error.reason} at byte {error.start}",
                "not UTF-8",
            ) from None

    def _read_file(self, index: int, column: int) -> bytes:
        """Read the image (column 0) or the file of its captions (1)."""
        name, what, second, most = self.name(index), "image", "", MAX_IMAGE_BYTES
        if self._captions is not None:
            second = self._captions.ending
            what, most = (what, most) if column == 0 else (second, MAX_BYTES[self._captions.kind])
        try:
            file = _files_of(self._table.paths.read(index), self._root, second)[column]
        except DataError as error:
            raise DataError(f"{name}: {error}", error.kind) from None
        size, modified = int(self._sizes[index, column]), int(self._modified_ns[index, column])
        if size > most:
            raise DataError(f"{name}: {what} of {size} bytes; at most {most} are read", "too many bytes")
        try:
            with open_regular(Path(file)) as stream:
                if Stamp.of(stream.fileno()) != (size, modified):
                    raise StorageError(
                        f"{name}: {what} has changed since it was indexed; start the run again", "changed file"
                    )
                data = stream.read(size)
        except DataError:
            raise
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            if size == MISSING and column == 1 and isinstance(error, FileNotFoundError):
                folder, _, ending = second.rpartition("/")
                where = f"in {folder}" if folder else "beside it"
                raise DataError(f"{name}: has no {ending} {where}", "missing member") from None
            kind = DataError if size == MISSING else StorageError  # it was not readable, or is not so any more
            raise kind(f"{name}: cannot be read: {reason}", "unreadable file") from None
        if len(data) != size:
            raise StorageError(f"{name}: {what} became shorter while it was read", "changed file")
        return data


class FileIndex(NamedTuple):
    """Size, modification time and checksum of the files of some rows."""

    sizes: np.ndarray
    """``(rows, files)`` int64: bytes; -1 for a file that could not be read."""
    modified_ns: np.ndarray
    """``(rows, files)`` int64."""
    digests: np.ndarray
    """``(rows, files, 32)`` uint8: SHA-256."""


@dataclass(frozen=True)
class FilePart:
    """Some rows of a table, whose files are indexed together, by any rank."""

    table: FileTable
    root: Path
    second: str
    """Ending of the caption file of each image, see `caption_path`; "" without one."""
    start: int
    stop: int
    name: str
    file: Path
    """Its index in the cache."""
    checked: set[Path]
    """See `FileSourceConfig`."""

    def __str__(self) -> str:
        return f"{self.name}: images {self.start} to {self.stop}"

    def prepare(self, cache: Path | None = None) -> None:
        """Index the files unless they are indexed and unchanged."""
        self.load()

    def load(self) -> FileIndex:
        """Return the index of the files, after indexing those that have changed since.

        Raises:
            DataError: a file is written to while it is read, or the cache cannot be written.
        """
        paths = span(self.table.paths, self.start, self.stop)
        facts = {**versions(self.name), "paths": checksum(paths, self.second.encode())}
        index = find_table(self.file, facts, self.name, lambda table: FileIndex(**table.arrays))
        is_fresh = self.file in self.checked
        self.checked.discard(self.file)
        if index is not None and is_fresh:
            return index
        changed, new = self._update(index)
        if changed or index is None:
            save_table(self.file, facts, new._asdict(), self.name)
            logger.info("indexed %s: %d image files of samples %d to %d", self.name, changed, self.start, self.stop - 1)
        return new

    def _update(self, former: FileIndex | None) -> tuple[int, FileIndex]:
        """Read the files whose size or time differs from the index; return the number of their rows, and the new one.

        A path that is not allowed counts as that of a missing file; `FileSource.read` says what is wrong with it.
        """
        shape = (self.stop - self.start, 2 if self.second else 1)
        if former is None:
            unknown = np.full(shape, MISSING - 1, np.int64)
            index = FileIndex(unknown, unknown.copy(), np.zeros((*shape, 32), np.uint8))
        else:
            index = FileIndex(*(array.copy() for array in former))
        changed = set()
        states = np.stack([index.sizes, index.modified_ns], axis=-1).tolist()  # lists are faster to index
        for row, known in enumerate(states):
            if row % _HEARTBEAT == 0:
                progress.heartbeat()
            try:
                files = _files_of(self.table.paths.read(self.start + row), self.root, self.second)
            except DataError:
                files = [""] * len(known)
            for column, file in enumerate(files):
                if _stat(file) != known[column]:
                    changed.add(row)
                    index.sizes[row, column], index.modified_ns[row, column], digest = _hash(file)
                    index.digests[row, column] = np.frombuffer(digest, np.uint8)
        return len(changed), index


def skip_next_check(parts: Iterable[object]) -> None:
    """Let the next `build` rely on the indexes of these parts: every rank has just checked some of them."""
    for part in parts:
        if isinstance(part, FilePart):
            part.checked.add(part.file)


def _stat(path: str) -> list[int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return [MISSING, 0]
    return [status.st_size, status.st_mtime_ns] if stat.S_ISREG(status.st_mode) else [MISSING, 0]


def _hash(path: str) -> tuple[int, int, bytes]:
    """Return size, time and SHA-256 of a file; one that is too large to be used is not read, a missing one has -1."""
    try:
        with open_regular(Path(path)) as file:
            before = Stamp.of(file.fileno())
            digest = hashlib.sha256(file.read() if before.size <= MAX_IMAGE_BYTES else b"")
            after = Stamp.of(file.fileno())
    except (OSError, ValueError):
        return MISSING, 0, bytes(32)
    if before != after:
        raise DataError(f"{path}: was written to while it was indexed; start again when it is complete")
    return *before, digest.digest()


def _files_of(text: str, root: Path, second: str) -> list[str]:
    """Return the image that a path names, and its caption file if ``second`` is the ending; see `caption_path`.

    Raises:
        DataError: the path is empty, a URL, or leaves the folder.
    """
    if not text:
        raise DataError("the path of the image is empty", "missing member")
    protocol = protocol_of(text)
    if protocol not in (None, "file"):
        raise DataError(
            f"{display_url(text)}: a URL; expected a file on this machine (img2dataset downloads tables of URLs)", "URL"
        )
    path = text if protocol is None else local_path(text)
    path = os.path.normpath(path) if os.pardir in path else path
    if path.split(os.sep, 1)[0] == os.pardir:
        raise DataError(
            f"{_cut(text)}: leaves the folder {root}, which relative paths refer to; write the absolute path, or set "
            "images to another folder",
            "path outside",
        )
    paths = [path, caption_path(path, second)] if second else [path]
    return [os.path.join(root, each) for each in paths]


def _cut(text: str) -> str:
    """Return the beginning of a long path, for messages."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
