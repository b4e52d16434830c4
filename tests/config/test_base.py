import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.config.schema import Bits, Grid, Optim, Several, Tree
from vqclip.config import json_schema, load_config, to_yaml
from vqclip.config.explain import commented_yaml, require_known_keys
from vqclip.errors import ConfigError
from vqclip.train import TrainConfig
from vqclip.train.tasks.kinds import TASKS, load_task_config

RATES = ({"learning_rate": value} for value in ("3", True, math.nan))


@pytest.mark.parametrize("values", [*RATES, {"fused": 1}, {"warmup": 2.0}, {"name": None}])
def test_scalars_are_strict_from_python_too(values):
    with pytest.raises(ValidationError) as error:
        Optim(**{"learning_rate": 1} | values)
    assert error.value.error_count() == 1


layers = st.recursive(
    st.builds(Grid, levels=st.lists(st.integers(2, 2**63 - 1), min_size=1, max_size=5).map(tuple))
    | st.builds(Bits, bits=st.integers(1, 62)),
    lambda inner: st.builds(Several, layer=inner, codebooks=st.integers(-(2**63), 2**63 - 1)),
    max_leaves=3,
)
finite = st.floats(allow_nan=False, allow_infinity=False)
tricky = st.text() | st.sampled_from(["1e-4", "no", "null", "~", "", "12:30", "0x1F", "1_0", ".inf", "=", "<<", "true"])
even = st.integers(-(2**62), 2**62 - 1).map(lambda n: 2 * n)
trees = st.builds(
    Tree,
    optim=st.builds(Optim, learning_rate=finite.filter(lambda x: x > 0), warmup=even),
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


# ---- Every configuration that we ship loads, is written out in full and read back, and has no mistake.


FOLDER = Path(__file__).parents[2] / "configs"
FILES = sorted(FOLDER.rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_loads_and_round_trips_and_begins_with_what_it_is(file, tmp_path):
    """Also with the comments that the run's folder has."""
    assert file.read_text(encoding="utf-8").startswith("# ")
    require_known_keys(file, [])
    config, resolved = load_task_config(file), tmp_path / "resolved.yaml"
    commented = commented_yaml(config)
    for text in (to_yaml(config), commented):
        resolved.write_text(text, encoding="utf-8")
        assert load_task_config(resolved) == config
    comments = [line for line in commented.splitlines() if line.lstrip().startswith("#")]
    assert len(comments) > 100
    assert max(map(len, comments)) <= 100
    assert "  # Highest learning rate, reached after the warm-up.\n  lr: " in commented


def test_a_wait_that_overflows_is_refused():
    with pytest.raises(ConfigError, match=r"run.timeout_s: got 1e\+30 \(float\); expected a number > 0 and <= 604800"):
        load_config(TrainConfig, FOLDER / "base.yaml", ["run.timeout_s=1.0e+30"])


def numbers(tree: object, path: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number of a resolved configuration, with its key path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from numbers(value, f"{path}.{key}".lstrip("."))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from numbers(value, f"{path}[{index}]")
    elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield path, tree


def test_any_number_in_any_place_is_accepted_or_refused_by_its_key():
    file, huge = FOLDER / "base.yaml", "1" + "0" * 30
    for path, number in numbers(load_config(TrainConfig, file).model_dump()):
        for value in (huge, "-1", "1000000000", ".nan"):
            said, began = "", time.monotonic()
            try:
                load_config(TrainConfig, file, [f"{path}={value}"])
            except ConfigError as error:
                said = str(error)
            assert said.startswith(f'override "{path}={value}": ' if said else ""), said
            assert said or (value != ".nan" and (value != huge or isinstance(number, float))), path
            assert time.monotonic() - began < 10, path


@pytest.mark.parametrize("task", TASKS)
def test_integers_of_every_section_are_bounded(task):
    def bare(schema: Any) -> Iterator[Any]:
        if isinstance(schema, dict):
            if schema.get("type") == "int" and not ({"le", "lt"} & schema.keys() and {"ge", "gt"} & schema.keys()):
                yield schema
            schema = schema.values()
        for each in schema if not isinstance(schema, str) and isinstance(schema, Iterable) else ():
            yield from bare(each)

    assert list(bare(TASKS[task].__pydantic_core_schema__)) == []


@pytest.mark.parametrize("task", TASKS)
def test_every_field_of_every_section_has_a_docstring(task):
    schema = json_schema(TASKS[task])
    sections = {task: schema, **schema["$defs"]}
    bare = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, field in section.get("properties", {}).items()
        if key != "kind" and not field.get("description")
    ]
    assert bare == []
