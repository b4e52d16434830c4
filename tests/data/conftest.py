from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Indexes of a test go to a folder of its own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VQCLIP_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets."""
    folder = os.environ.get("VQCLIP_DATA")
    if not folder:
        pytest.skip("needs real data: set VQCLIP_DATA to a folder with captions_noto_emoji, captions_pomological, ...")
    return Path(folder)
