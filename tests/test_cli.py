from __future__ import annotations

from pathlib import Path

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
