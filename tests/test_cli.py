from __future__ import annotations

import importlib
from pathlib import Path
from unittest import mock

import pytest

from tests.tokenize.making import shards, tokenizer_folder
from vqclip.cli import COMMANDS, main
from vqclip.data import TokenDataset


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenise"]) == 2
    assert 'did you mean "tokenize"' in capsys.readouterr().err


def test_train_is_delegated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--print-config", "--config", "nothing.yaml"]) == 2
    assert "nothing.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--lr=3"], '--lr=3: expected section.key=value; did you mean "optim.lr=3"?'),
        (["--config", "x.yaml", "--batch-size", "64"], 'did you mean "train.batch_size=64"?'),
        (["--optim.lr=3", "train.steps=3"], 'did you mean "optim.lr=3"?'),
        (["--nonsense"], "--nonsense: expected section.key=value; --print-config lists all keys"),
    ],
)
def test_an_option_that_is_a_key_is_named(given: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", *given])
    assert meant in capsys.readouterr().err


def test_tokenize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")
    pattern = str(shards(tmp_path / "in", (3, 2)) / "{00000..00001}.tar")
    command = ["tokenize", "--tokenizer", tokenizer, "--data", pattern, "--out", str(tmp_path / "out")]
    assert main([*command, "--batch-size", "2", "--device", "cpu"]) == 0
    assert "5 samples in 2 shards" in capsys.readouterr().out
    assert len(TokenDataset(tmp_path / "out")) == 5
    assert main([*command, "--batch-size", "3", "--device", "cpu"]) == 2
    assert "batch_size: 2 there, 3 now" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--batch-size", "0"])


@pytest.mark.parametrize(
    ("call", "work"),
    [
        ("export t --modality image --out o", "vqclip.export.command._run"),
        ("search query --index i x", "vqclip.search.command._query"),
        ("tokenize --tokenizer t --data d --out o", "vqclip.tokenize.command.tokenize"),
        ("tokenize --tokenizer t --data d --out o", "vqclip.cli.importlib.import_module"),
    ],
)
def test_ctrl_c_is_told_in_a_line(call: str, work: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = COMMANDS[call.split()[0]].module
    command = importlib.import_module(module).main
    with mock.patch(work, side_effect=KeyboardInterrupt):
        run = main(call.split()) if work.startswith("vqclip.cli") else command(call.split()[1:])
    assert run == 130
    said = capsys.readouterr().err
    assert said.startswith(f"vqclip {call.split()[0]}: interrupted")
    assert said.count("\n") == 1


def test_errors_of_the_system_are_a_line_without_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    (tmp_path / "file").touch()
    command = ["export", str(tmp_path / "tokenizer"), "--modality", "image", "--out", str(tmp_path / "file" / "onnx")]
    assert main(command) == 2
    assert capsys.readouterr().err.endswith("onnx: Not a directory\n")
    data = shards(tmp_path / "in", (2,))
    out = str(tmp_path / "file" / "tokens")
    assert main(["tokenize", "--tokenizer", str(tmp_path / "tokenizer"), "--data", str(data), "--out", out]) == 2
    assert f"--out: {out}: cannot be made (Not a directory); expected a new folder" in capsys.readouterr().err
