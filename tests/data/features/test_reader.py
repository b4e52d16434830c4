"""Shards that cannot be read."""

from __future__ import annotations

import os

import pytest

from vqclip.data.features import FeatureFolder, FeatureReader, FeatureSettings
from vqclip.errors import StorageError


@pytest.mark.parametrize(("kind", "message"), [("folder", "Is a directory"), ("file", "cut short")])
def test_a_shard_that_cannot_be_read_leaves_no_file_open(tmp_path, kind, message):
    settings = FeatureSettings(
        modality="image", samples=4, shard_samples=4, tokens=1, width=1, dtype="fp32", origin={"data": "none"}
    )
    folder = FeatureFolder(tmp_path, settings)
    folder.make()
    folder.shard_path(0).mkdir() if kind == "folder" else folder.shard_path(0).write_bytes(b"short")
    reader, before = FeatureReader(folder), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(StorageError, match=message):
            reader.read(0, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before
