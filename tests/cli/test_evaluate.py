from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.evaluation.made import caption_shards, class_shards, image_folder, tiny_clip
from vqclip import checkpoint
from vqclip.cli.evaluate import main

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with two checkpoints and no exported tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    for step, seed in ((5, 1), (10, 2)):
        model = tiny_clip(seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint.save(
            folder / "checkpoints",
            step,
            write_model=model.save_pretrained,
            optimizer=checkpoint.pack_optimizer(optimizer),
            state={},
            keep_last=2,
        )
    return folder


@pytest.fixture
def command(capsys):
    """Run the command in this process (starting another takes seconds): exit status, stdout, stderr."""

    def run(*arguments):
        status = main([*map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def test_zero_shot_of_a_run_takes_the_newest_checkpoint(command, run_folder, tmp_path):
    folder = class_shards(tmp_path / "classes")
    code, out, err = command("zero-shot", run_folder, "--data", folder, "--json", tmp_path / "out.json", "--workers", 1)
    assert code == 0, err
    assert f"model: {run_folder}/checkpoints/step-00000010/model" in out
    assert "classes (22 images, 4 classes)  top-1" in out
    (result,) = json.loads((tmp_path / "out.json").read_text())
    assert result["figures"]["codes_only"] == result["figures"]["quantized"]
    assert result["chance"]["top1"] == 0.25


def test_retrieval_with_an_exported_folder(command, tmp_path):
    model = tmp_path / "run"
    tiny_clip().save_pretrained(model / "tokenizer")
    shards = caption_shards(tmp_path / "val", [["one"], ["two"], ["three"]])
    code, out, err = command("retrieval", model, "--data", shards, "--codes", tmp_path / "codes", "--precision", "bf16")
    assert code == 0, err
    assert f"model: {model}/tokenizer" in out
    assert "text to image R@10" in out
    assert "33.33" in out
    assert (tmp_path / "codes" / "0-image-0.safetensors").exists()


@pytest.mark.slow
def test_torchrun_shares_the_work(run_folder, tmp_path):
    folder = image_folder(tmp_path / "images")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, SCRIPTS / "zero_shot.py", run_folder, "--data", folder, "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("images (4 images, 2 classes)") == 1  # rank 0 alone prints


def test_a_split_of_an_image_folder(command, run_folder, tmp_path):
    image_folder(tmp_path / "images" / "test")
    code, out, err = command("zero-shot", run_folder, "--data", tmp_path / "images", "--split", "test")
    assert code == 0, err
    assert "(4 images, 2 classes)" in out


def test_bad_input_ends_with_2_and_a_clear_message(command, run_folder, tmp_path):
    no_names = class_shards(tmp_path / "no_names")
    (no_names / "classnames.txt").unlink()
    empty_class = image_folder(tmp_path / "empty_class")
    (empty_class / "empty").mkdir()
    image_folder(tmp_path / "whole" / "test")
    wrong_label = class_shards(tmp_path / "wrong_label")
    (wrong_label / "classnames.txt").write_text("red\n")
    fine = class_shards(tmp_path / "fine")
    beside = class_shards(tmp_path / "beside")
    for tar in (beside / "test").glob("*.tar"):
        tar.rename(beside / tar.name)
    (beside / "test").rmdir()
    config = tmp_path / "config.yaml"
    config.touch()
    (tmp_path / "no_model").mkdir()
    cases = [
        (("zero-shot", tmp_path / "no_model", "--data", fine), "no_model: no model here"),
        (("zero-shot", run_folder, "--data", tmp_path / "none"), "none: no such folder"),
        (
            ("zero-shot", tmp_path / "missing", "--data", fine),
            "vqclip evaluate: no such run, checkpoint or tokenizer folder here",
        ),
        (("zero-shot", run_folder, "--data", no_names), "contains tars but no classnames.txt; expected labelled"),
        (("zero-shot", run_folder, "--data", no_names), "For shards of captioned images: vqclip evaluate retrieval"),
        (("zero-shot", run_folder, "--data", no_names, "--kind", "classes"), "classnames.txt: cannot be read"),
        (("zero-shot", run_folder, "--data", tmp_path / "whole", "--split", "val"), "whole/val: no such folder"),
        (
            ("retrieval", run_folder, "--data", fine),
            "classnames.txt); expected caption shards. For labelled images: vqclip evaluate zero-shot",
        ),
        (("zero-shot", run_folder, "--data", empty_class), "empty: no image"),
        (("zero-shot", run_folder, "--data", wrong_label), ".cls contains '1'; expected a class number, 0 to 0"),
        (("zero-shot", run_folder, "--data", fine, "--template", "a photo"), "got 'a photo'; expected {c}"),
        (("zero-shot", run_folder, "--data", fine / "test"), f"the folder above, {fine}, and the split 'test'"),
        (("zero-shot", run_folder, "--data", beside), 'its tars are directly in it: expected the split ""'),
        (
            ("zero-shot", run_folder, "--data", fine, "--template", "x"),
            "vqclip evaluate: --template[0]: got 'x'; expected {c}",
        ),
        (
            ("zero-shot", config, "--data", fine),
            "config.yaml: got a file, expected a folder: run folder (its exported",
        ),
        (("retrieval", run_folder), "--data: missing"),
        (("retrieval", run_folder, "--data", fine / "test"), f"'test': {fine / 'test'}: none of the 22 samples"),
        (("retrieval", run_folder, "--data", fine / "test"), "none of the 22 samples has a member .txt"),
    ]
    for arguments, message in cases:
        code, out, err = command(*arguments)
        assert (code, out) == (2, ""), arguments
        assert err.startswith("vqclip evaluate: "), err
        assert message in err


@pytest.mark.parametrize("name", ["zero_shot", "retrieval"])
def test_scripts_lead_to_the_command(name, monkeypatch, capsys):
    script = SCRIPTS / f"{name}.py"
    assert len(script.read_text().splitlines()) < 10
    monkeypatch.setattr(sys, "argv", [str(script), "nothing", "--kind", "scenes", "--data", "d"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().err.startswith("vqclip evaluate: --data: got it with --kind scenes")
