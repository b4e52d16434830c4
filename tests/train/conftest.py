"""Fixtures shared by the tests of the training."""

from __future__ import annotations

import pytest

from tests.data.making import caption_shards


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Two shards with 30 captioned images."""
    return caption_shards(tmp_path_factory.mktemp("shards"), counts=(17, 13))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Cache folder of this test in this process; ranks get it as an argument."""
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "cache")
