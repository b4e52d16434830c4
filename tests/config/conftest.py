from pathlib import Path

import pytest

from tests.config.schema import Tree
from vqclip.config import Config, load_config
from vqclip.errors import ConfigError


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """The lines of the error that a file and overrides give."""
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes, *overrides: str, schema: type[Config] = Tree) -> list[str]:
        Path("c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigError) as error:
            load_config(schema, "c.yaml", overrides)
        return str(error.value).split("\n")

    return load


@pytest.fixture
def loaded(tmp_path):
    def load(text: str, *overrides: str, schema: type[Config] = Tree):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return load_config(schema, path, overrides)

    return load
