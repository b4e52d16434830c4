from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, field_validator, model_validator

from vqclip.config import Config, json_schema, load_config, suggest_keys, to_yaml
from vqclip.errors import ConfigError


class Grid(Config):
    kind: Literal["grid"] = "grid"
    levels: tuple[Annotated[int, Field(ge=2)], ...] = Field((8, 5, 5, 5), min_length=1)


class Bits(Config):
    kind: Literal["bits"] = "bits"
    bits: int = Field(10, ge=1, le=62)


class Several(Config):
    kind: Literal["several"] = "several"
    layer: Layer
    codebooks: int = 2


Layer = Annotated[Grid | Bits | Several, Field(discriminator="kind")]
Several.model_rebuild()


class Optim(Config):
    learning_rate: float = Field(gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    name: Literal["adamw", "sgd"] = "adamw"
    fused: bool = False
    warmup: int | None = None

    @field_validator("warmup")
    @classmethod
    def _even(cls, value: int | None) -> int | None:
        if value is not None and value % 2:
            raise ValueError("expected an even number")
        return value

    @model_validator(mode="after")
    def _rising(self) -> Optim:
        if self.betas[0] > self.betas[1]:
            raise ValueError("betas must not fall")
        return self


class Tree(Config):
    optim: Optim = Optim(learning_rate=0.5, fused=True)
    layer: Layer = Grid(levels=(4, 3))
    needed: Layer | None = None
    path: Path | tuple[Path, ...] | None = None
    name: str = "run"
    weights: dict[str, float] = {}
    layers: tuple[Layer, ...] = ()


class Needed(Config):
    layer: Layer


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


# --- values -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+3", 1e3),
        ("-.5", -0.5),
        ("3", 3.0),
        ("0x10", 16.0),
        ("0o17", 15.0),
        ("010", 10.0),
        ("1.", 1.0),
    ],
)
def test_numbers(loaded, text, value):
    assert loaded(f"weights: {{a: {text}}}").weights["a"] == value
    assert load_config(Tree, None, [f"weights.a={text}"]).weights["a"] == value


@pytest.mark.parametrize("text", ["no", "on", "12:30", "2024-01-01", "1_000", "a=b", "1e", "0x", "NaN", "+", "="])
def test_words_stay_strings(loaded, text):
    assert loaded(f"name: {text}").name == text
    assert load_config(Tree, None, [f"name={text}"]).name == text


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": "3"},
        {"learning_rate": True},
        {"learning_rate": math.nan},
        {"learning_rate": math.inf},
        {"learning_rate": 1, "fused": 1},
        {"learning_rate": 1, "warmup": 2.0},
        {"learning_rate": 1, "warmup": "2"},
        {"learning_rate": 1, "name": None},
    ],
)
def test_scalars_are_strict_from_python_too(values):
    with pytest.raises(ValidationError) as error:
        Optim(**values)
    assert error.value.error_count() == 1


def test_python_may_pass_lists_strings_and_dicts():
    config = Tree(layer={"kind": "several", "layer": {"kind": "grid", "levels": [3, 2]}}, path="a")
    assert config.layer == Several(layer=Grid(levels=(3, 2)))
    assert config.path == Path("a")
    assert config.layer.layer.levels == (3, 2)


def test_frozen_and_picklable():
    config = Tree()
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "x"
    assert pickle.loads(pickle.dumps(config)) == config


# --- all problems at once ---------------------------------------------------------------------------------------------


def test_every_problem_in_one_error_with_line_path_got_and_allowed(problems):
    text = """\
optim:
  learning_rat: 1
  betas: [1]
  name: adam
  warmup: 3
layer:
  kind: grit
path: 3
layers:
- kind: grid
  level: [1]
- kind: several
  layer:
    kind: grid
    levels: [8, 1]
- bits: 3
- 4
weights: {a: .nan, b: x}
"""
    assert problems(text, "optim.fused=yes", "optm.x=1") == [
        "c.yaml:1: optim.learning_rate: missing; expected a number > 0",
        'c.yaml:2: optim.learning_rat: unknown key; did you mean "learning_rate"?',
        "c.yaml:3: optim.betas[1]: missing; expected a number",
        'c.yaml:4: optim.name: got \'adam\' (str); expected one of "adamw", "sgd"; did you mean "adamw"?',
        "c.yaml:5: optim.warmup: got 3 (int); expected an even number",
        'c.yaml:7: layer.kind: got \'grit\' (str); expected one of "grid", "bits", "several"; did you mean "grid"?',
        "c.yaml:8: path: got 3 (int); expected a path or a list, each a path, or null",
        'c.yaml:11: layers[0].level: unknown key; did you mean "levels"?',
        "c.yaml:15: layers[1].layer.levels[1]: got 1 (int); expected an integer >= 2",
        'c.yaml:16: layers[2].kind: missing; expected one of "grid", "bits", "several"',
        'c.yaml:17: layers[3]: got 4 (int); expected a section whose kind is "grid", "bits" or "several"',
        "c.yaml:18: weights.a: got nan (float); expected a finite number",
        "c.yaml:18: weights.b: got 'x' (str); expected a number",
        "override \"optim.fused=yes\": optim.fused: got 'yes' (str); expected true or false",
        'override "optm.x=1": optm: unknown key; did you mean "optim"?',
    ]


def test_strange_key_lists_the_keys_of_that_member(problems):
    (line,) = problems("layer: {kind: bits, zzz: 1}")
    assert line == "c.yaml:1: layer.zzz: unknown key; expected one of kind, bits"


def test_missing_section_names_the_file(problems):
    (line,) = problems("", schema=Needed)
    assert line == 'c.yaml: layer: missing; expected a section whose kind is "grid", "bits" or "several"'


def test_missing_key_without_a_file():
    with pytest.raises(ConfigError, match=r"^layer: missing; expected"):
        load_config(Needed)


def test_checks_across_keys_name_the_section(problems):
    assert problems("optim:\n  learning_rate: 1\n  betas: [0.9, 0.1]\n") == ["c.yaml:1: optim: betas must not fall"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer: {kind: grid, levels: []}", "expected a list, each an integer >= 2, of length >= 1"),
        ("layer: {kind: bits, bits: 63}", "expected an integer >= 1 and <= 62"),
        ("optim: {learning_rate: 0}", "got 0 (int); expected a number > 0"),
        ("optim: 3", "got 3 (int); expected a section with keys learning_rate, betas"),
        ("optim: null", "got null; expected a section"),
        ("layer: [1]", "got [1] (list); expected a section whose kind is"),
        ("name: true", "got true (bool); expected a string"),
        ("weights: {a: 1e999}", "expected a finite number"),
        ("weights: [1]", "expected a mapping"),
        ("name: [" + "abcdefgh, " * 100 + "]", "..."),
    ],
)
def test_wording(problems, text, expected):
    (line,) = problems(text)
    assert expected in line
    assert len(line) < 250


# --- files that are no configuration ----------------------------------------------------------------------------------


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


def test_explicit_core_tag_that_does_not_fit(problems):
    assert problems("name: !!int x")[0].startswith("c.yaml:1: name: cannot be read")


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
    assert "cannot be read" in problems("name: " + "9" * 5000)[0]


def test_large_documents_are_refused_before_they_are_composed(problems, monkeypatch):
    composed = []
    monkeypatch.setattr("vqclip.config.yaml._Reader.read", lambda *arguments: composed.append(arguments))
    for text, limit in (
        ("- a\n" * 60_000, "20000 values"),
        ("\n".join(" " * n + "a:" for n in range(100)), "64 levels"),
    ):
        (line,) = problems(text)
        assert f"more than {limit}; a configuration is smaller" in line
    assert composed == []


def test_a_pipe_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match=r"c\.yaml: cannot be read: not a regular file"):
        load_config(Tree, tmp_path / "c.yaml")


def test_messages_cannot_steer_a_terminal_or_forge_lines(problems):
    text = '"\\e[2Jx\\nc.yaml:9: forged": 1\nname: ["\\u202e"]\n'
    lines = problems(text, "\x1b[2J=1", "optim.\u202e=2")
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith(r"c.yaml:1: \x1b[2Jx\nc.yaml:9: forged: unknown key")


def test_messages_are_short(problems):
    (line,) = problems("", "a" * 100_000 + "=1")
    assert len(line) < 500
    assert len(problems("\n".join(f"k{n}: 1" for n in range(3000)))) <= 202


# --- overrides --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "overrides",
    [["layer.kind=bits", "layer.bits=3"], ["layer.bits=3", "layer.kind=bits"], ["layer={kind: bits, bits: 3}"]],
)
def test_override_chooses_another_kind_than_the_default(overrides):
    assert load_config(Tree, None, overrides).layer == Bits(bits=3)


def test_override_with_the_same_kind_keeps_the_default():
    assert load_config(Tree, None, ["layer.kind=grid"]) == Tree()


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


@pytest.mark.parametrize(
    ("word", "paths"),
    [
        ("learning-rate", ["optim.learning_rate"]),
        ("optim.fused", ["optim.fused"]),
        ("learnin_rate", ["optim.learning_rate"]),
        ("bits", ["layer.bits", "needed.bits"]),
        ("nonsense", []),
        ("-", []),
        ("", []),
    ],
)
def test_keys_that_a_word_may_stand_for(word, paths):
    assert suggest_keys(Tree, word) == paths


def test_an_override_without_its_section_names_it(problems):
    (line,) = problems("", "fused=true")
    assert line == 'override "fused=true": fused: unknown key; did you mean "optim.fused"?'


def test_override_of_kind_over_keys_of_the_file_says_what_to_do(problems):
    (line,) = problems("layer:\n  kind: grid\n  levels: [2]\n", "layer.kind=bits")
    assert line.startswith("c.yaml:3: layer.levels: unknown key")
    assert 'kind is "bits" by override; layer={kind: bits} replaces the whole section' in line


def test_override_into_a_union_without_kind(problems):
    (line,) = problems("", "needed.bits=3")
    assert line == 'override "needed.bits=3": needed.kind: missing; expected one of "grid", "bits", "several"'


def test_override_turns_null_into_a_section(loaded):
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
        ("layers[0]=3", "layers: a list; got '0', expected no index, for the list is empty"),
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


# --- writing ----------------------------------------------------------------------------------------------------------

layers = st.recursive(
    st.builds(Grid, levels=st.lists(st.integers(2, 2**63 - 1), min_size=1, max_size=5).map(tuple))
    | st.builds(Bits, bits=st.integers(1, 62)),
    lambda inner: st.builds(Several, layer=inner, codebooks=st.integers(-(2**63), 2**63 - 1)),
    max_leaves=3,
)
finite = st.floats(allow_nan=False, allow_infinity=False)
tricky = st.text() | st.sampled_from(["1e-4", "no", "null", "~", "", "12:30", "0x1F", "1_0", ".inf", "=", "<<", "true"])
trees = st.builds(
    Tree,
    optim=st.builds(
        Optim,
        learning_rate=finite.filter(lambda x: x > 0),
        warmup=st.integers(-(2**62), 2**62 - 1).map(lambda n: 2 * n),
    ),
    layer=layers,
    path=st.none() | st.just(Path("a b/c")) | st.just((Path("x"), Path("1e-4"))),
    name=tricky,
    weights=st.dictionaries(tricky, finite, max_size=3),
    layers=st.lists(layers, max_size=2).map(tuple),
)


@settings(max_examples=60, deadline=None)
@example(Tree(name="\x85 \u2028\r\n\t\x07"))
@given(trees)
def test_yaml_round_trip(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(Tree, path) == config


def test_yaml_is_pleasant_to_read():
    text = to_yaml(Tree())
    assert text.startswith("optim:\n  learning_rate: 0.5\n  betas: [0.9, 0.98]\n  name: adamw\n")
    assert "layer:\n  kind: grid\n  levels: [4, 3]\n" in text


def test_json_schema_has_ranges_docstrings_and_closed_sections():
    schema = json_schema(Tree)
    json.dumps(schema)
    optim = schema["$defs"]["Optim"]
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert optim["additionalProperties"] is False
    assert optim["properties"]["learning_rate"]["exclusiveMinimum"] == 0
    assert optim["properties"]["learning_rate"]["description"] == "Peak learning rate."
    assert set(schema["properties"]["layer"]["discriminator"]["mapping"]) == {"grid", "bits", "several"}


class Pairs(Config):
    pairs: Annotated[tuple[Bits, ...], Field(min_length=2)]


def test_a_wrong_element_does_not_make_the_list_too_short():
    with pytest.raises(ConfigError) as error:
        load_config(Pairs, overrides=["pairs=[{bits: 3}, {bits: 0}]"])
    (line,) = str(error.value).splitlines()
    assert "pairs[1].bits: got 0 (int)" in line
    with pytest.raises(ConfigError) as error:
        load_config(Pairs, overrides=["pairs=[{bits: 0}]"])
    first, second = sorted(str(error.value).splitlines(), key=len)
    assert "pairs[0].bits: got 0 (int)" in first
    assert "of length >= 2" in second
