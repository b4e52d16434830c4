from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.config.schema import Bits, Tree
from vqclip.config import load_config, to_yaml
from vqclip.errors import ConfigError


def test_defaults_without_a_file():
    assert load_config(Tree) == Tree()


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n", "null\n"])
def test_empty_file_is_all_defaults(loaded, text):
    assert loaded(text) == Tree()


def test_file_gives_typed_values(loaded):
    config = loaded("optim: {learning_rate: 1e-4, betas: [1, 1.5]}\nlayer:\n  kind: bits\n  bits: 3\npath: [a, b/c]\n")
    assert config.optim.learning_rate == 1e-4
    assert config.optim.betas == (1.0, 1.5)
    assert config.layer == Bits(bits=3)
    assert config.path == (Path("a"), Path("b/c"))


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such configuration file"):
        load_config(Tree, tmp_path / "nowhere.yaml")


def test_folder_instead_of_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(Tree, tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\nb: 2", "c.yaml:2: not valid YAML: while parsing a flow sequence"),
        ("name: 'x\n", "c.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2", "c.yaml:2: not valid YAML: expected a single document"),
        ("a: *b", "c.yaml:1: not valid YAML: found undefined alias"),
        ("name: \x07", "c.yaml: not valid YAML: unacceptable character"),
        ("[1, 2]", "c.yaml: got [1, 2] (list) at the top; expected `key: value` lines"),
        ("hello", "c.yaml: got 'hello' (str) at the top"),
        (b"name: \xff", "c.yaml: not UTF-8 text"),
    ],
)
def test_unreadable(problems, text, expected):
    (line,) = problems(text)
    assert line.startswith(expected)


def test_paths_of_any_bytes(loaded, problems):
    """As a command line gives them, and as they are written into config.yaml."""
    name = os.fsdecode(b"caf\xe9: 'x'")
    tree = loaded("", f"path=[{json.dumps(name)}]")
    assert tree.path == (Path(name),)
    assert to_yaml(tree).isascii()
    assert loaded(to_yaml(tree)) == tree
    assert loaded("", "path=[" + os.fsdecode(b"\xff/a.tar]")).path == (Path(os.fsdecode(b"\xff/a.tar")),)
    assert json.loads(tree.model_dump_json())["path"] == [name]
    assert "half a character" in problems("", r'path=["\ud800"]')[0]


def test_a_pipe_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match=r"c\.yaml: cannot be read: not a regular file"):
        load_config(Tree, tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "overrides", "line"),
    [
        (
            "optim: {learning_rate: 1}",
            ["name=x", "optim.betas=[0.9, 0.1]"],
            'override "optim.betas=[0.9, 0.1]": optim: b',
        ),
        (
            "optim: {learning_rate: 1, betas: [0.1, 0.9]}",
            ["optim.betas[0]=1"],
            'override "optim.betas[0]=1": optim: be',
        ),
        (
            "optim: {learning_rate: 1, betas: [0.5, 0.9]}",
            ["optim.betas[0]=0.4", "optim.betas[1]=0.3", "name=x"],
            'override "optim.betas[1]=0.3": optim: betas',
        ),
        (
            "layer: {kind: bits}",
            ["name=x", "layer.kind=several"],
            'override "layer.kind=several": layer.layer: missing',
        ),
        ("optim: {learning_rate: 1, betas: [0.9, 0.1]}", ["name=x"], "c.yaml:1: optim: betas must not fall"),
        ("optim: {betas: [0.9, 0.1]}", ["optim.fused=true"], "c.yaml:1: optim.learning_rate: missing"),
    ],
)
def test_a_problem_is_blamed_on_what_brought_it(problems, text, overrides, line):
    (said,) = problems(text, *overrides)
    assert said.startswith(line)
