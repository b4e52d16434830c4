import csv
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.making import save_checkpoint
from tests.commands import command
from tests.evaluation.made import caption_shards, class_shards, image_folder, tiny_clip
from vqclip.pixels import ConvolutionalPixelsConfig, PixelsConfig, attach

main = command("evaluate")

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with two checkpoints and no exported tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    for step, seed in ((5, 1), (10, 2)):
        model = tiny_clip(seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        save_checkpoint(folder / "checkpoints", step, optimizer, model.save_pretrained, keep_last=2)
    return folder


@pytest.fixture
def command(capsys):
    """Run the command in this process (starting another takes seconds); return stdout and stderr."""

    def run(*arguments, status=0):
        assert main([*map(str, arguments)]) == status
        return capsys.readouterr()

    return run


def test_zero_shot_of_a_run_takes_the_newest_checkpoint(command, run_folder, tmp_path):
    folder = class_shards(tmp_path / "classes")
    out, _ = command("zero-shot", run_folder, "workers=1", "--data", folder, "--json", tmp_path / "out.json")
    assert f"model: {run_folder}/checkpoints/step-00000010/model" in out
    assert "classes (22 images, 4 classes)\n  top-1" in out
    (result,) = json.loads((tmp_path / "out.json").read_text())
    assert result["figures"]["codes_only"] == result["figures"]["quantized"]
    assert result["chance"]["top1"] == 0.25


def test_retrieval_with_an_exported_folder(command, tmp_path):
    model = tmp_path / "run"
    tiny_clip().save_pretrained(model / "tokenizer")
    shards = caption_shards(tmp_path / "val", [["one"], ["two"], ["three"]])
    out, _ = command("retrieval", model, "--data", shards, "--codes", tmp_path / "codes", "--precision", "bf16")
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


def labelled(folder):
    """Training and test images of four classes."""
    class_shards(folder, 40)
    shutil.copytree(folder / "test", folder / "train")
    return folder


def test_several_tasks_of_a_file_are_one_table_and_one_csv(command, run_folder, tmp_path):
    data = labelled(tmp_path / "colours")
    (tmp_path / "tasks.yaml").write_text(
        f"""
evaluation:
  - {{kind: zero_shot, name: colours, data: {{path: {data}}}}}
  - {{kind: knn, name: colours, data: {{path: {data}}}, train: {{path: {data}}}}}
"""
    )
    files = ("--csv", tmp_path / "out" / "a.csv", "--json", tmp_path / "a.json")
    out, _ = command(run_folder, "--config", tmp_path / "tasks.yaml", "evaluation[1].neighbours=3", *files)
    assert "weights: current\n" in out
    assert out.count("colours (40 images, 4 classes)") == 1  # one block of both tasks
    assert "k-NN mean per class" in out
    rows = list(csv.DictReader((tmp_path / "out" / "a.csv").read_text().splitlines()))
    assert len(rows) == 2 * 3 * 3
    assert {(row["kind"], row["mode"], row["figure"]) for row in rows} >= {("knn", "codes_only", "knn_top1")}
    assert {row["model"] for row in rows} == {f"{run_folder}/checkpoints/step-00000010/model"}
    results = json.loads((tmp_path / "a.json").read_text())
    assert [result["weights"] for result in results] == ["current", "current"]
    assert float(rows[0]["rate"]) == results[0]["figures"]["continuous"]["top1"]


def test_a_run_is_evaluated_on_its_own_tasks_and_one_that_fails_takes_nothing_from_the_others(command, tmp_path):
    data, run = class_shards(tmp_path / "colours"), tmp_path / "run"
    tiny_clip().save_pretrained(run / "tokenizer")
    task = f"{{kind: zero_shot, name: NAME, data: {{path: {data}}}}}"
    text = f"model: {{}}\nevaluation: [{task}, {task}]\n".replace("NAME", "one", 1).replace("NAME", "two", 1)
    (run / "config.yaml").write_text(text)
    assert command(run).out.count("top-1") == 2
    out, err = command(run, "evaluation[0].data.split=val", "--csv", tmp_path / "a.csv", status=2)
    assert out.count("top-1") == 1
    assert "evaluation 'one': " in err
    assert "has no split 'val'" in err
    assert {row["name"] for row in csv.DictReader((tmp_path / "a.csv").open())} == {"two"}


def test_probes_and_compositional_sets_and_several_data_sets(command, run_folder, tmp_path):
    one, two = labelled(tmp_path / "one" / "colours"), labelled(tmp_path / "two" / "colours")
    for task, option in (("knn", "neighbours=3"), ("linear-probe", "l2=0.1")):
        keys = (f"train.path={one}", "train.split=train", "train_limit=20", option)
        out, _ = command(task, run_folder, *keys, "--data", one, "--data", two)
        assert f"{one} (40 images, 4 classes)" in out  # both are named colours
        assert f"{two} (40 images, 4 classes)" in out
    images = image_folder(tmp_path / "images" / "test", 3)
    image_folder(tmp_path / "images" / "train", 6)
    keys = (f"train.path={images.parent / 'train'}", "features=tokens")
    command("linear-probe", run_folder, *keys, "--data", images)


def test_pixels_of_labelled_and_of_captioned_images(command, run_folder, tmp_path):
    labelled, captioned = class_shards(tmp_path / "classes", 4), caption_shards(tmp_path / "shards", [["a"], ["b"]])
    tasks, pairs = tmp_path / "tasks.yaml", f", {{kind: pixels, name: pairs, data: {captioned}}}"
    tasks.write_text(f"evaluation: [{{kind: pixels, name: classes, data: {labelled}}}{pairs}]")
    assert "classes': this image tokenizer has no pixel decoder" in command(run_folder, tasks, status=2).err
    model = tiny_clip()
    decoder = PixelsConfig(image_size=8, decoder=ConvolutionalPixelsConfig(channels=4, channels_per_group=2))
    attach(model.image, decoder.build(model.image.quantizer.dim, model.image.num_tokens))
    model.save_pretrained(tmp_path / "model")
    files = ("--csv", tmp_path / "out.csv", "--json", tmp_path / "out.json")
    out, _ = command(tmp_path / "model", tasks, *files)
    for line in ("classes: 4 images", "pairs: 2 images of shards", "reconstructed: image to text R@1", "WebP"):
        assert line in out
    assert ["psnr" in (tmp_path / f"out.{end}").read_text() for end in ("csv", "json")] == [True, True]
    model.image.save_pretrained(tmp_path / "image")
    tasks.write_text(tasks.read_text().replace(pairs, ""))
    out, _ = command(tmp_path / "image", tasks)
    assert ("classes: 4 images of classes" in out, "top-1" in out) == (True, False)


def test_any_kind_of_data_and_prompts_from_files(command, run_folder, tmp_path):
    folder = image_folder(tmp_path / "images")
    table = "filepath,caption\n" + "".join(f"{path},number {n}\n" for n, path in enumerate(folder.glob("*/*.png")))
    (tmp_path / "val.csv").write_text(table)
    out, _ = command("retrieval", run_folder, "--data", tmp_path / "val.csv", "captions=caption", "limit=3")
    assert "val.csv (3 images, 3 captions)" in out
    (tmp_path / "classes.json").write_text(json.dumps({"dark red": ["ruby", "wine"], "green": "leaf"}))
    (tmp_path / "prompts.txt").write_text("a {c}\n{c}\n")
    files = (f"classes_file={tmp_path / 'classes.json'}", f"templates_file={tmp_path / 'prompts.txt'}")
    command("zero-shot", run_folder, *files, "--data", folder, "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())[0]["captions"] == 6


def test_bad_input_ends_with_2_and_a_clear_message(command, run_folder, tmp_path):
    no_names = class_shards(tmp_path / "no_names")
    (no_names / "classnames.txt").unlink()
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
        (("zero-shot", run_folder, "--data", tmp_path / "none"), "none: no such file or folder"),
        (("zero-shot", tmp_path / "missing", "--data", fine), "no such run, checkpoint or tokenizer folder here"),
        (("zero-shot", run_folder, "--data", no_names / "test"), "has captions, not classes; expected labelled images"),
        (("retrieval", run_folder, "--data", fine), "fine: kind classes with split test has classes, not captions"),
        (("zero-shot", run_folder, "--data", fine / "test"), f"expected the path {fine}, and split: test"),
        (("zero-shot", run_folder, "--data", beside), "has no split 'test'; splits with tars: ''"),
        (("zero-shot", config, "--data", fine), "config.yaml: got a file, expected a folder: run folder (its exp"),
        (("retrieval", run_folder), "--data: missing"),
        ((run_folder,), "has no config.yaml of a run; expected a YAML file with evaluation: [...]"),
        ((run_folder, "--config", tmp_path / "none.yaml"), "none.yaml: no such configuration file"),
        ((run_folder, "--config", config), "evaluation: missing"),
        ((run_folder, "--config", config, "evaluaton=[]"), "got evaluaton=[]; expected evaluation[0].key=value"),
        (("zero-shot", run_folder, "--data", fine, "--csv", tmp_path), "(str); expected a file, not a folder"),
        (("zero-shot", run_folder, "--data", "kind=csv"), "path: missing"),
        (("knn", run_folder, "--data", fine), "fine: has no split 'train'; splits with tars: 'test'"),
        (("knn", run_folder, "--data", "kind=scenes"), "train: kind scenes with split train has captions, not classes"),
        (("knn", run_folder, f"neighbours={10**9}", "--data", fine), "neighbours: got 1000000000"),
        (("retrieval", run_folder, "--data", fine / "test"), "0.tar and 1 more: none of the 22 samples"),
    ]
    for arguments, message in cases:
        out, err = command(*arguments, status=2)
        assert (out, err[:17]) == ("", "vqclip evaluate: ")
        assert message in err


def test_the_script_leads_to_the_command(monkeypatch, capsys):
    script = SCRIPTS / "zero_shot.py"
    assert len(script.read_text().splitlines()) < 10
    monkeypatch.setattr(sys, "argv", [str(script), "limit=0", "nothing", "--data", "kind=scenes"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(script), run_name="__main__")
    assert "vqclip evaluate: " in (said := capsys.readouterr().err)
    assert "limit: got 0" in said


def test_mteb_without_the_extra(run_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mteb", None)
    assert main(["mteb", str(run_folder), "--tasks", "EuroSATZeroShot"]) == 2
    assert "needs the package mteb, which is not installed" in (said := capsys.readouterr().err.replace("\n  ", " "))
    assert "pip install 'vqclip[mteb]'" in said
