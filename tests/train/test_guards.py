"""What happens when numbers go bad."""

from __future__ import annotations

import json
import math
import os
import re

import pytest
import torch

from tests.models import BUSY_RESIDUAL
from tests.training import metrics, run_tree, weights
from vqclip import dist
from vqclip.data import Batch
from vqclip.errors import DistributedError, NonFiniteError
from vqclip.losses import ContrastiveLoss, SigmoidLoss
from vqclip.runlog.metrics import read_metrics
from vqclip.train import TrainConfig
from vqclip.train import run as train
from vqclip.train.guards import GuardConfig, SpikeConfig
from vqclip.train.step import TrainStep

POISONED = 3


def check(guards, step, values):
    """The report on a step with these numbers, as a run makes it; None if it is usual."""
    losses = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    norm, batch = losses.pop("gradient norm", torch.tensor(1.0)), Batch(step, 0, *[torch.empty(0)] * 5, 1)
    skip = guards.judge(losses, norm, batch, torch.amp.GradScaler("cpu", enabled=False))
    assert guards.settle() == bool(skip)
    events, guards.events = guards.events, []
    return events[0] if events else None


def looking(losses, **spikes):
    """The events of a run with these losses."""
    guards = GuardConfig(spikes=SpikeConfig(window=10, **spikes)).build()
    return [check(guards, step, {"total": loss}) for step, loss in enumerate(losses)]


def test_a_loss_far_above_the_usual_is_a_spike():
    usual = [1.0 + 0.05 * math.sin(7.0 * step) for step in range(15)]
    *before, event, after = looking([*usual, 2.0, 1.0])
    assert before == [None] * 15
    assert event.kind == "spike"
    assert event.reason.startswith("loss 2, where 0.99")
    assert not event.skip
    assert after is None
    assert looking([*usual, 0.1])[-1] is None  # far below is no harm
    assert looking([*usual, 2.0], skip=True)[-1].skip
    assert looking([*usual[:9], 2.0])[-1] is None  # nothing is usual yet


def test_equal_losses_do_not_make_the_next_one_a_spike():
    assert looking([1.0] * 12 + [1.09])[-1] is None
    assert looking([1.0] * 12 + [1.11])[-1].kind == "spike"


def test_a_new_level_is_usual_after_a_while():
    events = looking([1.0] * 12 + [3.0] * 12)
    assert [event is not None for event in events[12:]] == [True] * 5 + [False] * 7


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stops_or_is_left_out(value):
    with pytest.raises(NonFiniteError, match=rf"step 7: gradient norm = {value}; the step was not applied"):
        check(GuardConfig().build(), 7, {"total": 1.0, "gradient norm": value})
    guards = GuardConfig(on_nonfinite="skip", max_skipped=2).build()
    for step in range(2):
        event = check(guards, step, {"total": value, "gradient norm": 1.0})
        assert (event.kind, event.reason, event.skip) == ("nonfinite", f"total = {value}", True)
    with pytest.raises(NonFiniteError, match=r"step 2: .*it was skipped, as were 2 others.*guards.max_skipped"):
        check(guards, 2, {"total": value})


def test_guards_go_on_where_they_were():
    first, second = (GuardConfig(on_nonfinite="skip", spikes=SpikeConfig(window=10)).build() for _ in range(2))
    for step in range(12):
        check(first, step, {"total": 1.0 if step != 5 else math.nan})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.skipped == 1
    assert check(second, 12, {"total": 5.0}).reason == check(first, 12, {"total": 5.0}).reason


def train_poisoned(tree, cache):
    """NaN in rank 1's (or the only rank's) text features of one step; what each rank raised and whether it moved."""
    os.environ["VQCLIP_CACHE"] = cache
    call, moved = TrainStep.__call__, []

    def poisoned(self, batch, number):
        if number != POISONED:
            return call(self, batch, number)
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        multiply = float("nan") if dist.rank() == dist.world_size() - 1 else 1.0
        hook = self.model.text.tower.register_forward_hook(lambda module, inputs, output: output * multiply)
        try:
            return call(self, batch, number)
        finally:
            hook.remove()
            moved.append(any(not torch.equal(before[name], now) for name, now in self.model.state_dict().items()))

    TrainStep.__call__ = poisoned
    try:
        train(TrainConfig.model_validate(tree))
        return None, moved
    except NonFiniteError as error:
        return str(error), moved
    finally:
        TrainStep.__call__ = call


def test_a_step_with_nan_on_one_rank_is_left_out_on_all(tmp_path, shards, ranks):
    changes = {"train__steps": 6, "train__checkpoint_every": 5, "train__precision": "fp16"}
    tree = run_tree(tmp_path, shards, BUSY_RESIDUAL, **changes)  # whose codes move in every step
    tree["guards"] = {"on_nonfinite": "skip"}
    for error, moved in ranks(2, train_poisoned, tree, str(tmp_path / "cache"), init=False):
        assert error is None
        assert moved == [False]
    (event,) = read_metrics(tmp_path / "tiny" / "events.jsonl")
    assert (event["step"], event["event"], event["applied"]) == (POISONED + 1, "nonfinite", False)
    assert "total = nan" in event["reason"]
    assert len(set(event["sample_ids"])) == 12
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path, 6).values())
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 7))
    state = json.loads((tmp_path / "tiny/checkpoints/step-00000006/state.json").read_text())["state"]
    assert state["guards"]["skipped"] == 1


def disturb(step, kind):
    """Harm this rank's copy of the state."""
    weight = step.model.image.pool.head.weight
    if kind == "moment":
        step.optimizer.state[weight]["exp_avg"][0, 0] = math.nan
    elif kind == "codebook":
        next(t for name, t in step.model.state_dict().items() if name.endswith("codebook")).view(-1)[3] = math.inf
    elif kind == "bit":
        weight.data.view(-1).view(torch.int32)[7] ^= 1 << 3
    elif kind == "counter":
        step.optimizer.state[weight]["step"] += 1


def train_disturbed(tree, cache, kind, after):
    """Train with a disturbance of the last rank's state after a step; the error."""
    os.environ["VQCLIP_CACHE"] = cache
    call = TrainStep.__call__

    def disturbed(self, batch, number):
        result = call(self, batch, number)
        if number + 1 == after and dist.rank() == dist.world_size() - 1:
            disturb(self, kind)
        return result

    TrainStep.__call__ = disturbed
    try:
        train(TrainConfig.model_validate(tree))
        return None
    except (NonFiniteError, DistributedError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        TrainStep.__call__ = call


@pytest.mark.parametrize(
    ("kind", "world_size", "after", "on_nonfinite", "message"),
    [
        ("moment", 2, 4, "stop", r"NonFinite.*after step 4: NaN or .* optimizer.*/exp_avg on rank 1\. .*step-00000002"),
        ("moment", 1, 3, "skip", r"NonFinite.*after step 4: NaN or infinity in model.*step-00000002 is the newest"),
        ("codebook", 1, 2, "skip", r"NonFinite.*after step 2: .*There is no checkpoint of this run yet"),
        ("bit", 3, 4, "stop", r"Distributed.*after step 4: rank 2 differs from rank 0 in model.image.pool.head.weight"),
        ("counter", 2, 4, "stop", r"Distributed.*after step 4: rank 1 differs .* optimizer.*weight/step,"),
    ],
)
def test_a_disturbed_state_is_never_saved(tmp_path, shards, ranks, kind, world_size, after, on_nonfinite, message):
    changes = {"train__steps": 6, "train__checkpoint_every": 2, "train__keep_checkpoints": 1}
    tree = run_tree(tmp_path, shards, BUSY_RESIDUAL, **changes)
    tree["guards"] = {"on_nonfinite": on_nonfinite}
    errors = ranks(world_size, train_disturbed, tree, str(tmp_path / "cache"), kind, after, init=False)
    assert all(re.search(message, error, re.DOTALL) for error in errors), errors
    before = (after - 1) // 2 * 2
    assert [path.name for path in (tmp_path / "tiny").glob("checkpoints/step-*")] == [f"step-{before:08d}"][
        : before // 2
    ]
    assert not (tmp_path / "tiny" / "tokenizer").exists()


@pytest.mark.parametrize("loss", [ContrastiveLoss("gather"), SigmoidLoss("gather")])
def test_chance_is_the_loss_of_equal_logits(loss):
    same, scale = torch.ones(8, 4, dtype=torch.float64) / 2, torch.tensor(1.0, dtype=torch.float64)
    bias = torch.tensor(-math.log(7.0) - 1.0, dtype=torch.float64) if loss.name == "sigmoid" else None
    assert float(loss(same, same, scale, bias)) == pytest.approx(loss.chance(8))
