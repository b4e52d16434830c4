from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.config.schema import Bits, Grid, Optim, Several, Tree
from vqclip.config import json_schema, load_config, to_yaml


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
