"""Every command refuses options that it cannot use."""

import inspect
import itertools
import re
from typing import get_args
from unittest import mock

import pytest

from vqclip.cli.clip_benchmark import Eval
from vqclip.cli.data import Check, ContextLength, Index
from vqclip.cli.evaluate import EvaluateTask
from vqclip.cli.export import Tokenize
from vqclip.cli.main import COMMANDS, load_command, main
from vqclip.cli.options import SOURCE_KEYS, Command
from vqclip.cli.pages import Reconstruct
from vqclip.config import Config
from vqclip.data import CsvConfig
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.tars.make import CHUNK
from vqclip.evaluation import MODES, KnnConfig, LinearProbeConfig, ZeroShotConfig
from vqclip.evaluation.images import ImagesConfig
from vqclip.report.plot import MAX_SIDE
from vqclip.tokenize_dataset.job import Options as TokenizeOptions
from vqclip.towers.vocabulary import MAX_CONTEXT

CALLS = {
    "tokenize": ["--tokenizer", "t", "--data", "d", "--out", "o"],
    "export": ["t", "--modality", "image", "--out", "o"],
    "search build": ["--tokenizer", "t", "--data", "i", "--out", "o"],
    "search query": ["--index", "i", "words"],
    "evaluate zero-shot": ["t", "--data", "d"],
    "reconstruct": ["t", "--data", "d", "--out", "o.html"],
}
"""Each command with what it cannot do without."""
NUMBERS = ("-1", "x", "1.5", "nan", "9" * 30, "9" * 5000)
COUNT, WHOLE = ("an integer >= 1", (*NUMBERS, "0")), ("an integer >= 0", NUMBERS)
SHARE = ("a ", ("nan", "inf", "-0.1", "1", "x"))
TEXT = ("a text that is not empty", ("",))
REFUSED = {
    "tokenize": {COUNT: "batch_size threads", WHOLE: "workers", SHARE: "tolerance", TEXT: "tokenizer data out"},
    "export": {COUNT: "batch_size limit", TEXT: "out data"},
    "search build": {COUNT: "batch_size", SHARE: "bad_fraction", TEXT: "tokenizer data out"},
    "search query": {COUNT: "k", TEXT: "tokenizer data index image out"},
    "reconstruct": {COUNT: "batch_size show limit", WHOLE: "workers", SHARE: "bad_fraction"},
    "evaluate zero-shot": {TEXT: "data device codes json"},
}
"""Each command with what its options expect, values that are refused, and the names of the options."""


@pytest.mark.parametrize("call", REFUSED)
def test_values_that_cannot_be_are_refused(call, refused):
    for (expected, values), keys in REFUSED[call].items():
        for key, value in itertools.product(keys.split(), values):
            option = f"-{key}" if len(key) == 1 else f"--{key.replace('_', '-')}"
            said = refused(main([*call.split(), *CALLS[call], option, value]))
            assert re.search(rf"{key}.*: got '{value[:50]}.* \(str\); expected {expected}", said), (key, value)


def test_every_data_of_an_evaluation_is_a_task(monkeypatch):
    built = mock.Mock(side_effect=KeyboardInterrupt)  # the command ends here
    monkeypatch.setattr("vqclip.data._public.parse_source", built)
    assert main(["evaluate", "retrieval", "t", "--data", "a.tar", "b.tar", "json_keys=[x]", "--data", "c.tar"]) == 130
    assert built.call_args.args == (["a.tar", "b.tar"], ["json_keys=[x]"])


def test_options_and_keys_that_were_meant(capsys, refused):
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", "zero-shot", "t", "--data", "d", "--train-limit", "3"])
    assert "; keys of the configuration are written train_limit=..." in capsys.readouterr().err
    assert 'outt: unknown key; did you mean "out"?' in refused(main(["report", "runs/a", "outt=x.html"]))
    told = refused(main(["tokenize", "runs/a", "photos", "--out", "o"]))
    assert "got 'runs/a'; expected no further word; --tokenizer, --data, --out are options" in told
    told = refused(main(["evaluate", "retrieval", "--data", "photos", "runs/a"]))
    assert "models: missing; --data took photos runs/a: write what comes without" in told
    given = ["configs/base.yaml", "--out", "x.html", "--image-size", "9"]
    assert "--image-size: got it beside --config" in refused(main(["data", "show", *given]))


def test_options_may_be_written_as_keys_and_with_underscores(monkeypatch):
    built = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("vqclip.tokenizer.loading.load_tokenizer", built)
    monkeypatch.setattr("vqclip.data.prepare.open_images", lambda *_: None)
    assert main(["search", "build", "tokenizer=a: b", "--data", "i", "--out=o", "--batch_size=3"]) == 130
    assert built.call_args.args == ("a: b", "image")


def test_words_may_be_given_as_options(refused):
    assert "no-such" in refused(main(["export", "--tokenizer", "no-such", "--modality", "image", "--out", "o"]))
    given = ["--modality", "image", "--out", "o"]
    assert "got 'b'; expected no further word" in refused(main(["export", "--tokenizer", "a", "b", *given]))


@pytest.mark.parametrize("name", [name for name, (path, _) in COMMANDS.items() if path])
def test_help_names_the_command_as_it_is_typed_and_describes_each_option(name, capsys):
    command = load_command(name)
    assert [key for key, field in command.model_fields.items() if not field.description] == []
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: vqclip {name} [-h]")
    assert "python -m" not in shown
    has_modes = name in ("evaluate mteb", "clip-benchmark eval")
    assert ("{continuous,quantized,codes_only} [CHOICE ...]" in shown) == has_modes


@pytest.mark.parametrize(("command", "schema"), [(Tokenize, TokenizeOptions), (Reconstruct, ImagesConfig)])
def test_defaults_are_those_of_the_configuration(command: type[Command], schema: type[Config]) -> None:
    """They are stated twice, since the configuration imports torch."""
    shared = {name for name, field in command.model_fields.items() if not field.is_required()} & {*schema.model_fields}
    shared -= {"data", "limit"}  # those of the page of `vqclip reconstruct`
    assert {"batch_size", "workers"} & shared
    for name in shared:
        ours, theirs = command.model_fields[name], schema.model_fields[name]
        assert ours.default == theirs.default
        assert get_args(ours.annotation) == get_args(theirs.annotation)


def test_limits_are_those_of_the_parts() -> None:
    assert Index(source="x").chunk == CHUNK
    (limits,) = ContextLength.__metadata__
    assert MAX_CONTEXT in (each.le for each in limits.metadata if hasattr(each, "le"))
    with pytest.raises(ValueError, match="less than or equal to"):
        Check(source="x", context_length=MAX_CONTEXT + 1)
    assert Reconstruct(tokenizer="t", data=("d",), out="o.html", side=MAX_SIDE).side == MAX_SIDE
    assert get_args(get_args(Eval.model_fields["model"].annotation)[0]) == MODES
    assert str(MAX_PIXELS) in str(Check.model_fields["max_pixels"].description)


def test_help_names_keys_that_exist() -> None:
    schemas = {"all": KnnConfig, "knn": KnnConfig, "linear-probe": LinearProbeConfig, "zero-shot": ZeroShotConfig}
    rows = re.findall(r"^(all|zero-shot|linear-probe|knn) +(.*)$", inspect.getdoc(EvaluateTask), re.MULTILINE)
    for task, listed in rows:
        names = re.sub(r"\(.*?\)", "", listed).split(", ")
        assert {name.strip() for name in names} <= schemas[task].model_fields.keys()
    keys = re.findall(r"(\w+)=", SOURCE_KEYS)
    assert {"kind", "captions"} == {*keys} & CsvConfig.model_fields.keys() == {*keys}
