from __future__ import annotations

import pytest

from tests.config.schema import Bits, Grid, Optim, Tree
from vqclip.config import load_config


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
