from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BeforeValidator, Field

from tests.config.schema import Bits, Layer, Needed, Several, Tree
from vqclip.config import Config, load_config
from vqclip.config.explain import key_paths
from vqclip.config.messages import _key_paths, suggest_keys
from vqclip.errors import ConfigError
from vqclip.train import TrainConfig


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


class Nested(Config):
    layer: Layer = Several(layer=Bits())
    sizes: Annotated[tuple[int, ...], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)] = ()


KINDS = '"grid", "bits", "several"'
SECTION = 'a section whose kind is "grid", "bits" or "several"'
BITS, LEVELS = "layer.layer.bits=3", "expected one of kind, levels"


@pytest.mark.parametrize(
    ("schema", "text", "overrides", "line"),
    [
        (Tree, "layer: {kind: bits, zzz: 1}", [], "c.yaml:1: layer.zzz: unknown key; expected one of kind, bits"),
        (Needed, "", [], f"c.yaml: layer: missing; expected {SECTION}"),
        (Tree, "", ["fused=true"], 'override "fused=true": fused: unknown key; did you mean "optim.fused"?'),
        (
            Tree,
            "layer:\n  kind: grid\n  levels: [2]\n",
            ["layer.kind=bits"],
            'c.yaml:3: layer.levels: unknown key; expected one of kind, bits (kind is "bits" by override; '
            "layer={kind: bits} replaces the whole section)",
        ),
        (Tree, "", ["needed.bits=3"], 'override "needed.bits=3": needed.kind: missing; expected one of ' + KINDS),
        (
            Tree,
            "",
            ["layer=gird"],
            f"override \"layer=gird\": layer: got 'gird' (str); expected {SECTION}; did you mean {{kind: grid}}?",
        ),
        (
            Tree,
            "layers: several",
            [],
            f"c.yaml:1: layers: got 'several' (str); expected a list, each {SECTION}; did you mean [{{kind: several, "
            "layer: ...}]?",
        ),
        (Nested, "", [BITS, "layer.kind=grid"], f'override "{BITS}": layer.layer: unknown key; {LEVELS}'),
        (Nested, "sizes: a", [], "c.yaml:1: sizes[0]: got 'a' (str); expected an integer"),
    ],
)
def test_a_line_names_file_or_override_and_key(problems, schema, text, overrides, line):
    assert problems(text, *overrides, schema=schema) == [line]


def test_words_of_other_programs_are_translated():
    for word, path in (("learning_rate", "optim.lr"), ("learningrate", "optim.lr"), ("optim.base_lr", "optim.lr")):
        assert suggest_keys(key_paths(), word) == suggest_keys(_key_paths(TrainConfig), word) == [path]
    others = {"epochs": "steps", "max_steps": "steps", "batch-size": "batch_size", "bf16": "precision"}
    for word, path in others.items():
        assert suggest_keys(key_paths(), word) == [f"train.{path}"]
    with pytest.raises(ConfigError, match=r'optim.learningrate: unknown key; did you mean "lr"\?'):
        load_config(TrainConfig, Path(__file__).parents[2] / "configs" / "base.yaml", ["optim.learningrate=3"])


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


class Pairs(Config):
    pairs: Annotated[tuple[Bits, ...], Field(min_length=2)]


def test_a_wrong_element_does_not_make_the_list_too_short(problems):
    (line,) = problems("", "pairs=[{bits: 3}, {bits: 0}]", schema=Pairs)
    assert "pairs[1].bits: got 0 (int)" in line
    first, second = sorted(problems("", "pairs=[{bits: 0}]", schema=Pairs), key=len)
    assert "pairs[0].bits: got 0 (int)" in first
    assert "of length >= 2" in second


class First(Config):
    last: int = Field(ge=1)


class Second(Config):
    size: Bits


class Union(Config):
    train: First | Second | float | None = None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{last: 0}", "train.last: got 0 (int); expected an integer >= 1"),
        ("{last: 2, lst: 1}", 'train.lst: unknown key; did you mean "last"?'),
        ("{lst: 2}", "train: got {'lst': 2} (dict); expected a section with keys last or "),
        ("nun", "train: got 'nun' (str); expected a section with keys last or "),
    ],
)
def test_errors_of_the_section_that_was_meant(problems, value, message):
    """The keys show it, in a union of sections without `kind`."""
    (line,) = problems("", f"train={value}", schema=Union)
    assert message in line
