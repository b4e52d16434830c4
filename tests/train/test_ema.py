"""Moving averages of the weights: their formula, what uses them, what a checkpoint keeps of them."""

import math
import shutil
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import vqclip
from tests.models import BUSY_VQ, FSQ, VQ, change
from tests.training import all_equal, averages, metrics, retrieval, run, run_tree, weights
from vqclip.cli.main import main
from vqclip.errors import CheckpointError, ConfigError
from vqclip.evaluation import try_all
from vqclip.model import CLIP
from vqclip.runlog.records import read_best
from vqclip.train import TrainConfig
from vqclip.train.ema import Ema, EmaConfig, require_averages
from vqclip.train.export import load_model

LEARNED_VQ = VQ | {"learning": "gradient"}
STEPS = 4
APPLIED, SKIPPED = torch.tensor(False), torch.tensor(True)


def tree_with_ema(folder, shards, quantizer=FSQ, ema=None, **changes):
    ema = {"decay": 0.9} | (ema or {})
    return run_tree(folder, shards, quantizer, train__steps=STEPS, train__ema=ema, **changes)


class Walk(nn.Module):
    """A model whose weights are moved by hand."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, dtype=dtype))
        self.late = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        self.register_buffer("counts", torch.zeros(2))

    @torch.no_grad()
    def move(self, step):
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.add_(step + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_is_the_formula(dtype, warmup):
    model = Walk(dtype)
    config = EmaConfig(decay=0.75, warmup=warmup)
    ema, expected = Ema(config, dict(model.named_parameters())), None
    for step in range(40):
        model.move(step)
        ema.update(step, APPLIED)
        decay = min(0.75, (1 + step) / (10 + step)) if warmup else 0.75
        weight = model.first[0].item()
        expected = weight if expected is None else decay * expected + (1 - decay) * weight
    assert list(ema.averages) == ["first"]
    assert ema.averages["first"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(ema.averages["first"].double(), torch.full((2,), expected).double(), rtol=1e-5, atol=0)


def test_an_average_begins_when_its_weight_is_trained():
    model = Walk()
    ema = Ema(EmaConfig(decay=0.5, warmup=False), dict(model.named_parameters()))
    for step in range(3):
        model.late.requires_grad_(step == 2)
        model.move(step)
        ema.update(step, APPLIED)
        assert ("late" in ema.averages) == (step == 2)
    assert ema.averages["late"].tolist() == [4.0] * 3
    model.move(3)
    ema.update(3, APPLIED)
    assert ema.averages["late"].tolist() == [6.0] * 3


def test_evaluation_and_export_use_the_averages(tmp_path, shards):
    """And the checkpoint continues from the weights themselves."""
    tree = tree_with_ema(tmp_path, shards, evaluation=retrieval(shards), ema={"evaluate": "both"})
    run(tree)
    current, averaged = weights(tmp_path, STEPS), averages(tmp_path, STEPS)
    trained = {name for name, _ in TrainConfig.model_validate(tree).model.build().named_parameters()}
    assert averaged.keys() == trained
    assert not any(torch.equal(averaged[name], current[name]) for name in averaged if averaged[name].numel() > 20)
    exported = load_file(tmp_path / "tiny" / "tokenizer" / "model.safetensors")
    assert all_equal(exported, current | averaged)

    run(change(tree, {"run__folder": str(tmp_path / "plain"), "train__ema": None}))
    assert all_equal(weights(tmp_path / "plain", STEPS), current)
    figures, alone = metrics(tmp_path)[-1], metrics(tmp_path / "plain")[-1]
    for name in (name for name in alone if name.startswith("eval/")):
        assert figures[f"eval/current weights/{name.removeprefix('eval/')}"] == alone[name]
    assert figures["eval/pairs/codes_only/i2t_r1"] == figures["eval/pairs/quantized/i2t_r1"]


def test_commands_take_the_averages_or_the_current_weights(tmp_path, shards, capsys, monkeypatch):
    run(tree_with_ema(tmp_path, shards, train__precision="fp32", evaluation=retrieval(shards)))
    folder = tmp_path / "tiny"
    current, averaged = weights(tmp_path, STEPS), weights(tmp_path, STEPS) | averages(tmp_path, STEPS)
    for options, expected in (((), averaged), (("--weights", "current"), current)):
        out = tmp_path / f"out{len(options)}"
        assert main(["export-tokenizer", str(folder), "--out", str(out), *options]) == 0
        assert all_equal(load_file(out / "model.safetensors"), expected)
        assert ("eval/pairs/codes_only/i2t_r1" in (out / "README.md").read_text()) == (expected is averaged)
    saved = folder / "checkpoints" / f"step-{STEPS:08d}"
    monkeypatch.chdir(saved)
    for place in (folder, saved, saved / "model", "model"):
        for kind, expected in (("averaged", averaged), ("current", current)):
            found = load_model(str(place), kind)
            assert found.weights == kind
            assert all_equal(found.model.state_dict(), expected)
    assert load_model(str(folder / "tokenizer")).weights == "averaged"
    with pytest.raises(ConfigError, match="weights: got 'current' for the tokenizer"):
        load_model(str(folder / "tokenizer"), "current")
    copied = tmp_path / "model"
    shutil.copytree(saved / "model", copied)
    assert load_model(str(copied)).weights == "exported"
    assert not vqclip.load_tokenizer(folder / "tokenizer", modality="image").training
    capsys.readouterr()


def test_the_best_step_is_exported_with_its_own_averages(tmp_path, shards):
    changes = {"train__checkpoint_every": 2, "train__evaluate_every": 2, "train__export": "best"}
    changes |= {"train__keep_best": "eval/pairs/codes_only/i2t_r1", "evaluation": retrieval(shards)}
    tree = tree_with_ema(tmp_path, shards, **changes)
    evaluated = []

    def scored(model, tasks, **options):
        evaluated.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        outcome = try_all(model, tasks, **options)
        for result in outcome.results:
            result.figures["codes_only"]["i2t_r1"] = 1 - 0.1 * len(evaluated)
        return outcome

    with mock.patch("vqclip.train.callbacks.builtin.try_all", scored), mock.patch("vqclip.train.main.try_all", scored):
        run(tree)
    assert read_best(tmp_path / "tiny") == 2
    best = weights(tmp_path, 2) | averages(tmp_path, 2)
    assert all_equal(load_file(tmp_path / "tiny" / "tokenizer" / "model.safetensors"), best)
    assert all_equal(evaluated[0], best)
    assert all_equal(evaluated[-1], best)
    assert len(evaluated) == 3


def test_learned_codebooks_are_averaged_and_others_used_as_they_are(tmp_path, shards):
    for name, quantizer in (("learned", LEARNED_VQ), ("moving", BUSY_VQ)):
        run(tree_with_ema(tmp_path / name, shards, quantizer))
        current, averaged = weights(tmp_path / name, STEPS), averages(tmp_path / name, STEPS)
        exported = load_file(tmp_path / name / "tiny" / "tokenizer" / "model.safetensors")
        key = "image.quantizer.codebook"
        assert (key in averaged) == (name == "learned")
        assert torch.equal(exported[key], current[key]) == (name == "moving")


def test_what_is_no_average_is_refused(tmp_path, shards):
    run(tree_with_ema(tmp_path, shards, train__precision="fp32"))
    model = CLIP.from_pretrained(tmp_path / "tiny" / "checkpoints" / f"step-{STEPS:08d}" / "model")
    ema = Ema(EmaConfig(), dict(model.named_parameters()))
    good = averages(tmp_path, STEPS)
    ema.load(good)
    bad = good["image.project_out.0.bias"]
    known = "image.project_out.0.bias"
    wrong = ("image.unknown", bad), (known, bad[:-1]), (known, bad.double()), (known, bad * math.nan)
    for name, tensor in wrong:
        with pytest.raises(CheckpointError, match=rf"averages of weights: {name}: expected finite"):
            require_averages(dict(model.named_parameters()), good | {name: tensor})


def test_a_run_may_gain_or_lose_its_average_if_it_says_so(tmp_path, shards):
    tree = run_tree(tmp_path, shards, train__steps=STEPS)
    run(tree)
    tree["train"] |= {"ema": {"decay": 0.5}, "steps": STEPS + 2}
    with pytest.raises(CheckpointError, match=r"train\.ema"):
        run(tree)
    tree["run"]["resume_allow"] = ["train"]
    run(tree)
    assert averages(tmp_path, STEPS + 2)
    tree["train"] |= {"ema": None, "steps": STEPS + 4}
    run(tree)
    assert not averages(tmp_path, STEPS + 4)


def test_adapters_are_averaged_and_merged(tmp_path, shards, capsys):
    """Frozen weights have no average; commands give the tokenizer that the run has exported."""
    pytest.importorskip("peft")
    changes = {"model__image__tower__train": {"lora": {"rank": 2}}, "model__text__tower__train": "none"}
    run(tree_with_ema(tmp_path, shards, train__precision="fp32", optim__layer_decay=0.5, **changes))
    averaged, current = averages(tmp_path, STEPS), weights(tmp_path, STEPS)
    adapted = {name for name in averaged if "lora_" in name}
    assert adapted
    assert {name for name in averaged if ".tower." in name} == adapted
    assert not any(torch.equal(averaged[name], current[name]) for name in adapted)
    exported = load_file(tmp_path / "tiny" / "tokenizer" / "model.safetensors")
    out = {}
    for choice in ("averaged", "current"):
        folder = tmp_path / choice
        assert main(["export-tokenizer", str(tmp_path / "tiny"), "--out", str(folder), "--weights", choice]) == 0
        out[choice] = load_file(folder / "model.safetensors")
        assert all_equal(load_model(str(tmp_path / "tiny"), choice)[0].state_dict(), out[choice])
    assert all_equal(out["averaged"], exported)
    moved = {name for name in exported if not torch.equal(out["current"][name], exported[name])}
    assert any(name.startswith("image.tower.") for name in moved)
    assert not any(name.startswith("text.tower.") for name in moved)
    capsys.readouterr()
