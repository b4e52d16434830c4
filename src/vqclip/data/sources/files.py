"""Base of sources whose samples are image files, listed by a table.

make the table (one rank of each cache) -> index its files, in parts (all ranks) -> read any sample

An index holds size, modification time and SHA-256 of every file, -1 for a missing one. A file that differs from its
index ends the run: if another sample replaced it, what is learned would depend on the moment of the change.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vqclip.data.decode import IMAGE_ENDINGS
from vqclip.data.remote import display_url, local_path, protocol_of
from vqclip.data.shard import Part, Shard
from vqclip.data.sources.base import NumberedSource, Place, RawSample, SourceConfigBase
from vqclip.data.sources.captions import CaptionFiles, require_usable
from vqclip.data.sources.file_parts import MISSING, FilePart, cut_path, files_of
from vqclip.data.sources.file_table import FileTable, checksum, load_table
from vqclip.data.sources.prompts import Prompts
from vqclip.data.sources.reader import MAX_BYTES, MAX_IMAGE_BYTES
from vqclip.errors import ConfigError, DataError, StorageError, encodable, printable
from vqclip.io.files import cache_folder, expand_home, open_regular

__all__ = ["IMAGE_ENDINGS", "FileSource", "FileSourceConfig", "ListConfig", "local_file"]

logger = logging.getLogger("vqclip.data")

PART_SIZE = 5000
"""Files of a part: one part is indexed by one rank, and becomes one token shard."""


class FileSourceConfig(SourceConfigBase):
    """Configuration of a source of image files; a kind implements `table`, `listing` and `root`."""

    row_word: ClassVar[str] = "row"
    """Word for a row in messages."""

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
        return load_table(self._stem(cache).with_suffix(".table.npz"), str(self.listing), self.table)

    def parts(self, table: FileTable, cache: Path | None = None) -> list[FilePart]:
        """Divide the table into parts for indexing."""
        stem, second = self._stem(cache), self.caption_files(table)
        name, root = str(self.listing), self.root
        return [
            FilePart(
                table=table,
                root=root,
                second="" if second is None else f".{second.kind}",
                start=start,
                stop=min(start + PART_SIZE, len(table)),
                name=name,
                file=stem.with_suffix(f".{start // PART_SIZE:05d}.npz"),
            )
            for start in range(0, len(table), PART_SIZE)
        ]

    def shards(self) -> Sequence[Shard | Part]:
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


class ListConfig(FileSourceConfig):
    """Configuration of a file that lists images; a kind implements `table`."""

    path: Place
    """The file, on this machine, in UTF-8."""
    images: Path | None = None
    """Folder that relative paths of images refer to; null: the folder of the file."""

    @property
    def listing(self) -> Path:
        """The file."""
        return local_file(self.path, self.kind)

    @property
    def root(self) -> Path:
        """The folder that relative paths refer to."""
        return self.listing.parent if self.images is None else local_file(self.images, self.kind)


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
        sizes, times = [], []
        self.shards = []
        for part in config.parts(table, cache):
            index = part.load()
            sizes.append(index.sizes)
            times.append(index.modified_ns)
            total = int(np.maximum(index.sizes, 0).sum())
            name = f"{encodable(self._listing.stem)}-{part.start // PART_SIZE:05d}"
            sha256 = checksum(index.digests.tobytes())
            self.shards.append({"name": name, "bytes": total, "samples": part.stop - part.start, "sha256": sha256})
        self._sizes = np.concatenate(sizes) if sizes else np.zeros((0, 1), np.int64)
        self._modified_ns = np.concatenate(times) if times else np.zeros((0, 1), np.int64)
        self._require_some()

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int) -> RawSample:
        """Return image, captions and label of one sample; see `Source.read`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        label = int(self._table.labels[index])
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
        path, row = cut_path(self._table.paths[index]), int(self._table.rows[index])
        text = f"{self._listing}: {self.config.row_word} {row}: {path}" if row >= 0 else str(self._root / path)
        return printable(text, one_line=True)

    def place(self, index: int) -> str:
        """Return the path of the file, and its row; see `vqclip.data.images.ImageSource.place`."""
        path, row = self._table.paths[index], int(self._table.rows[index])
        return f"{path} ({self.config.row_word} {row})" if row >= 0 else path

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`; contents, captions and labels count, names and folders do not."""
        table, files = self._table, self._captions
        texts = [table.captions.span(0, len(table.captions.ends)), table.caption_ends.tobytes(), table.labels.tobytes()]
        return {
            "kind": "files",
            "samples": len(self),
            "sha256": self.sha256,
            "captions_sha256": checksum(*texts),
            "prompts_sha256": self._prompts.sha256,
            **({"captions": "table", "json_keys": []} if files is None else files.fingerprint),
        }

    def _require_some(self) -> None:
        """Raise DataError if no image can be read: then the paths are wrong, not a single file."""
        if (self._sizes[:, 0] >= 0).any():
            return
        try:
            self._read_file(0, 0)
        except DataError as error:
            raise DataError(
                f"{self._listing}: none of the {len(self)} images can be read; the first: {error}. Relative "
                f"paths refer to {self._root}"
            ) from None

    def _read_text(self, index: int) -> str:
        data = self._read_file(index, 1)
        try:
            return data.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name(index)}: the file of its caption is not UTF-8: {error.reason} at byte {error.start}",
                "not UTF-8",
            ) from None

    def _read_file(self, index: int, column: int) -> bytes:
        """Read the image (column 0) or the file of its captions (1)."""
        name, second = self.name(index), "" if self._captions is None else f".{self._captions.kind}"
        what, most = ("image", MAX_IMAGE_BYTES) if column == 0 else (second, MAX_BYTES[second.removeprefix(".")])
        try:
            file = files_of(self._table.paths[index], self._root, second)[column]
        except DataError as error:
            raise DataError(f"{name}: {error}", error.kind) from None
        size, modified = int(self._sizes[index, column]), int(self._modified_ns[index, column])
        if size > most:
            raise DataError(f"{name}: {what} of {size} bytes; at most {most} are read", "too many bytes")
        try:
            with open_regular(Path(file)) as stream:
                status = os.fstat(stream.fileno())
                if (status.st_size, status.st_mtime_ns) != (size, modified):
                    raise StorageError(
                        f"{name}: {what} has changed since it was indexed; start the run again", "changed file"
                    )
                data = stream.read(size)
        except DataError:
            raise
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            if size == MISSING and column == 1 and isinstance(error, FileNotFoundError):
                raise DataError(f"{name}: has no {second} beside it", "missing member") from None
            kind = DataError if size == MISSING else StorageError  # it was not readable, or is not so any more
            raise kind(f"{name}: cannot be read: {reason}", "unreadable file") from None
        if len(data) != size:
            raise StorageError(f"{name}: {what} became shorter while it was read", "changed file")
        return data
