"""What is stored of all keys is what their classes say; keys are looked up and refused by it, without torch."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from vqclip.config.explain import explain, require_known_keys
from vqclip.errors import ConfigError
from vqclip.train.tasks.kinds import TASKS, load_task_config


def write(folder: Path, text: str) -> Path:
    (folder / "c.yaml").write_text(text)
    return folder / "c.yaml"


@pytest.mark.parametrize("script", ["keys", "figures"])
def test_what_scripts_write_is_up_to_date(script):
    """Keys are those of the classes, tables those of docs/results."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "scripts" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.contents().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `python scripts/{script}.py`"


def test_a_key_and_a_section_are_explained():
    first, second = explain("optim.lr").splitlines()
    assert first == "optim.lr: a number > 0 and <= 1000; default 0.001"
    assert second == "  Highest learning rate, reached after the warm-up."
    section = explain("optim")
    assert section.startswith("optim: a section\n")
    assert "  lr:                       a number > 0" in section
    assert "kind fsq: " in explain("model.image.quantizer")
    assert "levels" in explain("model.image.quantizer.fsq")
    assert "templates" in explain("evaluation[0]")
    for word, meant in (("optim.learning_rate", '"lr"'), ("lr", '"optim.lr"'), ("epochs", '"train.steps"')):
        with pytest.raises(ConfigError, match=f"^{word}: unknown key; did you mean {meant}"):
            explain(word)


WRONG = """
optim: {learning_rate: 1, lr: 1}
trian: {}
data: {sources: [{kind: folder, path: photos, wieght: 1}, {kind: of-a-plug-in, any: 1}]}
model:
  image: {quantizer: {kind: product, codebooks: 2, layer: {kind: fsq, levles: [4]}}}
"""
OVERRIDES = ["max_steps=9", "model.image.quantizer.depht=2", "data.sources[1].any=1", "loss.kind=none", "nonsense"]


def test_unknown_keys_are_refused_as_the_classes_refuse_them(tmp_path):
    with pytest.raises(ConfigError) as refused:
        require_known_keys(write(tmp_path, WRONG), OVERRIDES)
    *lines, of_kind = [line.partition("c.yaml:")[2] or line for line in str(refused.value).splitlines()]
    assert lines == [
        '2: optim.learning_rate: unknown key; did you mean "lr"?',
        '3: trian: unknown key; did you mean "train"?',
        '4: data.sources[0].wieght: unknown key; did you mean "weight"?',
        '6: model.image.quantizer.layer.levles: unknown key; did you mean "levels"?',
        'override "max_steps=9": max_steps: unknown key; did you mean "train.steps"?',
    ]
    with pytest.raises(ConfigError) as full:
        load_task_config(write(tmp_path, WRONG), [each for each in OVERRIDES if "=" in each])
    assert all(any(line in other for other in str(full.value).splitlines()) for line in [*lines, of_kind])
    assert "quantizer.depht: unknown key; expected one of kind, " in of_kind


def test_keys_of_tasks_and_files_that_are_left_to_the_classes(tmp_path):
    require_known_keys(None, ["task=pixels", "decoder.kind=transformer", "optim.lr=1"])
    require_known_keys(None, ["run.trackers[0].mode=offline", "model.image.pixels.losses[0].weight=2"])
    require_known_keys(None, ["train={ema: {decay: 0.5}, ema: {warmup: true}}"])
    require_known_keys(write(tmp_path, "loss: {kind: sigmoid, impl: tiled, any: 1}"), ["loss.kind=contrastive"])
    require_known_keys(write(tmp_path, "{task: [1], any: 2}"), [])
    require_known_keys(write(tmp_path, "task: {a: 1}"), ["task=own", "any=1"])
    with pytest.raises(ConfigError, match="no such configuration file"):
        require_known_keys(tmp_path / "nowhere.yaml", [])
    assert set(TASKS) == {"contrastive", "pixels"}


def test_a_key_is_explained_and_refused_without_torch():
    code = """
import sys
from vqclip.cli.main import main
for call in (["--explain", "optim"], ["--config", "configs/base.yaml", "optim.lrr=1"], ["--learning-rate", "3"]):
    print(main(["train", *call]))
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.isdecimal()] == ["0", "2", "2"]
    error = " ".join(done.stderr.split())
    assert 'did you mean "lr"?' in error
    assert 'did you mean "optim.lr=3"?' in error
    assert max(map(len, (done.stdout + done.stderr).splitlines())) <= 100
