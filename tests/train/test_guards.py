"""What happens when numbers go bad."""

from __future__ import annotations

import json
import math
import os
import re

import pytest
import torch

from tests.data.making import caption_shards
from tests.models import BUSY_RESIDUAL
from tests.ranks import for_each
from tests.training import metrics, run_tree, weights
from vqclip import dist
from vqclip.errors import DistributedError, NonFiniteError, ShapeError
from vqclip.losses import ContrastiveLoss, SigmoidLoss
from vqclip.quantizers import FSQConfig, LFQConfig, ProductConfig, ResidualConfig, VQConfig, sync
from vqclip.runlog.metrics import read_metrics
from vqclip.train import TrainConfig
from vqclip.train import run as train
from vqclip.train.collapse import CollapseConfig
from vqclip.train.guards import GuardConfig, SpikeConfig
from vqclip.train.step import TrainStep
from vqclip.train.summary import render

POISONED = 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return caption_shards(tmp_path_factory.mktemp("shards"), counts=(17, 13))


def check(guards, step, values):
    """The report on a step with these numbers, as a run makes it."""
    skip, facts = guards.judge(torch.tensor(list(values.values()), dtype=torch.float64))
    event = guards.report(step, values, facts.tolist())
    assert bool(skip) == (event is not None and event.skip)
    return event


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
    assert check(second, 12, {"total": 5.0}) == check(first, 12, {"total": 5.0}) is not None


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


@pytest.mark.parametrize("precision", ["fp64", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_with_nan_on_one_rank_is_left_out_on_all(tmp_path, shards, ranks, world_size, precision):
    changes = {"train__steps": 6, "train__checkpoint_every": 5, "train__precision": precision}
    tree = run_tree(tmp_path, shards, BUSY_RESIDUAL, **changes)  # whose codes move in every step
    tree["guards"] = {"on_nonfinite": "skip"}
    for error, moved in ranks(world_size, train_poisoned, tree, str(tmp_path / "cache"), init=False):
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


def test_a_run_that_stops_names_the_samples(tmp_path, shards, ranks):
    tree = run_tree(tmp_path, shards, train__steps=6)
    cache = str(tmp_path / "cache")
    for error, moved in ranks(2, train_poisoned, tree, cache, init=False):
        assert error.startswith(f"step {POISONED}: total = nan")
        assert moved == [False]
    (event,) = read_metrics(tmp_path / "tiny" / "events.jsonl")
    assert (event["step"], event["applied"]) == (POISONED + 1, False)
    assert len(set(event["sample_ids"])) == 12


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
        ("moment", 1, 3, "stop", r"NonFinite.*after step 4: NaN or infinity in model.*step-00000002 is the newest"),
        ("moment", 1, 3, "skip", r"NonFinite.*after step 4: NaN or infinity in model.*step-00000002 is the newest"),
        ("codebook", 1, 6, "stop", r"NonFinite.*after step 6: .* model.*codebook\. .*step-00000004 is the newest"),
        ("codebook", 1, 2, "skip", r"NonFinite.*after step 2: .*There is no checkpoint of this run yet"),
        ("bit", 2, 6, "stop", r"Distributed.*after step 6: rank 1 differs from rank 0 in model.image.pool.head.weight"),
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


class Watched:
    """A watch and one quantizer for image and text, whose steps are reports; everything else is as in a healthy run."""

    def __init__(self, quantizer, **collapse):
        self.quantizer, self.watch, self.done = quantizer, CollapseConfig(**collapse).build(), 0
        self.figures = {}

    def step(self, x, loss=1.0, chance=5.0, **others):
        """Messages after a step with the tokens ``x``; ``others`` are figures that are not those of a healthy run."""
        stats = self.quantizer(x).stats.local()
        self.watch.count({"image": stats}, torch.tensor(False))
        self.done += 1
        metrics = self.quantizer.metrics(self.watch.windows({"image": stats})["image"])
        self.figures = {f"image/{name}": float(value) for name, value in metrics.items()}
        self.figures |= {"grad_norm": 1.0, "image/embedding_cosine": 0.5, "text/embedding_cosine": 0.5, **others}
        return self.watch.check(self.done, self.figures, {"image": self.quantizer.codebook_sizes}, loss, chance)


def tokens(count, quantizer, seed=0):
    return torch.randn(count, quantizer.dim, generator=torch.Generator().manual_seed(seed))


def test_usage_is_that_of_a_window_whatever_the_step():
    """1,024 tokens a step of 4,096 codes that are all used alike: not 22 % but nearly all of them."""
    watched = Watched(LFQConfig(bits=12).build())
    for seed in range(40):
        assert watched.step(tokens(1024, watched.quantizer, seed)) == []
        if seed == 0:
            assert watched.figures["image/usage"] == pytest.approx(0.221, abs=0.01)
        assert watched.figures["image/usage"] == pytest.approx(watched.figures["image/usage_if_uniform"], abs=0.02)
        assert watched.figures["image/tokens"] == 1024 * (seed + 1 if seed < 32 else seed - 15)
    assert watched.figures["image/usage"] > 0.99
    assert watched.watch.health()["verdict"] == "no sign of collapse"


def test_codebooks_that_collapse_are_named_one_by_one():
    """Thirteen of sixteen, whose mean usage is far above any threshold."""
    watched = Watched(ProductConfig(layer=FSQConfig(levels=(8, 8, 8)), codebooks=16).build(), steps=3)
    dead = [number for number in range(16) if number not in (2, 7, 9)]
    said = []
    for seed in range(6):
        x = tokens(1024, watched.quantizer, seed).view(1024, 16, 3)
        x[:, dead] = 1.0
        said.append(watched.step(x.flatten(1)))
    assert [len(messages) for messages in said] == [0, 0, 0, 1, 0, 0]
    names = "0, 1, 3, 4, 5, 6, 8, 10, 11, 12, 13, 14, 15"
    start = f"image: codebooks {names} of 16 have collapsed since step 1 or before: 1 of 512 codes in use over"
    assert said[3][0].startswith(
        f"{start} 4,096 tokens, where evenly used codes would be 512; perplexity 1. What may help: model."
    )
    health = watched.watch.health()
    assert health["verdict"].startswith(f"COLLAPSED: {start}")
    assert health["warnings"] == [{"step": 4, "text": said[3][0]}]
    assert [round(each["usage"] * each["codes"]) == 1 for each in health["codebooks"]] == [n in dead for n in range(16)]
    assert [each["name"] for each in health["codebooks"]] == [f"image/{number}" for number in range(16)]


@pytest.mark.parametrize(("last", "warnings"), [(160, 0), (200, 1)])
def test_a_collapse_that_only_the_last_report_sees_is_in_the_verdict(last, warnings):
    """A few tokens in a thousand have other codes, so that the number of codes seen stays above the limit."""
    watched = Watched(FSQConfig(levels=(8, 8, 8, 8, 4)).build())
    many = tokens(70_000, watched.quantizer)
    few = many[torch.arange(70_000) % 31]
    few[::700] = many[::700]
    watched.done = 149
    assert watched.step(many) == []
    watched.watch.count({"image": watched.quantizer(few).stats.local()}, torch.tensor(False))
    watched.done = last - 1
    assert len(watched.step(few)) == warnings
    (codebook,) = watched.watch.health()["codebooks"]
    assert 0.005 < codebook["usage"] / codebook["usage_if_uniform"] < 0.02
    verdict = (
        f"COLLAPSED: image: the codebook has collapsed since step {last} or before: 130 of 16,384 codes in use over"
    )
    assert watched.watch.health()["verdict"].startswith(verdict)
    assert watched.watch.health()["verdict"].endswith("; perplexity 31")


def test_a_warning_of_thousands_of_codebooks_can_be_resumed():
    watched = Watched(ProductConfig(layer=FSQConfig(levels=(8, 8, 8)), codebooks=3000).build(), steps=1)
    (message,) = [each for seed in range(3) for each in watched.step(torch.ones(64, 9000) + 0 * seed)]
    assert "18, 19, and 2980 more of 3000" in message
    CollapseConfig(steps=1).build().load_state_dict(watched.watch.state_dict(), watched.watch.tensors())


def test_a_collapse_is_told_of_again_only_after_it_was_over_and_after_a_resume_as_before():
    watched = Watched(ResidualConfig(layer=LFQConfig(bits=3, entropy_temperature=1.0), depth=2).build(), steps=2)
    one, many = torch.full((64, 3), 0.9), tokens(64, watched.quantizer)
    said = []
    for number, x in enumerate([one] * 5 + [many] * 3 + [one] * 6):
        state = json.loads(json.dumps(watched.watch.state_dict()))
        windows, watched.watch = watched.watch.tensors(), CollapseConfig(steps=2).build()
        watched.watch.load_state_dict(state, windows)
        said += [(number + 1, message) for message in watched.step(x)]
    assert [step for step, _ in said] == [3, 12]  # the window holds the step before
    assert all("codebooks 0, 1 of 2 have collapsed" in message for _, message in said)


def test_a_sign_that_comes_and_goes_is_told_once():
    watched, said = Watched(FSQConfig(levels=(4, 4)).build(), steps=5), []
    for cosine in [1.0, 0.5, 0.5, 1.0, 0.5] * 4 + [0.5] * 15 + [1.0]:
        state = json.loads(json.dumps(watched.watch.state_dict()))
        windows, watched.watch = watched.watch.tensors(), CollapseConfig(steps=5).build()
        watched.watch.load_state_dict(state, windows)
        said += [watched.done + 1] * len(
            watched.step(tokens(64, watched.quantizer), **{"text/embedding_cosine": cosine})
        )
    assert said == [1, 36]


@pytest.mark.parametrize(
    ("figures", "first", "text"),
    [
        ({"grad_norm": 0.0}, 1, "the gradient is 0"),
        ({"text/embedding_cosine": 1.0 - 1e-8}, 1, "all text embeddings of a batch are equal"),
        (
            {"loss": 4.852, "chance": math.log(128)},
            6,
            r"the loss is 4\.8520, that of a model that knows nothing \(4\.85",
        ),
    ],
)
def test_signs_of_death_are_told_once(figures, first, text):
    watched = Watched(FSQConfig(levels=(4, 4)).build(), steps=5)
    said = [watched.step(tokens(64, watched.quantizer), **figures) for _ in range(9)]
    assert [len(messages) for messages in said] == [int(number + 1 == first) for number in range(9)]
    assert re.match(rf"{text}.*start again with a lower optim\.lr", said[first - 1][0])
    assert re.match(f"DEAD: {text}", watched.watch.health()["verdict"])
    watched.step(tokens(64, watched.quantizer))
    assert watched.watch.health()["verdict"] == "no sign of collapse"


def test_a_first_report_covers_the_steps_before_it():
    watched = Watched(FSQConfig(levels=(4, 4)).build(), steps=5)
    watched.done = 99
    assert "the loss is" in watched.step(tokens(64, watched.quantizer), loss=5.0)[0]
    assert watched.watch.health()["verdict"].startswith("DEAD: the loss")


def test_windows_of_another_codebook_begin_anew():
    former, watched = Watched(FSQConfig(levels=(4, 4)).build()), Watched(FSQConfig(levels=(5, 5)).build())
    former.step(tokens(64, former.quantizer))
    watched.watch.load_state_dict(former.watch.state_dict(), former.watch.tensors())
    watched.step(tokens(64, watched.quantizer))
    assert watched.figures["image/tokens"] == 64


def figures_by_step(split, resumed):
    """Metrics of a window by step; step 3 is skipped, and ``resumed`` says whether every step is one of a new run."""
    torch.manual_seed(0)
    quantizers = {"image": FSQConfig(levels=(4, 4)).build(), "text": VQConfig(dim=2, codebook_size=8).build()}
    watch, found = CollapseConfig().build(), []
    for step in range(8):
        mine = tokens(48, quantizers["image"], step).split(list(split))[dist.rank()]
        parts = [each(mine).stats for each in quantizers.values()]
        stats = dict(zip(quantizers, sync(parts, histograms=False), strict=True))
        if dist.is_distributed():
            with pytest.raises(ShapeError, match="histograms of one"):
                quantizers["image"].metrics(stats["image"])
        watch.count(stats, torch.tensor(step == 3))
        windows = watch.windows(stats)
        of = {name: each.metrics(windows[name]) for name, each in quantizers.items()}
        counts = {name: {"codes": each["codes"].tolist()} for name, each in windows.items()}
        found.append({n: counts[n] | {key: float(value) for key, value in each.items()} for n, each in of.items()})
        if resumed:
            state, tensors = watch.state_dict(), watch.tensors()
            watch = CollapseConfig().build()
            watch.load_state_dict(state, tensors)
    return found


def test_windows_are_the_same_on_any_number_of_ranks_and_after_a_resume(ranks):
    expected = figures_by_step((48,), False)
    assert [int(each["image"]["tokens"]) for each in expected] == [48, 96, 144, 144, 192, 144, 192, 144]
    for split in ((30, 18), (7, 0, 1, 40)):
        for found in ranks(len(split), for_each, figures_by_step, [(split, False), (split, True)]):
            assert found == [expected, expected]


def test_too_few_tokens_tell_nothing():
    watched = Watched(LFQConfig(bits=12).build(), steps=1)
    for _ in range(3):
        assert watched.step(torch.ones(3, 12)) == []


@pytest.mark.parametrize("loss", [ContrastiveLoss("gather"), SigmoidLoss("gather")])
def test_chance_is_the_loss_of_equal_logits(loss):
    same, scale = torch.ones(8, 4, dtype=torch.float64) / 2, torch.tensor(1.0, dtype=torch.float64)
    bias = torch.tensor(-math.log(7.0) - 1.0, dtype=torch.float64) if loss.name == "sigmoid" else None
    assert float(loss(same, same, scale, bias)) == pytest.approx(loss.chance(8))


@pytest.mark.parametrize(("lr", "start"), [(0.05, "DEAD: "), (1e-3, "no sign of collapse")])
def test_a_dead_run_says_so(tmp_path, shards, caplog, monkeypatch, lr, start):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    changes = {"train__steps": 50, "train__report_every": 10, "train__precision": "fp32", "optim__lr": lr}
    with caplog.at_level("WARNING"):
        summary = train(TrainConfig.model_validate(run_tree(tmp_path, shards, **changes))).summary
    written = json.loads((tmp_path / "tiny" / "summary.json").read_text())["health"]
    assert written == summary.health
    assert written["verdict"].startswith(start)
    assert written["verdict"] in render(summary).splitlines()[-1] or lr < 0.05
    warned = [record.getMessage() for record in caplog.records if "step" in record.getMessage()]
    assert [f"step {each['step']}: {each['text']}" for each in written["warnings"]] == warned
    assert bool(warned) == (lr == 0.05)
    if warned:
        assert written["warnings"][0]["step"] <= 20
        for sign in ("all image embeddings of a batch are equal", "the loss is 2.48", "1 of 64 codes in use"):
            assert sign in written["verdict"]
