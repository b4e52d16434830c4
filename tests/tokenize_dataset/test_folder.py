from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.data.tokens.test_dataset import records, settings
from vqclip.errors import ConfigError
from vqclip.io.atomic import remove_leftovers, write_file
from vqclip.tokenize_dataset.folder import TokenFolder


def test_of_two_settings_at_once_one_is_refused(tmp_path: Path) -> None:
    """Both commands have seen an empty folder before either publishes."""
    both, ends = threading.Barrier(2, timeout=30), []

    def meet(folder: Path) -> None:
        both.wait()

    def begin(batch_size: int) -> None:
        try:
            TokenFolder(tmp_path, settings().model_copy(update={"batch_size": batch_size}))
            both.wait()
            ends.append(batch_size)
        except ConfigError as error:
            both.wait()
            ends.append(str(error))

    with mock.patch.object(TokenFolder, "_require_no_shards", meet):
        threads = [threading.Thread(target=begin, args=(size,)) for size in (8, 9)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    refused, accepted = sorted(ends, key=lambda end: isinstance(end, int))
    assert f"batch_size: {accepted} there, {17 - accepted} now" in refused
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["settings.json"]


def test_two_settings_published_one_after_the_other(tmp_path: Path) -> None:
    """The second command looked before the first published, and publishes after it has been accepted."""

    def first(folder: Path) -> None:
        with mock.patch.object(TokenFolder, "_require_no_shards"):
            TokenFolder(tmp_path, settings())

    with (
        mock.patch.object(TokenFolder, "_require_no_shards", first),
        pytest.raises(ConfigError, match="batch_size: 8 there, 9 now"),
    ):
        TokenFolder(tmp_path, settings().model_copy(update={"batch_size": 9}))
    TokenFolder(tmp_path, settings())


def test_a_rank_ahead_is_no_foreign_folder(tmp_path: Path) -> None:
    """Between the look for settings and that for shards, another rank writes both."""
    exists, ahead = Path.exists, []

    def late(path: Path, **options: Any) -> bool:
        found = exists(path, **options)
        if path.name == "settings.json" and not ahead:
            ahead.append(path)
            TokenFolder(tmp_path, settings()).write(0, records(0, 2), 2, [])
        return found

    with mock.patch.object(Path, "exists", late):
        TokenFolder(tmp_path, settings())
    assert ahead


def test_a_record_that_names_another_file_is_made_anew(tmp_path: Path) -> None:
    folder = TokenFolder(tmp_path, settings())
    folder.write(0, records(0, 2), 2, [])
    assert folder.find_finished(0) is not None
    (tmp_path / "records" / "00001.json").write_bytes((tmp_path / "records" / "00000.json").read_bytes())
    assert folder.find_finished(1) is None


def test_what_is_being_written_is_not_cleared(tmp_path: Path) -> None:
    """Also where the process has opened and closed it once more, to hash it."""
    replace = os.replace

    def late(aside: Path, path: Path) -> None:
        remove_leftovers(tmp_path)
        replace(aside, path)

    with mock.patch("os.replace", late):
        write_file(tmp_path / "file", lambda file: file.write(b"all"))
    assert (tmp_path / "file").read_bytes() == b"all"
    (tmp_path / ".tmp-left-over").touch()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
