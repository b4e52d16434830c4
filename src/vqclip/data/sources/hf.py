"""Source of data sets of Hugging Face's `datasets`."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from vqclip.data.libraries import name_errors
from vqclip.data.remote import mask_credentials
from vqclip.data.sources.base import FolderContent, RawSample, Source
from vqclip.data.sources.rows import Block, RowSource, divide, stamp
from vqclip.data.sources.table import RowParser, TableConfig, find_columns
from vqclip.errors import ConfigError, DataError, StorageError
from vqclip.io.files import expand_home

__all__ = ["HfConfig"]

_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes for a split, and for several."""
_UNREADABLE = ": cannot be read by datasets"
_CHECK_S = 1.0
"""Seconds after which the files are compared again with what they were."""


class HfConfig(TableConfig):
    """A data set of `datasets`: a folder that `save_to_disk` has written, or the name of one on the hub.

    No code of a data set runs: `datasets` 4 and later has no way to. Images are not decoded by it.
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
    """Branch, tag or commit on the hub; null: the main branch."""
    streaming: bool = False
    """Read in order from the hub, without a copy on this machine; for evaluation, tokenizing and packing only, and with
    a commit as `revision`."""

    _opened: list[tuple[str, int, int]] | None = PrivateAttr(None)

    @property
    def opened(self) -> list[tuple[str, int, int]] | None:
        """Files that `shards` has found, for other processes of this machine: these need not ask the hub again."""
        return self._opened

    def set_opened(self, opened: Any) -> None:
        """Open the data from the `opened` of another process, as JSON has it, if this one sees the same files."""
        self._opened = None if opened is None else [(str(path), *numbers) for path, *numbers in opened]

    @property
    def forward_only(self) -> bool:
        """Return whether rows can be read in their order alone."""
        return self.streaming

    @classmethod
    def matches_folder(cls, content: FolderContent) -> bool:
        """Return whether `save_to_disk` has written the folder."""
        return _SAVED_SPLITS in content.files or {_SAVED, "dataset_info.json"} <= content.files

    @property
    def where(self) -> str:
        """The data set, for messages."""
        return mask_credentials(" ".join(filter(None, (self.path, self.name, self.split))))

    def shards(self) -> Sequence[Block]:
        """Return blocks of rows, after fetching the data set; for `vqclip.data.prepare_sources`.

        Raises:
            DataError: `datasets` is not installed, or cannot read the data set.
            ConfigError: a split or column is missing or not plain.
        """
        if self.streaming:
            return ()
        rows = HfRows(self, self._opened)
        self._opened = rows.files if re.fullmatch(r"\w*", self.split or "") else None  # not of a part of a split
        return divide(rows)

    def build(self, cache: Path | None = None) -> Source:
        """Open the data set."""
        opened, self._opened = self._opened, None  # the next run asks the hub again
        return RowSource(HfStream(self) if self.streaming else HfRows(self, opened), "hf", cache)


def _require_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError("kind: hf needs the package datasets: pip install 'vqclip[hf]'") from None
    if int(datasets.__version__.partition(".")[0]) < 4:  # older ones can run scripts of data sets
        raise DataError(f"datasets {datasets.__version__} is installed; expected 4 or later: pip install 'vqclip[hf]'")
    return datasets


def _load(config: HfConfig, opened: list[tuple[str, int, int]] | None) -> Any:
    """Open one split of the data set, its images undecoded, with the columns that are read."""
    datasets = _require_datasets()
    folder = expand_home(config.path)
    is_saved = (folder / _SAVED).is_file() or (folder / _SAVED_SPLITS).is_file()
    if is_saved and (config.streaming or config.name or config.revision):
        raise ConfigError(
            f"{folder}: was written by save_to_disk, which has no streaming, name or revision: leave them out"
        )
    with contextlib.suppress(StorageError):  # this machine may have other files
        if opened and not is_saved and stamp([path for path, _, _ in opened]) == opened:
            return datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path, _, _ in opened])
    with name_errors(f"{config.where}{_UNREADABLE}", "unreadable data set"):
        if is_saved:
            found = datasets.load_from_disk(str(folder), keep_in_memory=False)
        else:
            _require_place(config, folder, datasets)
            found = datasets.load_dataset(
                str(folder) if folder.is_dir() else config.path,
                config.name,
                split=config.split,
                revision=config.revision,
                streaming=config.streaming,
            )
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


def _select(found: Any, config: HfConfig) -> tuple[Any, RowParser]:
    """Return the data set with the columns that are read, its images undecoded, and the parser of its rows."""
    datasets = _require_datasets()
    if found.features is None:
        raise DataError(
            f"{config.where}: states no features (columns and types); it cannot be streamed. Leave streaming out"
        )
    parser = RowParser(find_columns(found.features.arrow_schema, config, config.where), config)
    image = parser.columns.image
    if not config.streaming:
        found = found.with_format(None)  # that of `set_format` is saved with the data
        found.data.table.select(parser.columns.names).validate(full=True)  # otherwise reading could leave the file
    if isinstance(found.features[image], datasets.Image):
        found = found.cast_column(image, datasets.Image(decode=False))
    return found.select_columns(parser.columns.names), parser


class HfRows:
    """Rows of a data set on this machine.

    Args:
        config: the data set.
        opened: its files, if they are known; see `HfConfig.opened`.
    """

    content: str | None = None

    def __init__(self, config: HfConfig, opened: list[tuple[str, int, int]] | None = None):
        self._where = config.where
        with name_errors(f"{config.where}{_UNREADABLE}", "unreadable data set"):
            found = _load(config, opened)
            self._data, self._parser = _select(found, config)
            self._examine(found, config)
        self.classnames, self.templates = self._parser.classnames, self._parser.templates

    def _examine(self, found: Any, config: HfConfig) -> None:
        """Find out the number of rows, and what identifies them."""
        self._count = len(found)
        self.files, self._checked = stamp([each["filename"] for each in self._data.cache_files]), time.monotonic()
        self.identity = f"{config.model_dump_json(exclude={'weight', 'remote'})} {os.getcwd()} {self.files}"

    def __len__(self) -> int:
        return self._count

    def __str__(self) -> str:
        return self._where

    def read(self, index: int, name: str) -> RawSample:
        """Return the sample of a row; see `Rows.read`."""
        with name_errors(f"{name}{_UNREADABLE}", "damaged row"):
            row = self._row(index, name)
        return self._parser.parse(row, name)

    def _row(self, index: int, name: str) -> Any:
        if time.monotonic() - self._checked > _CHECK_S:
            if stamp([path for path, _, _ in self.files]) != self.files:
                raise StorageError(
                    f"{name}: the files of the data set have changed; start the run again", "changed shard"
                )
            self._checked = time.monotonic()
        return self._data[index]


class HfStream(HfRows):
    """Rows in order, from the hub or a folder; going back starts again from the beginning.

    Args:
        config: the data set.

    Raises:
        DataError: its number of rows is not known.
        ConfigError: the revision is no commit, so that the content could change.
    """

    def __init__(self, config: HfConfig):
        folder = expand_home(config.path)
        if not folder.is_dir() and not re.fullmatch("[0-9a-f]{40}", config.revision or ""):
            raise ConfigError(
                f"revision: got {config.revision!r}; streaming needs a commit (40 digits, from the data set's page on "
                "the hub), since nothing else fixes the content"
            )
        super().__init__(config)
        self._rows: Iterator[Any] | None = None
        self._at, self._pid = 0, 0

    def _examine(self, found: Any, config: HfConfig) -> None:
        splits = found.info.splits or {}
        self._count = int(getattr(splits.get(str(found.split)), "num_examples", None) or 0)
        if not self._count:
            raise DataError(f"{config.where}: its card states no number of rows; leave streaming out")
        folder = expand_home(config.path)
        commit = config.revision or stamp(sorted(each for each in folder.rglob("*") if each.is_file()))
        keys = config.model_dump(mode="json", include={"path", "name", "split"})
        self.content = f"{keys} {self._parser.fingerprint} {commit}"

    def _row(self, index: int, name: str) -> Any:
        """Return a row; rows before it are read and dropped."""
        if self._rows is None or index < self._at or self._pid != os.getpid():
            self._rows, self._at, self._pid = iter(self._data), 0, os.getpid()
        row = None
        while self._at <= index:
            row = next(self._rows, None)
            self._at += 1
        if row is None:
            raise StorageError(f"{name}: the data set ends before; its card states {len(self)} rows")
        return row

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_rows": None}
