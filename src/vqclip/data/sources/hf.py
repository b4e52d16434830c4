"""Source of data sets of Hugging Face's `datasets`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from vqclip.data.lookup import name_errors
from vqclip.data.remote.urls import mask_credentials
from vqclip.data.sources.columns import Row
from vqclip.data.sources.packed import LAYOUT, Packable, Piece, stamp
from vqclip.data.sources.table import TableConfig, TableStream, read_batch
from vqclip.data.work_folder import WorkFolder
from vqclip.errors import ConfigError, DataError, StorageError, import_extra
from vqclip.io.files import cache_folder, expand_home

logger = logging.getLogger("vqclip.data")

_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes for a split, and for several."""
_UNREADABLE = ": cannot be read by datasets"
_PIECE_ROWS = 2000
"""Rows of a piece."""


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

    @property
    def shown(self) -> str:
        """The data set, for messages."""
        return mask_credentials(" ".join(filter(None, (self.path, self.name, self.split))))

    _asked: str | None = PrivateAttr(None)
    """The user's revision, in whose place `pins` puts a commit."""

    def model_post_init(self, context: Any) -> None:
        """Keep the user's revision."""
        super().model_post_init(context)
        self._asked = self.revision

    def pins(self) -> dict[str, Any]:
        """Return the commit that a branch or tag of the hub names now; see `SourceConfigBase.pins`.

        If the hub does not answer, it is the commit that was packed last; without one, the files are used that
        `datasets` has on this machine.
        """
        datasets = _require_datasets(self)
        if self._is_commit or expand_home(self.path).is_dir():
            return {}
        packed = self._find_packed()
        found = {} if packed is None else {"revision": packed.settings["revision"]}
        if datasets.config.HF_HUB_OFFLINE:
            return found
        from huggingface_hub import HfApi

        with name_errors(f"{self.shown}{_UNREADABLE}", "unreadable data set"):
            try:
                return {"revision": str(HfApi().dataset_info(self.path, revision=self.revision).sha)}
            except Exception as error:
                status = getattr(getattr(error, "response", None), "status_code", 0)
                refused = 400 <= status < 500 and status not in (408, 429)
                if refused or (self.streaming and packed is None):
                    raise
                reason = mask_credentials(" ".join(str(error).split())[:200])
                used = f"rows of commit {found['revision']}, packed before," if found else "files on this machine"
                logger.warning("%s: the hub does not name its commit (%s); %s are used", self.path, reason, used)
        return found

    @property
    def _is_commit(self) -> bool:
        return re.fullmatch("[0-9a-f]{40}", self.revision or "") is not None

    def _find_packed(self) -> WorkFolder | None:
        """Return the folder in which the rows of this commit, or of the branch when it was last asked for, are."""
        found = []
        for path in () if expand_home(self.path).is_dir() else (cache_folder() / "packed").glob(f"{self.kind}-*"):
            with contextlib.suppress(FileNotFoundError):  # another job has removed it
                found.append((path.stat().st_mtime, path))
        for _, path in sorted(found, reverse=True):
            if (folder := WorkFolder.existing(path, LAYOUT)) is None:
                continue
            commit, branch = folder.settings.get("revision"), folder.settings.get("asked")
            same = {**folder.settings["source"], "files": None} == {**self._facts(), "files": None}
            wanted = commit if self._is_commit else branch
            if same and commit and wanted == self.revision and not folder.missing():
                return folder
        return None

    def _facts(self) -> dict[str, Any]:
        return {**self.settings(), "revision": None, "folder": os.getcwd()}

    def find(self, known: Mapping[str, Any] | None = None) -> Packable:
        """Find the split; see `PackedConfig.find`. A commit that is packed is not opened, and stays the same.

        Files that another process of this machine has found are opened without the hub, if they are the whole split.
        """
        if self._is_commit and (packed := self._find_packed()) is not None:
            return Packable(packed.settings["source"], lambda: HfStream(self, _load(self)))
        if known is not None and not self.streaming and re.fullmatch(r"\w*", self.split or ""):
            import datasets

            with contextlib.suppress(StorageError):  # this machine may have other files
                paths = [path for path, _, _ in known["files"]]
                if stamp(paths) == known["files"]:
                    data = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in paths])
                    return Packable(known, partial(HfStream, self, data))
        data, folder = _load(self), expand_home(self.path)
        if not self.streaming:
            files: Any = stamp(each["filename"] for each in data.cache_files)
        elif folder.is_dir():
            files = stamp(sorted(each for each in folder.rglob("*") if each.is_file()))
        else:
            files = self.revision  # the commit
        return Packable({**self._facts(), "files": files}, partial(HfStream, self, data))


def is_saved_by_datasets(files: Collection[str]) -> bool:
    """Return whether `save_to_disk` has written a folder with these files."""
    return _SAVED_SPLITS in files or {_SAVED, "dataset_info.json"} <= {*files}


def _require_datasets(config: HfConfig) -> Any:
    """Return the module `datasets`; raise DataError if it is missing or old, or the path can be no data set of it."""
    datasets = import_extra("datasets", "hf", "kind: hf ")
    if int(datasets.__version__.partition(".")[0]) < 4:  # older ones can run scripts of data sets
        raise DataError(f"datasets {datasets.__version__} is installed; expected 4 or later: pip install 'vqclip[hf]'")
    folder = expand_home(config.path)
    if folder.is_dir():
        return datasets
    if folder.exists():
        raise DataError(f"{folder}: is a file; expected a folder, or the name of a data set on the hub")
    if config.path in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        raise DataError(f"{config.path}: is a file format, not a data set; expected a folder or a name on the hub")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", config.path):
        raise DataError(f"{folder.absolute()}: no such folder, and no name of a data set on the hub")
    return datasets


def _load(config: HfConfig) -> Any:
    """Open one split of the data set."""
    datasets, folder = _require_datasets(config), expand_home(config.path)
    is_saved = (folder / _SAVED).is_file() or (folder / _SAVED_SPLITS).is_file()
    if is_saved and (config.streaming or config.name or config.revision):
        raise ConfigError(
            f"{folder}: was written by save_to_disk, which has no streaming, name or revision: leave them out"
        )
    try:
        with name_errors(f"{config.shown}{_UNREADABLE}", "unreadable data set"):
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
    if not isinstance(found, dict):
        return found
    splits = ", ".join(map(repr, found))
    if config.split is None and len(found) != 1:
        raise ConfigError(f"split: missing; expected one of those of {config.shown}: {splits}")
    split = config.split or next(iter(found))
    if split not in found:
        raise ConfigError(f"split: got {split!r}; expected one of those of {config.path}: {splits}")
    return found[split]


class HfStream(TableStream):
    """The rows of a data set of `datasets`, read forward; see `vqclip.data.sources.packed.Stream`.

    Args:
        config: the data set.
        data: its opened split.
    """

    def __init__(self, config: HfConfig, data: Any):
        self._streaming = config.streaming
        folder = expand_home(config.path).absolute()
        with name_errors(f"{config.shown}{_UNREADABLE}", "unreadable data set"):
            self._data = data = data.with_format("arrow")  # images stay undecoded, whatever was saved
            schema = data.features.arrow_schema if data.features is not None else next(iter(data.iter(1))).schema
            super().__init__(config, schema, config.shown, folder if folder.is_dir() else Path.cwd())
            if self._streaming:  # a piece for each of its files
                self.pieces = [Piece(config.shown, 0)] * data.num_shards
                self.ranges = [range(1 << 62)] * data.num_shards
            else:
                table = data.select_columns(self.stored).data.table
                table.validate(full=True)  # otherwise reading could leave the file
                size, rows = table.nbytes // max(len(data), 1), range(len(data))
                self.ranges = [rows[first : first + _PIECE_ROWS] for first in rows[::_PIECE_ROWS]]
                self.pieces = [Piece(config.shown, size * len(each)) for each in self.ranges]
        self.find_classes(read_once=self._streaming)

    def rows(self, piece: int, start: int, columns: Sequence[str]) -> Iterator[Row]:
        """See `TableStream.rows`."""
        data, size = self._data.select_columns([*columns]), self.batch_size(columns)
        if self._streaming:
            batches = iter(data.shard(num_shards=len(self.pieces), index=piece).iter(size))
        else:
            batches = (data[at : at + size] for at in range(start, len(data), size))
        number = start
        while True:
            try:
                with name_errors(f"{self}: row {number}{_UNREADABLE}", "damaged row"):
                    batch = next(batches, None)
            except DataError as error:
                raise StorageError(str(error), "unreadable data set") from None
            if batch is None:
                return
            for row in read_batch(batch):
                yield number, row
                number += 1
