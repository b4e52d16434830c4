"""Source of data sets of Hugging Face's `datasets`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from vqclip.data.lookup import name_errors
from vqclip.data.remote import mask_credentials
from vqclip.data.sources.base import FolderContent
from vqclip.data.sources.packed import PackedSource, Piece, StreamSample, stamp
from vqclip.data.sources.table import (
    RowParser,
    TableConfig,
    find_columns,
    group_rows,
    parse_groups,
    read_batch,
    read_classes,
)
from vqclip.errors import ConfigError, DataError, StorageError
from vqclip.io.files import expand_home

__all__ = ["HfConfig", "HfStream"]

_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes for a split, and for several."""
_UNREADABLE = ": cannot be read by datasets"
_BATCH, _PIECE_ROWS = 16, 2000
"""Rows that are read at a time, and rows of a piece."""


class HfConfig(TableConfig):
    """A data set of `datasets`: a folder that `save_to_disk` has written, or the name of one on the hub.

    No code of a data set runs: `datasets` 4 and later has no way to. Images are not decoded by it. The rows are packed
    once into tars in the cache.
    """

    kind: Literal["hf"] = "hf"
    """Data set of Hugging Face."""
    path: str = Field(min_length=1)
    """A folder of `save_to_disk`, a folder that `load_dataset` reads, or a name on the hub, such as
    nlphuji/flickr30k."""
    name: str | None = None
    """Configuration of the data set, where it has several."""
    split: str | None = None
    """The split; may be left out if there is only one."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null: the main branch. Data sets that are scripts have a copy without them:
    refs/convert/parquet."""
    streaming: bool = False
    """Read from the hub while it is packed, without a copy of its files on this machine."""

    _data: Any = PrivateAttr(None)
    """The opened data set, until `build`."""

    @classmethod
    def matches_folder(cls, content: FolderContent) -> bool:
        """Return whether `save_to_disk` has written the folder."""
        return _SAVED_SPLITS in content.files or {_SAVED, "dataset_info.json"} <= content.files

    @property
    def where(self) -> str:
        """The data set, for messages."""
        return mask_credentials(" ".join(filter(None, (self.path, self.name, self.split))))

    def data(self) -> Any:
        """Return the opened split; `load_dataset` is called once."""
        if self._data is None:
            self._data = _load(self, (self.opened or {}).get("files"))
        return self._data

    def identity(self) -> dict[str, Any]:
        """See `PackedConfig.identity`: the files of the data set, or the commit of one that is streamed."""
        folder = expand_home(self.path)
        if not self.streaming:
            files: Any = stamp(_files_of(self.data()))
        elif folder.is_dir():
            files = stamp(sorted(each for each in folder.rglob("*") if each.is_file()))
        else:
            files = _commit(self)
        return {**self.settings(), "folder": os.getcwd(), "files": files}

    def share(self) -> dict[str, Any]:
        """See `PackedConfig.share`; not of a part of a split, nor of a stream."""
        whole = not self.streaming and re.fullmatch(r"\w*", self.split or "")
        return {"files": stamp(_files_of(self.data()))} if whole else {}

    def open_stream(self) -> HfStream:
        """See `PackedConfig.open_stream`."""
        return HfStream(self)

    def build(self, cache: Path | None = None) -> PackedSource:
        """See `PackedConfig.build`."""
        source = super().build(cache)
        self._data = None
        return source


def _require_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError("kind: hf needs the package datasets: pip install 'vqclip[hf]'") from None
    if int(datasets.__version__.partition(".")[0]) < 4:  # older ones can run scripts of data sets
        raise DataError(f"datasets {datasets.__version__} is installed; expected 4 or later: pip install 'vqclip[hf]'")
    return datasets


def _files_of(data: Any) -> list[str]:
    return [each["filename"] for each in data.cache_files]


def _commit(config: HfConfig) -> str:
    """Return the commit of a revision on the hub."""
    if re.fullmatch("[0-9a-f]{40}", config.revision or ""):
        return str(config.revision)
    from huggingface_hub import HfApi

    with name_errors(f"{config.where}{_UNREADABLE}", "unreadable data set"):
        return str(HfApi().dataset_info(config.path, revision=config.revision).sha)


def _load(config: HfConfig, shared: list[list[Any]] | None) -> Any:
    """Open one split of the data set, from the files that another process has found if this machine has them."""
    datasets = _require_datasets()
    folder = expand_home(config.path)
    is_saved = (folder / _SAVED).is_file() or (folder / _SAVED_SPLITS).is_file()
    if is_saved and (config.streaming or config.name or config.revision):
        raise ConfigError(
            f"{folder}: was written by save_to_disk, which has no streaming, name or revision: leave them out"
        )
    with contextlib.suppress(StorageError):  # this machine may have other files
        if shared and not is_saved and stamp([path for path, _, _ in shared]) == shared:
            return datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path, _, _ in shared])
    if not is_saved:
        _require_place(config, folder, datasets)
    try:
        with name_errors(f"{config.where}{_UNREADABLE}", "unreadable data set"):
            if is_saved:
                found = datasets.load_from_disk(str(folder), keep_in_memory=False)
            else:
                found = datasets.load_dataset(
                    str(folder) if folder.is_dir() else config.path,
                    config.name,
                    split=config.split,
                    revision=config.revision,
                    streaming=config.streaming,
                )
    except DataError as error:
        if "script" not in str(error):
            raise
        raise DataError(
            f"{error}. The hub has a copy of most such data sets without scripts: set revision: refs/convert/parquet"
        ) from None
    return _choose_split(found, config)


def _require_place(config: HfConfig, folder: Path, datasets: Any) -> None:
    """Refuse names of file formats, which `load_dataset` takes for data sets of their own."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file; expected a folder, or the name of a data set on the hub")
    formats = datasets.packaged_modules._PACKAGED_DATASETS_MODULES
    if not folder.is_dir() and config.path in formats:
        raise DataError(f"{config.path}: is a file format, not a data set; expected a folder or a name on the hub")
    if not folder.is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", config.path):
        raise DataError(f"{folder.absolute()}: no such folder, and no name of a data set on the hub")


def _choose_split(found: Any, config: HfConfig) -> Any:
    if not isinstance(found, dict):
        return found
    if config.split is None and len(found) != 1:
        raise ConfigError(f"split: missing; expected one of those of {config.where}: {', '.join(map(repr, found))}")
    split = config.split or next(iter(found))
    if split not in found:
        raise ConfigError(
            f"split: got {split!r}; expected one of those of {config.path}: {', '.join(map(repr, found))}"
        )
    return found[split]


class HfStream:
    """The rows of a data set of `datasets`, read forward; see `vqclip.data.sources.packed.Stream`.

    Args:
        config: the data set.
    """

    def __init__(self, config: HfConfig):
        self._where, self._streaming = config.where, config.streaming
        with name_errors(f"{config.where}{_UNREADABLE}", "unreadable data set"):
            data = config.data().with_format("arrow")  # images stay undecoded; `save_to_disk` stores other formats
            features = data.features
            schema = features.arrow_schema if features is not None else next(iter(data.iter(1))).schema
            columns = find_columns(schema, config, config.where)
            if not self._streaming:
                data.data.table.select(columns.names).validate(full=True)  # otherwise reading could leave the file
            classes = read_classes(columns, config, config.where, lambda: self._values(data, columns.label or ""))
            self._data = data.select_columns(columns.names)
            self._divide()
        folder = expand_home(config.path).absolute()
        self._parser = RowParser(columns, config, classes, folder if folder.is_dir() else Path.cwd())
        self.classnames, self.has_prompts = self._parser.classnames, self._parser.has_prompts
        self.notes = columns.notes
        self._fetches = config.urls != "refuse"

    def _values(self, data: Any, label: str) -> list[list[Any]]:
        """Return the values of the label; a stream would have to be read twice."""
        if self._streaming:
            raise ConfigError(
                f"{self._where}: classnames: missing; expected the names of the classes in column {label!r} (without "
                "streaming they are found)"
            )
        return [data.select_columns([label])[:].column(0).to_pylist()]

    def _divide(self) -> None:
        """Divide rows into pieces; a stream has a piece for each of its files."""
        if self._streaming:
            self.pieces: Sequence[Piece] = [Piece(self._where, 0)] * self._data.num_shards
            return
        rows = len(self._data)
        size = self._data.data.table.nbytes // max(rows, 1)
        count = -(-rows // _PIECE_ROWS)
        self.pieces = [Piece(self._where, size * min(_PIECE_ROWS, rows - n * _PIECE_ROWS)) for n in range(count)]

    def __str__(self) -> str:
        return self._where

    def read(self, piece: int) -> Iterator[StreamSample]:
        """Yield the samples of a piece; see `Stream.read`."""
        start, stop = (0, 1 << 62) if self._streaming else (piece * _PIECE_ROWS, (piece + 1) * _PIECE_ROWS)
        groups = group_rows(self._rows(piece, max(start - 1, 0)), start, stop, self._parser.columns)
        yield from parse_groups(groups, self._parser, self._where, self._fetches)

    def _rows(self, piece: int, start: int) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
        """Yield number and values of the rows from a row on; those of a stream begin with a file."""
        if self._streaming:
            shard = self._data.shard(num_shards=len(self.pieces), index=piece)
            batches: Iterator[Any] = iter(shard.iter(_BATCH))
        else:
            batches = (self._data[at : at + _BATCH] for at in range(start, len(self._data), _BATCH))
        number = start
        while True:
            try:
                with name_errors(f"{self._where}: row {number}{_UNREADABLE}", "damaged row"):
                    batch = next(batches, None)
            except DataError as error:
                raise StorageError(str(error), "unreadable data set") from None
            if batch is None:
                return
            for row in read_batch(batch):
                yield number, row
                number += 1
