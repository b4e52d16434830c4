import json
import os
from pathlib import Path

import pytest

from tests.config.schema import Bits, Grid, Optim, Tree
from vqclip.config import load_config, to_yaml
from vqclip.errors import ConfigError


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n", "null\n"])
def test_empty_file_is_all_defaults(loaded, text):
    assert loaded(text) == Tree()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.yaml", r"nowhere\.yaml: no such configuration file"),
        ("folder", r"folder: cannot be read"),
        ("pipe", r"pipe: cannot be read: not a regular file"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=message):
        load_config(Tree, tmp_path / name)


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


@pytest.mark.parametrize(
    ("text", "overrides", "line"),
    [
        (
            "optim: {learning_rate: 1, betas: [0.5, 0.9]}",
            ["optim.betas[0]=0.4", "optim.betas[1]=0.3", "name=x"],
            'override "optim.betas[1]=0.3": optim: betas',
        ),
        ("layer: {kind: bits}", ["name=x", "layer.kind=several"], 'override "layer.kind=several": layer.layer: miss'),
        ("optim: {learning_rate: 1, betas: [0.9, 0.1]}", ["name=x"], "c.yaml:1: optim: betas must not fall"),
        ("optim: {betas: [0.9, 0.1]}", ["optim.fused=true"], "c.yaml:1: optim.learning_rate: missing"),
    ],
)
def test_a_problem_is_blamed_on_what_brought_it(problems, text, overrides, line):
    (said,) = problems(text, *overrides)
    assert said.startswith(line)


def test_overrides_in_order_with_indices_and_yaml_values(loaded):
    config = loaded(
        "layer: {kind: grid, levels: [2, 3]}\nlayers: [{kind: bits}]",
        "layer.levels[1]=7",
        "layer.levels.0=6",
        "optim.learning_rate=1e-4",
        "optim.betas=[0.1, 0.2]",
        "layers[0].bits=5",
        "layers[0].bits=6",
        "path=null",
        "name='a: b'",
    )
    assert config.layer == Grid(levels=(6, 7))
    assert config.optim.learning_rate == 1e-4
    assert config.optim.betas == (0.1, 0.2)
    assert config.layers == (Bits(bits=6),)
    assert config.name == "a: b"


def test_override_changes_a_part_of_a_default_section():
    config = load_config(Tree, None, ["layer.levels[1]=7", "optim.warmup=2"])
    assert config.layer == Grid(levels=(4, 7))
    assert config.optim == Optim(learning_rate=0.5, fused=True, warmup=2)


def test_override_chooses_another_kind_than_the_default_and_turns_null_into_a_section(loaded):
    kind, bits = "layer.kind=bits", "layer.bits=3"
    for overrides in ([kind, bits], [bits, kind], ["layer={kind: bits, bits: 3}"]):
        assert load_config(Tree, None, overrides).layer == Bits(bits=3)
    assert loaded("needed: null", "needed.kind=bits").needed == Bits()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name", "expected section.key=value or section.list[0]=value"),
        ("=3", "expected section.key=value"),
        ("a..b=3", "expected section.key=value"),
        ("a[x]=3", "expected section.key=value"),
        ("name.x=3", "name: is 'n' (str), which has no 'x' to set"),
        ("optim.betas.x=3", "optim.betas: a list; got 'x', expected an index from 0 to 1"),
        ("optim.betas[2]=3", "optim.betas: a list; got '2', expected an index from 0 to 1"),
        ("layers[0]=3", "layers: a list; got '0', expected no index, because the list is empty"),
        ("name=[", "not valid YAML"),
        ("name=!!python/name:os.system x", "tag '!!python/name:os.system' is not allowed"),
        ("optim={fused: true, fused: false, learning_rate: 1}", "optim.fused: given twice"),
        ("weights={a: 1, b: c}", "weights.b: got 'c' (str); expected a number"),
    ],
)
def test_bad_override(problems, override, message):
    lines = problems("name: n\nlayers: []\noptim: {learning_rate: 1, betas: [0, 1]}", override)
    assert any(f'override "{override}": ' in line and message in line for line in lines), lines
    assert len(lines) == 1 or "tag" in message


@pytest.mark.parametrize("text", ["1e-4", "1E+3", "-.5", "3", "0x10", "010"])
def test_numbers(loaded, text):
    value = 16.0 if text == "0x10" else float(text)
    assert loaded(f"weights: {{a: {text}}}").weights["a"] == value
    assert load_config(Tree, None, [f"weights.a={text}"]).weights["a"] == value


@pytest.mark.parametrize("text", ["no", "on", "12:30", "2024-01-01", "1_000", "a=b", "1e", "0x", "NaN", "+", "="])
def test_words_stay_strings(loaded, text):
    assert loaded(f"name: {text}").name == text
    assert load_config(Tree, None, [f"name={text}"]).name == text


def test_duplicate_keys_are_reported_with_everything_else(problems):
    text = "optim:\n  learning_rate: 1\n  learning_rate: 2\nname: 3\nname: x\n"
    assert problems(text, "layer.kind=x") == [
        "c.yaml:3: optim.learning_rate: given twice (first on line 2); remove one",
        "c.yaml:5: name: given twice (first on line 4); remove one",
        'override "layer.kind=x": layer.kind: got \'x\' (str); expected one of "grid", "bits", "several"',
    ]


def test_keys_are_strings(problems):
    assert problems("1: x\n? [a]\n: b\n") == [
        "c.yaml:1: key '1' is not a string; put it in quotes",
        "c.yaml:2: key 'a list or mapping' is not a string; put it in quotes",
    ]


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!set", "!mine"])
@pytest.mark.parametrize("value", ["[echo]", "x", "{a: b}"])
def test_tags_make_nothing(problems, tag, value):
    line = problems(f"name: {tag} {value}\n")[0]
    assert line.startswith("c.yaml:1: name: tag ")
    assert "is not allowed" in line


def test_aliases_are_plain_copies(loaded):
    config = loaded("layers: [&a {kind: bits, bits: 3}, *a]")
    assert config.layers == (Bits(bits=3), Bits(bits=3))


def test_alias_bomb_is_refused_quickly(problems):
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &l{i} [" + ", ".join([f"*l{i - 1}"] * 8) + "]" for i in range(1, 12)]
    (line,) = problems("\n".join(lines))
    assert "more than 20000 values" in line


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "a: " + "[" * 70 + "]" * 70, "a: " + "[" * 9000])
def test_endless_or_deep_nesting_is_refused(problems, text):
    (line,) = problems(text)
    assert "64 levels" in line


def test_huge_file_and_huge_number_are_refused(problems):
    assert "characters; a configuration has at most" in problems("# " + "x" * (1 << 18))[0]
    assert "more than 1048576 bytes; a configuration has fewer" in problems("# " + "x" * (1 << 20))[0]
    assert "more than 20000 values; a configuration is smaller" in problems("- a\n" * 60_000)[0]
    assert "cannot be read" in problems("name: " + "9" * 5000)[0]
