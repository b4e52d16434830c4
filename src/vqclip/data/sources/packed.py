"""Sources that are read forward: packed once into tars in the cache, which are then read like any others.

    config.find()             identity: settings, and sizes and times of files; another one has another folder
    .open()                   its pieces, such as some row groups of a Parquet file, each read from beginning to end
    Packing, write_piece      one tar for each piece, written by any process of any job (`vqclip.data.work_folder`)
    PackedSource              reads the tars, sample by sample or in chunks

    cache/packed/parquet-<identity>/00000.tar  00001.tar ...

A sample's members are its image, .txt and .json with the captions, .cls with the class number. One that cannot be used
is a .json alone that says why: it keeps its number, and is a bad sample when it is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from vqclip.data.decode import image_format
from vqclip.data.in_order import slices_of
from vqclip.data.lookup import locate
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.sources.base import MAX_BYTES, Preparation, RawSample, Source, SourceConfigBase, name_sample
from vqclip.data.sources.class_names import DEFAULT_TEMPLATE, Templates
from vqclip.data.sources.columns import CaptionFiles
from vqclip.data.sources.paths import strip_common_folders
from vqclip.data.sources.shards import TarSource
from vqclip.data.tars.open import TarSet
from vqclip.data.tars.reader import TarReader
from vqclip.data.work_folder import FolderLayout, ItemRecord, WorkFolder, require_room
from vqclip.errors import DataError, StorageError, count_noun, encodable, printable
from vqclip.io.atomic import write_file
from vqclip.io.files import Stamp, cache_folder, format_bytes, write_tar
from vqclip.process import progress

logger = logging.getLogger("vqclip.data")

LAYOUT = FolderLayout({"format": "vqclip packed source", "format_version": 6}, ".tar", "vqclip", "VQCLIP_CACHE")
"""Layout of the folders of packed tars in the cache."""
_CAPTIONS_OF = "captions {}"
"""Key of the captions of one weighted column in the .json of a sample."""
_HEARTBEAT = 100
"""Samples between two signs of life."""


class Piece(NamedTuple):
    """Part of a source that is read from beginning to end."""

    name: str
    """Name for messages, such as the file's path."""
    size: int
    """Bytes of its images and texts, as far as they are known."""


class StreamSample(NamedTuple):
    """A sample of a stream, or what is wrong with it."""

    row: int
    """Its number in the file or data set, for messages."""
    sample: RawSample | DataError
    rows: int = 1
    """Rows that it was made of: those of one image, each with a caption."""
    name: str = ""
    """Its name for messages; empty: that of the piece, with the number."""


class Stream(Protocol):
    """An opened source that is read forward."""

    pieces: Sequence[Piece]
    classnames: tuple[str, ...]
    """Names of the classes; empty without labels."""
    has_prompts: bool
    """Whether the captions are the prompts of the class."""
    notes: tuple[str, ...]
    """See `vqclip.data.sources.base.Source`."""

    def __str__(self) -> str:
        """Return the name of the data, for messages."""
        ...

    def read(self, piece: int) -> Iterator[StreamSample]:
        """Yield the samples of a piece in order.

        Raises:
            StorageError: it cannot be read or fetched.
        """
        ...


class Packable(NamedTuple):
    """Data that can be packed, found and perhaps not opened yet."""

    identity: Mapping[str, Any]
    """JSON values that differ if the samples may differ: settings, and sizes and times of files."""
    open: Callable[[], Stream]
    """Opens the data; raises DataError if they are damaged, and ConfigError if settings do not fit them."""


class PackedConfig(SourceConfigBase):
    """Configuration of a source that is read forward; a kind implements `find`."""

    templates: Templates = (DEFAULT_TEMPLATE,)
    """Prompts with `{c}` for the class name, its "_" as blanks; used if the data have labels and no captions."""

    def find(self, known: Mapping[str, Any] | None = None) -> Packable:
        """Find the data.

        Args:
            known: their identity, which another process of this machine has found, so that no server need be asked.

        Raises:
            DataError: the data are missing or damaged.
            ConfigError: settings do not fit them.
        """
        raise NotImplementedError

    def image_files(self) -> SourceConfigBase | None:
        """Return the image files that the data name, if these are read where they are; None: samples are packed."""
        return None

    def packed_path(self, identity: Mapping[str, Any]) -> Path:
        """Return the path of the folder of the packed tars of some data, which may be missing."""
        text = json.dumps([LAYOUT.versions, identity], sort_keys=True)
        name = f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        return cache_folder() / "packed" / name

    def build(self) -> Source:
        """Open the data, after packing and indexing what is missing."""
        config = self.model_copy(update=self.pins())
        files = config.image_files()
        return Packing(config).build() if files is None else files.build()


class Packing:
    """A source while it is packed: its folder, made if it is missing, and its data as far as they are opened.

    Args:
        config: the source.
        path: folder that another process has made; its data are then opened if a piece is to be written.

    Raises:
        DataError: see `PackedConfig.find`, or the disk has no room.
    """

    def __init__(self, config: PackedConfig, path: Path | None = None):
        self.config = config
        self._stream: Stream | None = None
        found = None if path is None else WorkFolder.existing(path, LAYOUT)
        if found is None:  # also if this process cannot read what another one has made
            data = config.find()
            self._open = data.open
            path = path or config.packed_path(data.identity)
            found = WorkFolder.existing(path, LAYOUT, in_cache=True) or self._make_folder(path, data.identity)
        else:
            identity = found.settings["source"]
            self._open = lambda: config.find(identity).open()
        self.folder = found

    def _make_folder(self, path: Path, identity: Mapping[str, Any]) -> WorkFolder:
        stream = self.stream
        if not stream.pieces:
            raise DataError(f"{stream}: has no rows")
        size = sum(piece.size for piece in stream.pieces)
        settings = {
            "source": identity,
            "revision": getattr(self.config, "revision", None),  # the commit of a data set of the hub
            "asked": getattr(self.config, "_asked", None),  # its branch
            "pieces": [list(piece) for piece in stream.pieces],
            "classnames": list(stream.classnames),
            "has_prompts": stream.has_prompts,
            "notes": list(stream.notes),
        }
        require_room(path, size, "set VQCLIP_CACHE to a folder on a larger disk")  # before the folder is there
        folder = WorkFolder(path, settings, len(stream.pieces), LAYOUT)
        pieces = count_noun(folder.items, "piece")
        logger.info("packing %s: %s, about %s, into %s", stream, pieces, format_bytes(size), path)
        return folder

    @property
    def stream(self) -> Stream:
        """The opened data."""
        if self._stream is None:
            self._stream = self._open()
        return self._stream

    def preparations(self) -> Sequence[Preparation]:
        """Return all pieces if one is to be packed, otherwise what is to be done for the tars."""
        if not self.folder.missing():
            return self._tar_set(range(self.folder.items)).preparations()
        return [partial(self._pack, piece) for piece in range(self.folder.items)]

    def _pack(self, piece: int) -> bool:
        """Pack and index a piece; return False if another process is packing it."""
        for number in self.folder.claim([piece]):
            write_piece(self.folder, number, self.stream)
        if self.folder.record(piece) is None:
            return False
        for prepare in self._tar_set([piece]).preparations():
            prepare()
        return True

    def build(self) -> Source:
        """Open the packed tars, after packing and indexing what is missing, or waiting for processes that do."""
        self.folder.remove_leftovers()
        for piece in self.folder.claim(wait=True):
            write_piece(self.folder, piece, self.stream)
        tars = self._tar_set(range(self.folder.items))
        return PackedSource(self.config, self.folder, tars.open())

    def _tar_set(self, pieces: Iterable[int]) -> TarSet:
        remote = getattr(self.config, "remote", RemoteConfig())
        return TarSet([self.folder.file(piece) for piece in pieces], remote, chunk=self.config._chunk)


def stamp(paths: Iterable[str | Path]) -> list[list[Any]]:
    """Return name, size and modification time of files; raises StorageError for a missing one."""
    found = []
    for path in paths:
        try:
            found.append([encodable(str(path)), *Stamp.of(path)])
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}", "unreadable file") from None
    return found


class SourceStream:
    """Samples that can be read in any order, as a `Stream`.

    Args:
        source: the samples, which have prompts if it has templates.
        name: the data, for messages.
        piece_rows: samples of a piece.
        sample_bytes: bytes of a sample, as far as they are known.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, source: Source, name: str, piece_rows: int, sample_bytes: float):
        self._source, self._name = source, name
        self._ranges = [*slices_of(range(len(source)), piece_rows)]
        self.pieces: Sequence[Piece] = [Piece(name, int(sample_bytes * len(each))) for each in self._ranges]
        self.classnames, self.has_prompts = source.classnames, bool(source.templates)

    def __str__(self) -> str:
        return self._name

    def read(self, piece: int) -> Iterator[StreamSample]:
        """Yield the samples of a piece; see `Stream.read`."""
        for index in self._ranges[piece]:
            try:
                yield StreamSample(index, self._source.read(index), 1, self._source.name(index))
            except StorageError:
                raise
            except DataError as error:
                yield StreamSample(index, error)


def write_piece(
    folder: WorkFolder, piece: int, stream: Stream, check: Callable[[RawSample], object] | None = None
) -> ItemRecord:
    """Write the tar of a piece, and record it.

    In a folder of `vqclip data pack`, keys are those of img2dataset: number of the piece, then number of the sample in
    it. In the cache they are numbers of rows.

    Args:
        folder: the folder of the tars.
        piece: number of the piece.
        stream: the source.
        check: raises DataError for a sample that cannot be used; bad samples are then left out and recorded. None: they
            stay as members that say why.

    Raises:
        StorageError: the piece cannot be read or fetched, or the tar cannot be written.
    """
    counts = {"samples": 0, "captions": 0, "unusable": 0, "grouped": 0, "repeated": 0}
    bad: list[dict[str, Any]] = []
    seen: set[bytes] = set()

    def members() -> Iterator[tuple[str, dict[str, bytes]]]:
        for number, (row, sample, rows, name) in enumerate(stream.read(piece)):
            if number % _HEARTBEAT == 0:
                progress.heartbeat()
            counts["grouped"] += rows - 1
            key = f"{row:09d}" if check is None else f"{piece:05d}{number:04d}"
            try:
                if isinstance(sample, DataError):
                    raise sample
                with name_sample(name or f"{stream.pieces[piece].name}: row {row}"):
                    found = sample_members(key, sample, bool(stream.classnames), stream.has_prompts)
                    if check is not None:
                        check(sample)
            except DataError as error:
                counts["unusable"] += 1
                if check is None:
                    counts["samples"] += 1
                    yield key, {"json": json.dumps({"key": key, "bad": error.kind, "reason": str(error)}).encode()}
                else:
                    bad.append({"sample_id": row, "key": key, "kind": error.kind, "reason": str(error)})
                continue
            counts["samples"] += 1
            counts["captions"] += len(sample.captions)
            digest = hashlib.blake2b(sample.image, digest_size=12).digest()
            counts["repeated"] += digest in seen
            seen.add(digest)
            yield key, found

    try:
        file = write_file(folder.file(piece), lambda out: write_tar(out, members()))
        samples = counts.pop("samples")
        record = folder.add_record(piece, file, samples, bad, **counts)
    except OSError as error:
        raise StorageError(
            f"{folder.file(piece)}: cannot be written: {error.strerror}; make room and start again (what is finished "
            f"stays), or name another folder ({folder.layout.option})"
        ) from None
    size, done = format_bytes(file.size), folder.items - folder.missing()
    logger.info("packed %d of %d pieces into %s: %d samples, %s", done, folder.items, folder.path, samples, size)
    return record


def sample_members(key: str, sample: RawSample, has_classes: bool, has_prompts: bool) -> dict[str, bytes]:
    """Return the members of a sample in a tar by their endings: the image unchanged, txt and json, cls.

    Args:
        key: its key in the tar.
        sample: the sample.
        has_classes: whether it has a class number.
        has_prompts: whether its captions are the prompts of the class, which are not stored with it.

    Raises:
        DataError: a caption is not UTF-8.
    """
    try:
        ending = image_format(sample.image).replace("jpeg", "jpg")
    except DataError:
        ending = "jpg"  # decoding says what it is
    members = {ending: sample.image}
    if has_classes:
        if sample.label < 0:
            raise DataError("it has no class number", "class number")
        members["cls"] = str(sample.label).encode()
    if not has_prompts:
        captions: Sequence[str] | str = sample.captions
        if len(captions) == 1 and not captions[0].startswith(("[", "{")):  # which `find_texts` would parse
            captions = captions[0]
        try:
            members["txt"] = sample.captions[0].encode()
            facts: dict[str, Any] = {"key": key, "caption": captions}
            for number in sample.keys:
                of_key = [text for text, each in zip(sample.captions, sample.keys, strict=True) if each == number]
                facts[_CAPTIONS_OF.format(number)] = of_key
            members["json"] = json.dumps(facts, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"caption with a lone surrogate at character {error.start}", "not UTF-8") from None
    for name, data in members.items():
        if len(data) > (limit := MAX_BYTES.get(name, MAX_BYTES["image"])):
            raise DataError(f".{name} of {len(data)} bytes; at most {limit} are read", "too many bytes")
    return members


class PackedSource(TarSource):
    """A `Source` of packed tars.

    Args:
        config: the packed data.
        folder: the folder of the tars.
        tars: reads them.

    Raises:
        DataError: there are no samples.
    """

    def __init__(self, config: PackedConfig, folder: WorkFolder, tars: TarReader):
        settings = folder.settings
        of_keys = tuple(map(_CAPTIONS_OF.format, range(len(config.caption_weights))))
        captions = None if settings["has_prompts"] else CaptionFiles("json", of_keys or ("caption",))
        templates = config.templates if captions is None else ()
        super().__init__(config, tars, captions, tuple(settings["classnames"]), templates)
        self._pieces = [name for name, _ in settings["pieces"]]
        self._places = strip_common_folders(self._pieces)
        records = folder.records() or []
        self._starts = np.cumsum([0, *(record.samples for record in records)], dtype=np.int64)
        total = {key: sum(record.facts[key] for record in records) for key in ("unusable", "grouped", "repeated")}
        self.notes = tuple(settings["notes"])
        if total["grouped"]:
            rows = total["grouped"] + len(self)
            self.notes += (f"{rows:,} rows are {len(self):,} samples: neighbouring rows of one image are one",)
        if total["repeated"] and not self.templates:
            self.notes += (
                f"{total['repeated']:,} samples have the same image as one in another place of the table, and count "
                "as images of their own; sort the table by image to join them",
            )
        if total["unusable"]:
            self.notes += (f"{total['unusable']:,} of {len(self):,} samples cannot be used",)
        if not len(self):
            raise DataError(f"{', '.join(self._pieces[:3])}: has no rows with images, or with the values of where")
        if total["unusable"] == len(self):
            self.read(0)  # names what is wrong with all of them

    def read(self, index: int) -> RawSample:
        """Return one sample; of one that cannot be used, raise what was wrong with it when it was packed."""
        try:
            return super().read(index)
        except DataError as error:
            if error.kind != "missing member":
                raise
        facts = json.loads(self.tars.read(index, "json"))
        raise DataError(facts["reason"], facts["bad"])

    def key(self, index: int) -> str:
        """Return the number of the sample; see `ShardedSource.key`."""
        return f"{index:09d}"

    def name(self, index: int) -> str:
        """Return file and row, for messages: ``/data/train.parquet: row 17``."""
        return printable(
            f"{self._pieces[locate(self._starts, index)[0]]}: row {int(self.tars.key(index))}", one_line=True
        )

    def place(self, index: int) -> str:
        """Return file and row; see `ShardedSource.place`."""
        return f"{self._places[locate(self._starts, index)[0]]}/{self.tars.key(index)}".lstrip("/")

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`; of the packed samples, so the place of the data does not count."""
        return {**super().fingerprint, "kind": "packed"}
