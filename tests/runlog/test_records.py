from __future__ import annotations

import os
from pathlib import Path

import pytest

from vqclip.runlog.records import Records


class NoData:
    def take_replaced(self):
        return []

    def take_lengths(self):
        return {}


def write_on_a_disk_that_is_full_at_the_end(folder, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    with Records(folder, 0, NoData(), {}, None) as records:
        for file in (records.metrics, *records._files):
            file.write(1, {"a": 1})
        monkeypatch.setattr(os, "fsync", full)


def test_all_files_are_closed_whatever_happens_to_one(tmp_path, monkeypatch, caplog):
    with pytest.raises(OSError, match="No space left"):
        write_on_a_disk_that_is_full_at_the_end(tmp_path, monkeypatch)
    monkeypatch.undo()
    paths = [f"{tmp_path}/{name}.jsonl" for name in ("metrics", "bad_samples", "events")]
    lost = "may lack its last lines: [Errno 28] No space left on device"
    assert sorted(caplog.messages) == sorted(f"{path}: {lost}: '{path}'" for path in paths)
    held = {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink() and each.exists()}
    assert not {each for each in held if each.startswith(str(tmp_path))}
