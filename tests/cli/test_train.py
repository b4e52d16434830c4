"""``vqclip train`` on data by their path, and on a configuration."""

import csv
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.data.making import caption_shards, class_folder, encode, pixels
from vqclip.cli.main import main
from vqclip.cli.train import _name_of
from vqclip.config.loading import packaged_file
from vqclip.tokenizer.loading import load_tokenizer

SMALL = ["model.image.tower.channels=[8]", "model.image.tower.image_size=16", "model.image.width=9"]
SMALL += ["train.steps=2", "run.device=cpu", "data.workers=0"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without configs/, and without pretrained towers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vqclip.towers.weights.has_small_towers", lambda: False)


def photos(count: int) -> None:
    """A folder of images, and a table of their captions."""
    os.mkdir("photos")
    rows = [(f"photos/{number}.png", f"caption {number}") for number in range(count)]
    for number, (path, _) in enumerate(rows):
        Path(path).write_bytes(encode(pixels(number), "PNG"))
    with open("table.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "words"), *rows])


def resolved(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["train", *arguments, "--print-config"]) == 0
    tree: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return tree


def test_images_with_a_table_of_captions(capsys: pytest.CaptureFixture[str]) -> None:
    photos(40)
    assert main(["train", "table.csv", "image=file", "captions=words", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "stored" not in printed
    command = "vqclip tokenize --tokenizer runs/table --data table.csv image=file captions=words --out tokens/table"
    assert printed.endswith(f"  ids of all  {command}\n")
    assert main(command.split()[1:]) == 0
    tree = yaml.safe_load(Path("runs/table/config.yaml").read_text())
    assert (tree["data"]["held_out"], tree["evaluation"][0]["held_out"]) == (0.1, 0.1)
    assert tree["evaluation"][0]["data"]["captions"] == "words"
    assert tree["train"]["batch_size"] < 40
    assert load_tokenizer("runs/table/tokenizer", "text").encode(["a"]).ndim == 3


def test_the_towers_that_are_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    caption_shards(Path("emoji/train"), (30,))
    tree = resolved(capsys, "emoji/train/", "run.seed=3")
    assert (tree["run"]["name"], tree["run"]["seed"]) == ("emoji", 3)
    assert tree["model"]["image"]["tower"]["kind"] == "convolutional"
    monkeypatch.setattr("vqclip.towers.weights.has_small_towers", lambda: True)
    tree = resolved(capsys, "emoji/train")
    assert tree["model"]["image"]["tower"]["package"] == "efficientnet-lite0"
    assert [each["kind"] for each in tree["evaluation"]] == ["retrieval"]


def test_other_data_to_evaluate_on(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    class_folder(Path("classes"), 12)
    class_folder(Path("classes"), 12, split="test")
    tree = resolved(capsys, "classes", "split=train", "--val", "classes")
    (task,) = tree["evaluation"]
    assert (task["kind"], task["data"]["split"], task["held_out"]) == ("zero_shot", "test", None)
    assert (tree["data"]["sources"][0]["split"], tree["data"]["held_out"]) == ("train", None)
    assert tree["train"]["batch_size"] == 12
    assert tree["data"]["sources"][0]["path"] == str(Path("classes").absolute())  # found from any folder
    photos(12)
    assert main(["train", "table.csv", "image=file", "captions=words", "--val", "./table.csv", *SMALL]) == 2
    captions = ["train", "table.csv", "image=file", "captions=words"]
    caption_shards(Path("shards"), (12,))
    with caplog.at_level("INFO"):
        assert resolved(capsys, *captions[1:], "--val", "shards")["evaluation"][0]["data"]["kind"] == "shards"
    assert "--val: shards is of kind shards, and read without image=file captions=words" in caplog.text
    assert main([*captions, "where.words=caption 0", "--val", "table.csv", *SMALL]) == 2
    assert "--val: got table.csv, the data to train on; expected others" in capsys.readouterr().err


def test_few_prompts_are_no_sign_of_collapse(monkeypatch: pytest.MonkeyPatch) -> None:
    class_folder(Path("classes"), 30)
    health = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("vqclip.train.main.Health", health)
    assert main(["train", "classes", *SMALL]) == 130
    assert health.call_args.args[0].codes == {"image": 4096}


def test_more_steps_for_more_data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    caption_shards(Path("emoji"), (30,))
    few = resolved(capsys, "emoji")["train"]["steps"]
    monkeypatch.setattr("vqclip.data.sources.shards.TarSource.__len__", lambda self: 100_000)
    monkeypatch.setattr("vqclip.data.sources.shards.TarSource.place", lambda self, index: str(index))
    tree = resolved(capsys, "emoji")["train"]
    assert tree["steps"] * tree["batch_size"] >= 10 * 89_000
    assert few < tree["steps"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "got neither; expected data or a configuration"),
        (["runs/a"], "expected data, or its configuration: runs/a/config.yaml"),
        (["photos", "configs/base.yaml"], "got photos and configs/base.yaml; expected data or a configuration"),
        (["configs/base.yaml", "--val", "photos"], "--val: got it with a configuration"),
        (["configs/nothing.yaml"], "configs/nothing.yaml: no such configuration file"),
    ],
)
def test_what_cannot_be_trained(given: list[str], said: str, refused: Callable[[int], str]) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").touch()
    assert said in refused(main(["train", *given]))


def test_paths_that_are_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    photos(2)
    monkeypatch.setitem(sys.modules, "vqclip.train.tasks.kinds", None)  # they are refused before torch is imported
    for given in (["photo", "captions=names"], ["photos", "--val", "photo/"]):
        assert main(["train", *given]) == 1
        said = f'{Path("photo").absolute()}: no such file or folder; expected a data set; did you mean "photos"?'
        assert " ".join(capsys.readouterr().err.split()).endswith(said)


def test_configurations_come_with_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert packaged_file("configs/base.yaml").is_file()
    photos(1)
    tree = resolved(capsys, "configs/base.yaml", "data.sources=table.csv")
    assert tree["data"]["sources"][0] == {**tree["data"]["sources"][0], "kind": "csv", "path": "table.csv"}
    tree = resolved(capsys, "--config", "configs/base.yaml", "data.sources=[table.csv, photos.tar]")
    assert [each["kind"] for each in tree["data"]["sources"]] == ["csv", "shards"]
    tree = resolved(capsys, "--config", "configs/base.yaml", "run.trackers[0].kind=tensorboard")
    assert tree["run"]["trackers"] == [{"kind": "tensorboard"}]


NAMES = {"photos/": "photos", "photos/train.csv": "photos", "train": "train", "./": "mine"}
NAMES |= {"/datasets/my photos/{00000..00009}.tar": "my-photos", "s3://bucket/shards": "bucket"}


@pytest.mark.parametrize("path", NAMES)
def test_names_of_runs(path: str) -> None:
    assert _name_of(path) == NAMES[path]
