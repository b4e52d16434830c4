import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.data.making import caption_shards
from tests.tokenize_dataset.making import shards, tokenizer_folder
from tests.training import run_tree
from vqclip.cli.main import COMMANDS, main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS if " " not in name)


LIGHT = """
import sys
from vqclip.cli.main import COMMANDS, main
for name in COMMANDS:
    lines = [["--help"], ["--no-such-option"], ["no_such_key=1", "and", "too", "many", "words"]]
    if name == "train":  # which looks for the key that was meant; but not in a file that is not there
        lines[1] = ["--config", "nowhere.yaml"]
    for last in lines[: 2 if name.startswith("evaluate") else 3]:  # which takes any number of models
        try:
            main([*name.split(), *last])
        except SystemExit as ended:
            print(ended.code)
        assert not {"torch", "timm", "open_clip", "webdataset"} & sys.modules.keys(), (name, last)
"""


def test_no_help_or_refusal_waits_for_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert max(map(len, (done.stdout + done.stderr).splitlines())) <= 100


@pytest.mark.parametrize(
    ("given", "meant"),
    [(["tokenise"], '"tokenize"'), (["data", "chekc", "x"], '"check"'), (["report", "a", "--outt", "x"], '"--out"')],
)
def test_options_and_commands_that_were_meant(given: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    if given[0] != "report":
        assert main(given) == 2
    else:
        with pytest.raises(SystemExit, match="2"):
            main(given)
    assert f"; did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--lr=3"], '--lr=3: expected section.key=value; did you mean "optim.lr=3"?'),
        (["--config", "x.yaml", "--batch-size", "64"], 'did you mean "train.batch_size=64"?'),
        (["--optim.lr=3", "train.steps=3"], 'did you mean "optim.lr=3"?'),
        (["--nonsense"], "--nonsense: expected section.key=value; --print-config lists all keys"),
    ],
)
def test_an_option_that_is_a_key_is_named(given: list[str], meant: str, refused: Callable[[int], str]) -> None:
    assert meant in refused(main(["train", *given]))


@pytest.mark.parametrize(
    ("call", "work"),
    [
        ("export t --modality image --out o", "vqclip.tokenizer.loading.load_tokenizer"),
        ("search query --index i x", "vqclip.search.index.CodeIndex.load"),
        ("tokenize --tokenizer t --data d.tar --out o", "vqclip.tokenize_dataset.job.tokenize"),
        ("tokenize --tokenizer t --data d --out o", "vqclip.cli.main.importlib.import_module"),
    ],
)
def test_ctrl_c_is_told_in_a_line(call: str, work: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch(work, side_effect=KeyboardInterrupt):
        assert main(call.split()) == 130
    said = capsys.readouterr().err
    assert said.startswith(f"vqclip {call.split()[0]}: interrupted")
    assert said.count("\n") == 1


def test_errors_of_the_system_are_a_line_without_numbers(tmp_path: Path, refused: Callable[[int], str]) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    (tmp_path / "file").touch()
    given = [str(tmp_path / "tokenizer"), "--out", out := str(tmp_path / "file" / "new")]
    assert refused(main(["export", "--modality", "image", *given])).endswith("new: Not a directory\n")
    told = refused(main(["tokenize", "--data", str(shards(tmp_path / "in", (2,))), "--tokenizer", *given]))
    assert f"--out: {out}: cannot be made (Not a directory); expected a new folder" in told


def run_with(out: int, error: int, *arguments: str | Path) -> int:
    """The exit status of ``vqclip`` with these streams, for which only ASCII can be written."""
    settings = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vqclip", *map(str, arguments)]
    return subprocess.run(command, stdout=out, stderr=error, env=settings, timeout=120).returncode


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def full() -> Iterator[int]:
    device = os.open("/dev/full", os.O_WRONLY)
    yield device
    os.close(device)


@pytest.mark.parametrize("lives", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dead_streams_end_no_run(
    tmp_path: Path, closed_pipe: int, full: int, lives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training, which needs no stream, logs into its folder; it goes on from there with other dead streams."""
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "shards").mkdir()
    tree = run_tree(tmp_path, caption_shards(tmp_path / "shards", counts=(13,)), train__steps=2, optim__warmup_steps=1)
    (tmp_path / "config.json").write_text(json.dumps(tree))
    for out, error in ((closed_pipe, full), (full, closed_pipe))[:lives]:
        assert run_with(out, error, "train", "--config", tmp_path / "config.json") == 0
        assert (tmp_path / "tiny" / "summary.json").exists()
    lines = (tmp_path / "tiny" / "train.log").read_text().splitlines()
    for said in ("step 2/2, loss", "run tiny", *["resumed from step 2"][: lives - 1]):
        assert any(re.match(rf"[\d-]{{10}} [\d:]{{8}} {said}", line) for line in lines), lines


@pytest.mark.slow
def test_a_product_that_cannot_be_written_is_an_error(tmp_path: Path, closed_pipe: int, full: int) -> None:
    """Unless its reader has gone."""
    with (tmp_path / "error").open("w+b") as error:
        assert run_with(full, error.fileno(), "train", "--json-schema") == 1
        assert run_with(closed_pipe, error.fileno(), "train", "--json-schema") == 0
    assert (tmp_path / "error").read_text() == "vqclip train: standard output: No space left on device\n"
