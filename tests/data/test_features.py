"""Shards that cannot be read."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from vqclip.data.features import FeatureFolder, FeatureReader, FeatureSettings
from vqclip.errors import StorageError


@pytest.fixture
def stored(tmp_path):
    """A finished folder of two shards, with a row for each of six samples."""
    settings = FeatureSettings(
        modality="image", samples=6, shard_samples=3, tokens=2, width=3, dtype="fp16", origin={"data": "none"}
    )
    folder = FeatureFolder(tmp_path, settings)
    folder.make()
    for shard in range(2):
        rows = torch.arange(18, dtype=torch.float16).view(3, 2, 3) + 100 * shard
        folder.write(shard, [[0], [1], [2]], rows)
    return folder


def test_any_changed_byte_is_noticed_when_it_is_read(stored):
    """Of header, tables and rows; the record is then removed, so that the shard is computed again."""
    path, record = stored.work.file(1), stored.path / "records" / "00001.json"
    content, recorded, noticed = path.read_bytes(), record.read_bytes(), 0
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0x80
        path.write_bytes(damaged)
        reader, failures = FeatureReader(stored), 0
        for sample_id in range(6):
            try:
                found = reader.read(sample_id, 0, 1)
            except StorageError as error:
                failures += "start the run again, which computes this shard again" in str(error)
            else:
                assert found.flatten()[0] == 6 * (sample_id % 3) + 100 * (sample_id // 3)
        assert failures <= 3
        noticed += failures > 0
        assert (stored.work.record(1) is None) == (failures > 0)
        record.write_bytes(recorded)
    assert noticed > 0.95 * len(content)  # all but the spaces that fill up the header


def test_a_shard_in_the_place_of_another_is_noticed(stored):
    stored.work.file(1).write_bytes(stored.work.file(0).read_bytes())
    with pytest.raises(StorageError, match=r"00001\.safetensors: shard is 0; expected 1"):
        FeatureReader(stored).read(4, 0, 1)


def test_a_damaged_shard_that_cannot_be_forgotten_is_named(stored, monkeypatch):
    """Such as one on a read-only file system."""
    stored.work.file(0).write_bytes(b"")
    monkeypatch.setattr("pathlib.Path.unlink", mock.Mock(side_effect=OSError(30, "Read-only file system")))
    with pytest.raises(
        StorageError,
        match=r"00000\.safetensors: cannot be read, damaged or cut short: .*; delete .*00000\.safetensors$",
    ):
        FeatureReader(stored).read(0, 0, 1)


def test_the_most_similar_folder_is_described(stored):
    assert stored.describe_nearest() == []
    for changes in ({"origin": {"data": "other"}}, {"width": 4}, {"width": 4, "tokens": 7}):
        FeatureFolder(stored.path.parent, stored.settings.model_copy(update=changes)).make()
    near = FeatureFolder(stored.path.parent, stored.settings.model_copy(update={"width": 4})).path.name
    assert stored.describe_nearest() == [near, "  width: 4 there, 3 now"]
