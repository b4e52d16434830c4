"""Every configuration that we ship loads, is written out in full and read back, and has no mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from vqclip.config import json_schema, load_config, to_yaml
from vqclip.errors import ConfigError
from vqclip.train import TrainConfig

FOLDER = Path(__file__).parent.parent / "configs"
FILES = sorted(FOLDER.rglob("*.yaml"))


def test_the_promised_files_are_there():
    assert {"base.yaml", "eurosat.yaml", "captions.yaml", "vit_b16.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_loads_and_round_trips(file, tmp_path):
    config = load_config(TrainConfig, file)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(TrainConfig, resolved) == config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_begins_with_a_comment_that_says_what_it_is(file):
    assert file.read_text(encoding="utf-8").startswith("# ")


def test_a_wait_that_overflows_is_refused():
    with pytest.raises(ConfigError, match=r"run.timeout_s: got 1e\+30 \(float\); expected a number > 0 and <= 604800"):
        load_config(TrainConfig, FOLDER / "base.yaml", ["run.timeout_s=1.0e+30"])


def test_every_field_of_every_section_has_a_docstring():
    schema = json_schema(TrainConfig)
    sections = {"TrainConfig": schema, **schema["$defs"]}
    bare = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, field in section.get("properties", {}).items()
        if key != "kind" and not field.get("description")
    ]
    assert bare == []
