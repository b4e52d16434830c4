"""Every command refuses options that it cannot use."""

from __future__ import annotations

import argparse
import inspect
import re
from typing import get_args
from unittest import mock

import pytest

from tests.data.making import caption_shards, class_folder
from vqclip.cli.arguments import context_length
from vqclip.cli.data_options import SOURCE_KEYS
from vqclip.cli.evaluate import _SCHEMAS
from vqclip.cli.main import main
from vqclip.cli.options import _evaluate_task, make_parser
from vqclip.config import Config
from vqclip.data import CsvConfig
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.prepare import open_images
from vqclip.data.sources.class_names import ClassFolder
from vqclip.data.tars.make import CHUNK
from vqclip.data_tools.pack import Options as PackOptions
from vqclip.errors import ConfigError, DataError
from vqclip.evaluation import MODES
from vqclip.evaluation.images import ImagesConfig
from vqclip.report.images import MAX_SIDE
from vqclip.tokenize_dataset.job import Options as TokenizeOptions
from vqclip.towers.vocabulary import MAX_CONTEXT

CALLS = {
    "tokenize": ["--tokenizer", "t", "--data", "d", "--out", "o"],
    "export": ["t", "--modality", "image", "--out", "o"],
    "search build": ["--tokenizer", "t", "--images", "i", "--out", "o"],
    "search query": ["--index", "i", "words"],
    "evaluate zero-shot": ["t", "--data", "d"],
    "reconstruct": ["t", "--data", "d", "--output", "o.html"],
}
"""Each command with what it cannot do without."""
WHOLE = {
    "tokenize": ("--batch-size", "--workers", "--threads"),
    "export": ("--batch-size", "--limit"),
    "search build": ("--batch-size",),
    "search query": ("-k",),
    "reconstruct": ("--batch-size", "--workers", "--show"),
}
SHARES = {
    "tokenize": "--tolerance",
    "search build": "--bad-fraction",
    "reconstruct": "--bad-fraction",
}
TEXTS = {
    "tokenize": ("--tokenizer", "--data", "--out"),
    "export": ("--out", "--data"),
    "search build": ("--tokenizer", "--images", "--out"),
    "search query": ("--tokenizer", "--images", "--index", "--image", "--html"),
    "evaluate zero-shot": ("--data", "--device", "--codes", "--json"),
}


def refusal(call: str, option: str, value: str, capsys) -> str:
    """What a command says of a value of an option, when it stops there."""
    arguments = [*CALLS[call], option, value]
    with pytest.raises(SystemExit) as ended:
        main([*call.split(), *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("call", "option"), [(call, option) for call, each in WHOLE.items() for option in each])
def test_numbers_that_cannot_be_are_refused(call, option, capsys):
    for value in ("-1", "x", "1.5", "nan", "9" * 30, "9" * 5000):
        said = refusal(call, option, value, capsys)
        assert f"argument {option}: got {value!r}, expected a whole number from " in said
    if option != "--workers":
        assert f"argument {option}: got '0'" in refusal(call, option, "0", capsys)


@pytest.mark.parametrize("call", SHARES)
def test_shares_that_cannot_be_are_refused(call, capsys):
    for value in ("nan", "inf", "-0.1", "1", "x"):
        said = refusal(call, SHARES[call], value, capsys)
        assert f"argument {SHARES[call]}: got {value!r}, expected a share: a number from 0 to less than 1" in said


@pytest.mark.parametrize("call", TEXTS)
def test_empty_texts_are_refused(call, capsys):
    for option in TEXTS[call]:
        said = refusal(call, option, "", capsys)
        assert f"argument {option}: got '', expected a text that is not empty" in said


def test_every_data_of_an_evaluation_is_a_task(monkeypatch):
    built = mock.Mock(side_effect=KeyboardInterrupt)  # the command ends here
    monkeypatch.setattr("vqclip.cli.evaluate.parse_source", built)
    assert main(["evaluate", "retrieval", "t", "--data", "a.tar", "b.tar", "json_keys=[x]", "--data", "c.tar"]) == 130
    assert built.call_args.args == (["a.tar", "b.tar"], ["json_keys=[x]"])


def test_an_option_that_is_a_key_is_shown_as_one(capsys):
    assert "; keys of the configuration are written train_limit=..." in refusal(
        "evaluate zero-shot", "--train-limit", "3", capsys
    )


def test_data_of_tokenize(monkeypatch, tmp_path):
    built = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("vqclip.cli.tokenize.tokenize", built)
    shards = caption_shards(tmp_path / "s", (1, 1))
    (tmp_path / "a.csv").touch()
    for given, expected in (
        (f"{shards}/00000.tar {shards}/00001.tar json_keys=[a,b,c] captions=json", "shards"),
        ("s3://bucket/folder", "shards"),
        (f"{class_folder(tmp_path / 'c')} split=train", "classes"),
        (f"{tmp_path}/a.csv captions=text image=file", "csv"),
        ("anything kind=tsv", "tsv"),
    ):
        assert main(["tokenize", "--tokenizer", "t", "--out", "o", "--data", *given.split()]) == 130
        assert built.call_args.args[0].data.kind == expected
    first, *_, table, _ = (call.args[0].data for call in built.call_args_list)
    assert (len(first.path), first.json_keys) == (2, ("a", "b", "c"))
    assert (table.captions, table.image) == ("text", "file")
    assert main(["tokenize", "--tokenizer", "t", "--out", "o", "--data", str(shards), "weight=2"]) == 2
    assert main(["tokenize", "--tokenizer", "t", "--out", "o", "--data", str(tmp_path / "none")]) == 1


@pytest.mark.parametrize("call", [*CALLS, "train"])
def test_help_names_the_command_as_it_is_typed(call, capsys):
    with pytest.raises(SystemExit):
        main([*call.split(), "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: vqclip {call} [-h]")
    assert "python -m" not in shown


def test_no_command_guesses_among_splits(tmp_path):
    class_folder(tmp_path / "one")
    assert ClassFolder(str(tmp_path / "one")).choose_split(None) == "train"
    assert len(open_images(str(tmp_path / "one"))) > 0
    class_folder(tmp_path / "two")
    class_folder(tmp_path / "two", split="test")
    assert ClassFolder(str(tmp_path / "two")).choose_split("train") == "train"
    for opening in (lambda *args: ClassFolder(args[0]).choose_split(*args[1:]), open_images):
        with pytest.raises(ConfigError, match=r"split: missing; expected one of those in .*two: 'test', 'train'"):
            opening(str(tmp_path / "two"), None)
    with pytest.raises(ConfigError, match=r"split: got 'val', but .*empty has no classnames.txt"):
        open_images(str(tmp_path / "empty"), "val")
    with pytest.raises(ConfigError, match=r"split: missing; expected the name of a split of https://host.invalid/x"):
        ClassFolder("https://host.invalid/x").choose_split(None)
    with pytest.raises(DataError, match="none: no such folder"):
        ClassFolder(str(tmp_path / "none")).choose_split(None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: found no \*.tar or \*.tar.gz in it"):
        ClassFolder(str(tmp_path / "empty")).choose_split(None)


@pytest.mark.parametrize(
    ("command", "schema"),
    [("tokenize", TokenizeOptions), ("data pack", PackOptions), ("reconstruct", ImagesConfig)],
)
def test_defaults_are_those_of_the_configuration(command: str, schema: type[Config]) -> None:
    """They are stated twice, since the configuration imports torch."""
    fields = schema.model_fields
    actions = {each.dest: each for each in make_parser(command, "", "")._actions if each.dest in fields}
    given = {name: action.default for name, action in actions.items() if not action.required}
    assert {"batch_size", "workers"} & given.keys()
    assert given == {name: fields[name].default for name in given}
    for name, action in actions.items():
        if action.choices is not None:
            assert tuple(action.choices) == get_args(fields[name].annotation)


def test_limits_are_those_of_the_parts() -> None:
    defaults = vars(make_parser("data index", "", "").parse_args(["x"]))
    assert defaults["chunk"] == CHUNK
    assert context_length(str(MAX_CONTEXT)) == MAX_CONTEXT
    with pytest.raises(argparse.ArgumentTypeError):
        context_length(str(MAX_CONTEXT + 1))
    parser = make_parser("reconstruct", "", "")
    assert parser.parse_args(["t", "--data", "d", "-o", "o", "--side", str(MAX_SIDE)]).side == MAX_SIDE
    models = next(each for each in make_parser("clip-benchmark eval", "", "")._actions if each.dest == "model")
    assert models.choices == MODES
    assert f"({MAX_PIXELS})" in make_parser("data check", "", "").format_help()


def test_help_names_keys_that_exist() -> None:
    rows = re.findall(r"^(all|zero-shot|linear-probe|knn) +(.*)$", inspect.getdoc(_evaluate_task), re.MULTILINE)
    for task, listed in rows:
        names = re.sub(r"\(.*?\)", "", listed).split(", ")
        assert {name.strip() for name in names} <= _SCHEMAS[task.replace("all", "knn")].model_fields.keys()
    keys = re.findall(r"(\w+)=", SOURCE_KEYS)
    assert {"kind", "captions"} == {*keys} & CsvConfig.model_fields.keys() == {*keys}
