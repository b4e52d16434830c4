from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.making import caption_shards, class_folder
from tests.data.serving import FaultyServer, serving


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Indexes of a test go to a folder of its own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VQCLIP_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The three sources of `open_data`."""
    caption_shards(tmp_path / "a", (9, 8))
    caption_shards(tmp_path / "b", (12,), first=100)
    class_folder(tmp_path / "c", 6)
    return tmp_path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """An HTTP server on this machine, reached without a proxy."""
    monkeypatch.setenv("no_proxy", "*")
    with serving() as running:
        yield running


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What retries wait, which takes no time here."""
    waited: list[float] = []
    monkeypatch.setattr("vqclip.data.remote.retry._sleep", waited.append)
    return waited
