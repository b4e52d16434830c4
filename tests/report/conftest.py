from pathlib import Path

import pytest

from tests.report.making import make_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A healthy run."""
    return make_run(tmp_path / "run")
