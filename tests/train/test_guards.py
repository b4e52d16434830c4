"""What happens when numbers go bad."""

import json
import math
import re
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.models import BUSY_RESIDUAL, BUSY_VQ, FSQ, tiny_model
from tests.ranks import for_each
from tests.train.test_pixels import ADVERSARIAL, DECODER, DETAIL, pixel_tree
from tests.training import StopAfter, before_steps, run_tree
from vqclip import dist
from vqclip.data import Batch
from vqclip.errors import NonFiniteError, VqclipError
from vqclip.losses import ContrastiveLoss, SigmoidLoss, weighted_total
from vqclip.runlog.metrics import read_metrics
from vqclip.train import run as train
from vqclip.train.guards import GuardConfig, Guards, SpikeConfig
from vqclip.train.step import StepResult, TrainStep
from vqclip.train.tasks.kinds import load_task_config


def check(guards, step, values):
    """The report on a step with these numbers, as a run makes it; None if it is usual."""
    losses = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    norm, batch = losses.pop("gradient norm", torch.tensor(1.0)), Batch(step, 0, *[torch.empty(0)] * 5, 1)
    skip = guards.judge(losses, norm, batch, torch.amp.GradScaler("cpu", enabled=False))
    guards.settle()
    events, guards.events = guards.events, []
    assert any(event.skip for event in events) == bool(skip)
    return events[0] if events else None


def looking(losses, **spikes):
    guards = Guards(GuardConfig(spikes=SpikeConfig(window=10, **spikes)))
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
    assert looking([1.0] * 12 + [1.09])[-1] is None  # nor is every change one after equal losses
    assert looking([1.0] * 12 + [1.11])[-1].kind == "spike"


def test_a_new_level_is_usual_after_a_while():
    events = looking([1.0] * 12 + [3.0] * 12)
    assert [event is not None for event in events[12:]] == [True] * 5 + [False] * 7


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stops_or_is_left_out(value):
    with pytest.raises(NonFiniteError, match=rf"step 7: gradient norm = {value}; the step was not applied"):
        check(Guards(GuardConfig()), 7, {"total": 1.0, "gradient norm": value})
    guards = Guards(GuardConfig(on_nonfinite="skip", max_skipped=2))
    for step in range(2):
        event = check(guards, step, {"total": value, "gradient norm": 1.0})
        assert (event.kind, event.reason, event.skip) == ("nonfinite", f"total = {value}", True)
    with pytest.raises(NonFiniteError, match=r"step 2: .*it was skipped, as were 2 others.*guards.max_skipped"):
        check(guards, 2, {"total": value})


def disturb(step, kind):
    """Harm this rank's copy of the state."""
    weight = step.model.image.pool.head.weight
    if kind == "moment":
        step.optimizer.state[weight]["exp_avg"][0, 0] = math.nan
    elif kind == "codebook":
        next(t for name, t in step.model.state_dict().items() if name.endswith("codebook")).view(-1)[3] = math.inf
    elif kind == "bit":
        weight.data.view(-1).view(torch.int32)[7] ^= 1 << 3
    elif kind == "average":
        step.ema.averages["logit_scale"].fill_(math.nan)
    elif kind == "counter":
        step.optimizer.state[weight]["step"] += 1


def train_disturbed(tree, kind, after):
    """Train with a disturbance of the last rank's state after a step; the error."""
    call = TrainStep.__call__

    def disturbed(self, batch, number):
        result = call(self, batch, number)
        if number + 1 == after and dist.rank() == dist.world_size() - 1:
            disturb(self, kind)
        return result

    with mock.patch.object(TrainStep, "__call__", disturbed), pytest.raises(VqclipError) as error:
        train(tree)
    return f"{error.typename}: {error.value}"


@pytest.mark.parametrize(
    ("kind", "world_size", "after", "on_nonfinite", "message"),
    [
        ("moment", 2, 4, "stop", r"NonFinite.*after step 4: NaN or .* optimizer.*/exp_avg on rank 1\. .*step-00000002"),
        ("moment", 1, 3, "skip", r"NonFinite.*after step 4: NaN or infinity in model.*step-00000002 is the newest"),
        ("average", 1, 4, "stop", r"NonFinite.*after step 4: NaN or infinity in ema/logit_scale.*step-00000002"),
        ("codebook", 1, 2, "skip", r"NonFinite.*after step 2: .*There is no checkpoint of this run yet"),
        ("bit", 3, 4, "stop", r"Distributed.*after step 4: rank 2 differs from rank 0 in model.image.pool.head.weight"),
        ("counter", 2, 4, "stop", r"Distributed.*after step 4: rank 1 differs .* optimizer.*weight/step,"),
    ],
)
def test_a_disturbed_state_is_never_saved(tmp_path, shards, ranks, kind, world_size, after, on_nonfinite, message):
    changes = {"train__steps": 6, "train__checkpoint_every": 2, "train__keep_checkpoints": 1}
    changes |= {"guards": {"on_nonfinite": on_nonfinite}, "train__ema": {"decay": 0.9} if kind == "average" else None}
    tree = run_tree(tmp_path, shards, BUSY_RESIDUAL, **changes)
    errors = ranks(world_size, train_disturbed, tree, kind, after, init=False)
    assert all(re.search(message, error, re.DOTALL) for error in errors), errors
    before = (after - 1) // 2 * 2
    saved = [path.name for path in (tmp_path / "tiny").glob("checkpoints/step-*")]
    assert saved == ([f"step-{before:08d}"] if before else [])
    assert not (tmp_path / "tiny" / "tokenizer").exists()


@pytest.mark.parametrize("loss", [ContrastiveLoss("gather"), SigmoidLoss("gather")])
def test_chance_is_the_loss_of_equal_logits(loss):
    same, scale = torch.ones(8, 4, dtype=torch.float64) / 2, torch.tensor(1.0, dtype=torch.float64)
    bias = torch.tensor(-math.log(7.0) - 1.0, dtype=torch.float64) if loss.name == "sigmoid" else None
    assert float(loss(same, same, scale, bias)) == pytest.approx(loss.chance(8))


def test_the_lowest_loss_is_that_of_the_smoothed_targets():
    loss, apart = ContrastiveLoss("gather", label_smoothing=0.2), torch.eye(8, dtype=torch.float64)
    assert float(loss(apart, apart, torch.tensor(0.825 / 0.025).double().log())) == pytest.approx(loss.lowest(8))
    assert ContrastiveLoss().lowest(8) == SigmoidLoss().lowest(8) == 0.0


# ---- A step that must not be applied changes no bit, on any rank, whatever it would have changed.


STEPS, STOP = 10, 6
BAD = {0, 4, 5, 6, 9}
"""First step, two in a row, the one before a checkpoint, the first one after a resume, the last one."""
NO_METRICS = mock.patch("vqclip.train.callbacks.builtin._read_metrics", return_value=({}, 0.0))
EMPTY = StepResult({}, torch.zeros(()), 0.0, {}, {})


def tree(folder, shards, quantizer, **changes):
    settings = {"train__steps": STEPS, "train__report_every": 1000, "train__checkpoint_every": STOP}
    settings |= {"train__keep_checkpoints": 9, "train__precision": "fp32", "train__ema": {"decay": 0.9}}
    settings |= {"guards": {"on_nonfinite": "skip"}}
    return run_tree(folder, shards, quantizer, **settings | changes)


def poison(tokenizer, kind):
    """Make the output of a tokenizer's tower, or its gradient alone, not finite on the last rank."""
    module = getattr(tokenizer, "tower", tokenizer)

    def harm(module, inputs, output):
        if kind == "loss":
            return output * torch.nan
        if kind == "gradient" and output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.inf)
        return output

    return module.register_forward_hook(harm if dist.rank() == dist.world_size() - 1 else lambda *_: None)


def train_twice(settings, kind, bad=BAD, factor=1.0):
    """Train up to a resume and to the end, with bad steps, of ``factor`` times the loss; kind None: without them."""
    call, results = TrainStep.__call__, [EMPTY]

    def harmed(self, batch, number):
        if number not in bad:
            results.append(call(self, batch, number))
        elif kind is None:
            self.guards.settle()
            if self.ema is not None:
                self.ema.update(number, torch.tensor(True))  # averages begin in a skipped step too
        else:
            hook = poison(getattr(self.model, "text", self.model), kind)
            larger = mock.patch(
                "vqclip.train.step.weighted_total", lambda terms, weights: factor * weighted_total(terms, weights)
            )
            with larger:
                found = call(self, batch, number)
            hook.remove()
            return found
        return results[-1]

    with mock.patch.object(TrainStep, "__call__", harmed), NO_METRICS:
        train(load_task_config(settings), [StopAfter(STOP)])
        train(load_task_config(settings))


def checkpoint(folder, done):
    path = folder / "tiny" / "checkpoints" / f"step-{done:08d}"
    files = sorted(path.rglob("*.safetensors"))
    assert len(files) >= 3
    return {f"{file.relative_to(path)}: {name}": each for file in files for name, each in load_file(file).items()}


def require_same_bits(folder, other):
    saved = sorted(int(path.name[5:]) for path in (folder / "tiny" / "checkpoints").glob("step-*"))
    assert len(saved) > 1
    for done in saved:
        one, two = checkpoint(folder, done), checkpoint(other, done)
        assert one.keys() == two.keys()
        assert [name for name in one if not torch.equal(one[name], two[name])] == [], done
        assert all(each.isfinite().all() for each in one.values() if each.is_floating_point())


PIXELS = {"decoder": DECODER, "losses": [{"kind": "l1"}, ADVERSARIAL]}
CASES = {
    "residual, 3 microbatches": (BUSY_RESIDUAL | {"least": 3}, {"train__micro_batches": 3}),
    "vq": (BUSY_VQ, {}),
    "muon": (FSQ, {"optim__kind": "muon"}),
    "lamb": (FSQ, {"optim__kind": "lamb"}),
    "codebooks of each rank": (BUSY_VQ | {"sync_codebook": False}, {"train__precision": "bf16"}),
    "fsdp": (BUSY_VQ, {"train__parallel": "fsdp"}),
    "decoder and discriminators": (FSQ, {"model__image__pixels": PIXELS}),
}
FEW = {1: ("muon",), 2: ("residual, 3 microbatches", "fsdp")}


@pytest.mark.parametrize(
    ("world_size", "names"), [*FEW.items(), *(pytest.param(n, tuple(CASES), marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_bad_steps_leave_the_bits_of_a_run_without_them(ranks, tmp_path, shards, world_size, names):
    jobs = [
        (tree(tmp_path / f"{name} {kind}", shards, CASES[name][0], **CASES[name][1]), kind)
        for name in names
        for kind in ("loss", "gradient", None)
    ]
    ranks(world_size, for_each, train_twice, jobs, init=False, timeout=400.0)
    for name in names:
        for kind in ("loss", "gradient"):
            require_same_bits(tmp_path / f"{name} {kind}", tmp_path / f"{name} None")
            events = list(read_metrics(tmp_path / f"{name} {kind}" / "tiny" / "events.jsonl"))
            assert [each["step"] for each in events] == [number + 1 for number in sorted(BAD)]
            assert not any(each["applied"] for each in events)
            assert all(len(set(each["sample_ids"])) == 12 for each in events)
            state = tmp_path / f"{name} {kind}" / "tiny" / "checkpoints" / f"step-{STEPS:08d}" / "state.json"
            assert json.loads(state.read_text())["state"]["guards"]["skipped"] == len(BAD)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_steps_of_a_pixel_decoder_leave_its_bits(ranks, tmp_path, shards, world_size):
    tiny_model().build().eval().save_pretrained(tmp_path / "tokenizer")
    settings, jobs = tree(tmp_path, shards, FSQ), []
    for name in ("bad", None):
        own = pixel_tree(tmp_path / str(name), shards, tmp_path / "tokenizer", detail=DETAIL, guards=settings["guards"])
        own["train"] = settings["train"]
        jobs.append((own, name, BAD, math.nan))
    ranks(world_size, for_each, train_twice, jobs, init=False, timeout=400.0)
    require_same_bits(tmp_path / "bad", tmp_path / "None")


def test_a_spike_leaves_the_bits_of_a_run_without_it(tmp_path, shards):
    settings = {"train__steps": 16, "guards": {"spikes": {"window": 10, "skip": True}}}
    for name in ("spike", None):
        config = tree(tmp_path / str(name), shards, FSQ, **settings)
        train_twice(config, name, bad={12}, factor=100.0)
    require_same_bits(tmp_path / "spike", tmp_path / "None")
    (event,) = read_metrics(tmp_path / "spike" / "tiny" / "events.jsonl")
    assert (event["step"], event["event"], event["applied"]) == (13, "spike", False)


def train_to_a_bad_step(settings, bad, kind):
    """Train until a bad step of the last rank ends the run; return the error, the steps begun, and the bad samples."""
    call, states, samples = TrainStep.__call__, [], []

    def harmed(self, batch, number):
        states.append({name: each.clone() for name, each in self.model.state_dict().items()})
        samples.append(batch.sample_ids.tolist())
        hook = poison(self.model.text, kind if number == bad else "")
        try:
            return call(self, batch, number)
        finally:
            hook.remove()
            states.append(self.model.state_dict())

    with mock.patch.object(TrainStep, "__call__", harmed), pytest.raises(NonFiniteError) as error:
        train(load_task_config(settings))
    before, after = states[2 * bad], states[-1]
    assert all(torch.equal(before[name], after[name]) for name in before)
    return str(error.value), len(samples), samples[bad]


@pytest.mark.parametrize(("bad", "kind", "number"), [(3, "loss", "total"), (STEPS - 1, "gradient", "gradient norm")])
def test_a_run_that_must_end_has_the_weights_from_before_the_bad_step(ranks, tmp_path, shards, bad, kind, number):
    """Also after the next step, in which the host reads the verdict; on all ranks, with the samples on record."""
    settings = tree(tmp_path, shards, BUSY_VQ, guards={}, train__checkpoint_every=1000)
    found = ranks(2, train_to_a_bad_step, settings, bad, kind, init=False)
    for error, begun, _ in found:
        assert re.match(rf"step {bad}: {number} = (nan|inf).*the step was not applied.*There is no checkpoint", error)
        assert begun == min(bad + 2, STEPS)
    (event,) = read_metrics(tmp_path / "tiny" / "events.jsonl")
    assert (event["step"], sorted(event["sample_ids"])) == (bad + 1, sorted(found[0][2] + found[1][2]))


def test_a_stop_after_a_bad_step_is_its_error(tmp_path, shards):
    """Of a step that nothing else asks the verdict of: no report, no checkpoint, no evaluation."""
    settings = tree(tmp_path, shards, FSQ, guards={}, train__checkpoint_every=1000)
    harmed = before_steps(lambda step, batch, number: poison(step.model.text, "loss"))
    with harmed, pytest.raises(NonFiniteError, match="step 0: total = nan"):
        train(load_task_config(settings), [StopAfter(1)])
    assert not list((tmp_path / "tiny" / "checkpoints").glob("*"))
