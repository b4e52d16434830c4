from __future__ import annotations

import pytest

from tests.config.schema import Bits, Tree
from vqclip.config import load_config


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
