from pathlib import Path

import pytest

from tests.data.making import caption_shards


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 30 samples, which no test changes."""
    return caption_shards(tmp_path_factory.mktemp("shards"), counts=(17, 13))
