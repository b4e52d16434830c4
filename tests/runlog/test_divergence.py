from __future__ import annotations

import json
import math

import pytest

from tests.data.making import caption_shards
from tests.training import run_tree
from vqclip.runlog.divergence import DivergenceConfig
from vqclip.train import TrainConfig
from vqclip.train import run as train
from vqclip.train.guards import GuardConfig

CHANCE = math.log(128)


def said(losses, norms=None, resume=False, **config):
    """Steps and messages of a run with these reports, ten steps apart."""
    watch, found = DivergenceConfig(**config).build(), []
    for number, loss in enumerate(losses):
        if resume:
            state = json.loads(json.dumps(watch.state_dict()))
            watch = DivergenceConfig(**config).build()
            watch.load_state_dict(state)
        norm = 1.0 if norms is None else norms[number]
        found += [(10 * (number + 1), message) for message in watch.check(10 * (number + 1), loss, norm, CHANCE)]
    return found, watch


FALLING = [CHANCE * 0.9**number for number in range(20)]


@pytest.mark.parametrize("resume", [False, True])
def test_a_loss_that_rises_is_told_once(resume):
    found, watch = said([*FALLING, *[3.5] * 20, *FALLING[-3:] * 3, *[3.5] * 20], resume=resume)
    ((step, text),) = found
    assert step == 230 + 100  # the median rises with the third high report
    start = "the run diverges: the loss has been too high since step 230 and is 3.500 now; it was 0.809 at step 200"
    assert text.startswith(start)
    assert "resume it from a checkpoint of before" in text
    assert watch.health()["warnings"] == [{"step": step, "text": text}]


def test_what_is_no_divergence():
    noisy = [loss * (1.2 if number % 2 else 0.8) for number, loss in enumerate(FALLING)]
    for losses in (FALLING, noisy, [*FALLING, 50.0, 50.0, *[0.8] * 30], [CHANCE] * 50, [math.nan] * 50):
        assert said(losses)[0] == []
    assert said(FALLING * 2, norms=[1.0, 5000.0] * 4 + [2.0] * 32)[0] == []


def test_a_loss_above_that_of_a_model_that_knows_nothing():
    ((step, text),) = said([CHANCE * 1.2] * 40)[0]
    assert step == 50 + 100
    assert "it was never below 5.822, and a model that knows nothing has 4.852" in text


def test_gradients_that_explode_are_told_at_once():
    ((step, text),) = said([3.0] * 30, norms=[2.0] * 20 + [300.0] * 10)[0]
    assert step == 230
    assert text.startswith("the run diverges: the gradient norm is 300, where 2 was usual. Stop it")


def test_the_verdict_joins_the_watches():
    guards = GuardConfig().build()
    for number in range(40):
        guards.divergence.check(10 * number, CHANCE * 1.2, 1.0, CHANCE)
    assert guards.health()["verdict"].startswith("DIVERGED: the run diverges: the loss")
    again = GuardConfig().build()
    again.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    assert again.health() == guards.health()
    again.load_state_dict({name: each for name, each in guards.state_dict().items() if name != "divergence"})
    assert GuardConfig(collapse=None, divergence=None).build().health() == {}


def test_a_run_tells_it_on_the_screen_and_not_again_after_a_resume(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    shards = caption_shards(tmp_path / "shards", counts=(17, 13))
    monkeypatch.setattr("vqclip.losses.ContrastiveLoss.chance", lambda *_: 0.01)
    changes = {"guards": {"divergence": {"steps": 2}, "collapse": None}, "optim__warmup_steps": 0}
    tree = run_tree(tmp_path, shards, **changes, train__precision="fp32", train__steps=8)
    with caplog.at_level("WARNING"):
        health = train(TrainConfig.model_validate(tree)).summary.health
        tree["train"]["steps"], tree["run"]["resume_allow"] = 10, ["optim", "train"]
        train(TrainConfig.model_validate(tree))
    (told,) = [each for each in caplog.messages if "the run diverges: the" in each]
    assert [told] == [f"step {each['step']}: {each['text']}" for each in health["warnings"]]
    assert health["verdict"].startswith("DIVERGED: ")
