"""Signs of a run that goes wrong: a dead model, collapsed codebooks, divergence."""

import json
import math
import re

import pytest
import torch

from tests.ranks import for_each
from tests.training import run_tree
from vqclip import dist
from vqclip.errors import ShapeError
from vqclip.losses import ContrastiveLoss
from vqclip.quantizers import FSQConfig, LFQConfig, ProductConfig, VQConfig, sync
from vqclip.runlog.health import CollapseConfig, DivergenceConfig, Health, HealthSettings
from vqclip.train import TrainConfig
from vqclip.train import run as train
from vqclip.train.guards import CodeWindows
from vqclip.train.summary import render

CHANCE = math.log(128)


def judge(collapse, divergence, chance=CHANCE, **others):
    settings = {"collapse": collapse, "divergence": divergence, "loss": "loss", "chance": chance, "codes": {}} | others
    return Health(HealthSettings(**settings))


def said(losses, norms=None, **config):
    """Steps and messages of a run with these reports, ten steps apart."""
    health, found = judge(None, DivergenceConfig(**config)), []
    for number, loss in enumerate(losses):
        step, norm = 10 * (number + 1), 1.0 if norms is None else norms[number]
        found += [(step, text) for text in health.add(step, {"grad_norm": norm, "loss": loss})]
    return found, health


FALLING = [CHANCE * 0.9**number for number in range(20)]


def test_a_loss_that_rises_is_told_once():
    found, health = said([*FALLING, *[3.5] * 20, *FALLING[-3:] * 3, *[3.5] * 20])
    ((step, text),) = found
    assert step == 220 + 100  # the median rises with the third high report, at step 230
    start = "Diverged since step 230: the loss is too high. It is 3.500 now; it was 0.809 at step 200, and a model that"
    assert text.startswith(start)
    assert "resume it from a checkpoint of before" in text
    assert health.summary()["warnings"] == [{"step": step, "text": text}]
    assert health.summary()["verdict"].startswith("Diverged since step 520: the loss is too high. It is")


def test_what_is_no_divergence():
    noisy = [loss * (1.2 if number % 2 else 0.8) for number, loss in enumerate(FALLING)]
    for losses in (FALLING, noisy, [*FALLING, 50.0, 50.0, *[0.8] * 30], [CHANCE] * 50, [math.nan] * 50):
        assert said(losses)[0] == []
    assert said(FALLING * 2, norms=[1.0, 5000.0] * 4 + [2.0] * 32)[0] == []
    of_one = judge(None, DivergenceConfig(), chance=0.0)  # in batches of one sample
    assert not any(of_one.add(step, {"loss": 0.0}) for step in range(1, 20))


def test_a_loss_above_chance_and_gradients_that_explode():
    ((step, text),) = said([CHANCE * 1.2] * 40)[0]
    assert step == 40 + 100
    assert "it was never below 5.822, and a model that knows nothing has 4.852" in text
    ((step, text),) = said([3.0] * 30, norms=[2.0] * 20 + [300.0] * 10)[0]
    assert step == 230  # at once
    start = "Diverged since step 230: the gradient explodes. Its norm is 300, where 2 was usual. Stop it"
    assert text.startswith(start)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_overfitting_is_told_once_and_ends_with_a_better_evaluation(smoothing):
    lowest = ContrastiveLoss(label_smoothing=smoothing).lowest(128)
    health, said = judge(None, DivergenceConfig(), lowest=lowest), []
    rates = {2: 0.1, 4: 0.3, 6: 0.2, 8: 0.3, 10: 0.25, 12: 0.4}
    for number in range(1, 13):
        loss = CHANCE / 1.5**number if number < 6 else lowest + 0.007
        health.add(10 * number, {"loss": loss, "grad_norm": 1.0})
        if number in rates:
            evaluation = {"set/quantized/i2t_r1": rates[number], "set/quantized/i2t_r10": 0.99, "set/quantized/psnr": 9}
            said += [(10 * number, text) for text in health.add_evaluation(10 * number, evaluation)]
            assert health.summary()["verdict"].startswith("Overfitted" if number in (8, 10) else "no sign")
    ((step, text),) = said
    assert step == 80
    assert text.startswith(
        f"Overfitted since step 40. The loss on training batches is {lowest + 0.007:.3g}, and R@1 of held-out data has "
        "not risen since then (30.0%). What may help"
    )
    assert health.summary()["warnings"] == [{"step": 80, "text": text}]


@pytest.mark.parametrize(("loss", "rate"), [(0.5, 0.3), (0.007, 0.97)])
def test_what_is_no_overfitting(loss, rate):
    """A loss that is not small, or held-out data that are as good as learnt."""
    health = judge(None, DivergenceConfig())
    for number in range(1, 13):
        health.add(10 * number, {"loss": loss, "grad_norm": 1.0})
        assert health.add_evaluation(10 * number, {"set/quantized/top1": rate}) == []


def test_the_verdict_joins_dead_and_diverged():
    health = judge(CollapseConfig(), DivergenceConfig(), "chance")
    for number in range(40):
        health.add(10 * number, {"grad_norm": 0.0, "loss": CHANCE * 1.2, "chance": CHANCE})
    verdict = "Dead since step 0: the gradient is 0. The model no longer learns. Diverged since step 50: the loss"
    assert health.summary()["verdict"].startswith(verdict)
    assert judge(None, None).summary() == {}


def test_a_run_tells_it_on_the_screen_and_not_again_after_a_resume(tmp_path, monkeypatch, caplog, shards):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vqclip.losses.ContrastiveLoss.chance", lambda *_: 0.01)
    changes = {"guards": {"divergence": {"steps": 2}, "collapse": None}, "optim__warmup_steps": 0}
    tree = run_tree(tmp_path, shards, **changes, train__precision="fp32", train__steps=8)
    with caplog.at_level("WARNING"):
        health = train(TrainConfig.model_validate(tree)).summary.health
        tree["train"]["steps"], tree["run"]["resume_allow"] = 10, ["optim", "train"]
        train(TrainConfig.model_validate(tree))
    (told,) = [each for each in caplog.messages if "Diverged since" in each]
    assert [told] == [f"step {each['step']}: {each['text']}" for each in health["warnings"]]
    assert health["verdict"].startswith("Diverged since step ")


def test_rows_of_a_stop_change_nothing_and_the_last_row_counts():
    """The reports of a run that was stopped five times are judged as those of one that never was."""
    rows = [(10 * number, {"loss": loss, "grad_norm": 1.0}) for number, loss in enumerate([*FALLING, *[3.5] * 20], 1)]
    stops = [(step, {"loss": 0.01, "grad_norm": 0.0}) for step in (33, 34, 35, 36, 211)]

    def judged(rows):
        health = judge(CollapseConfig(), DivergenceConfig(), every=10, end=405)
        return [(step, text) for step, figures in rows for text in health.add(step, figures)], health.summary()

    plain = judged(rows)
    assert len(plain[0]) == 1
    assert judged(sorted([*rows, *stops], key=lambda row: row[0])) == plain
    assert (
        "the gradient is 0" in judged([*rows[:-2], *((n, {"grad_norm": 0.0}) for n in (390, 400, 405))])[1]["verdict"]
    )


class Watched:
    """A run of one quantizer, whose steps are reports; everything else is as in a healthy run."""

    def __init__(self, quantizer, **collapse):
        self.quantizer, self.collapse, self.done = quantizer, CollapseConfig(**collapse), 0
        self.windows, self.figures, self.rows = CodeWindows(), {}, {}
        self.resume()

    def step(self, x, loss=1.0, chance=5.0, **others):
        """Messages after a step with the tokens ``x``; ``others`` are figures that are not those of a healthy run."""
        stats = self.quantizer(x).stats.local()
        self.windows.count({"image": stats}, torch.tensor(False))
        self.done += 1
        metrics = self.quantizer.metrics(self.windows.sums({"image": stats})["image"])
        self.figures = {f"image/{name}": float(value) for name, value in metrics.items()}
        self.figures |= {"grad_norm": 1.0, "image/embedding_cosine": 0.5, "text/embedding_cosine": 0.5, **others}
        self.figures |= {"loss": loss, "chance": chance}
        self.rows[self.done] = self.figures
        return self.health.add(self.done, self.figures)

    def resume(self):
        """Go on from a checkpoint and the rows of ``metrics.jsonl``."""
        windows, self.windows = self.windows.tensors(), CodeWindows()
        self.windows.load(windows)
        self.health = judge(self.collapse, None, "chance", codes={"image": self.quantizer.codebook_sizes[0]})
        for step, figures in self.rows.items():
            self.health.add(step, figures)


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
    assert watched.health.summary()["verdict"] == "no sign of collapse"


def test_codebooks_that_collapse_are_named_one_by_one():
    """Thirteen of sixteen, whose mean usage is far above any threshold."""
    watched = Watched(ProductConfig(layer=FSQConfig(levels=(8, 8, 8)), codebooks=16).build(), steps=3)
    dead = [number for number in range(16) if number not in (2, 7, 9)]
    said = []
    for seed in range(6):
        x = tokens(1024, watched.quantizer, seed).view(1024, 16, 3)
        x[:, dead] = 1.0
        said.append(watched.step(x.flatten(1)))
    assert [len(messages) for messages in said] == [0, 0, 1, 0, 0, 0]
    names = "0, 1, 3, 4, 5, 6, 8, 10, 11, 12, 13, 14, 15"
    start = f"Collapsed since step 1: image codebooks. 13 of 16 codebooks ({names}): 1 of 512 codes in use over"
    text = f"{start} 3,072 tokens, where evenly used codes would be 511; perplexity 1. What may help: model."
    assert said[2][0].startswith(text)
    health = watched.health.summary()
    assert health["verdict"].startswith(start)
    assert health["warnings"] == [{"step": 3, "text": said[2][0]}]
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
    watched.windows.count({"image": watched.quantizer(few).stats.local()}, torch.tensor(False))
    watched.done = last - 1
    assert len(watched.step(few)) == warnings
    (codebook,) = watched.health.summary()["codebooks"]
    assert 0.005 < codebook["usage"] / codebook["usage_if_uniform"] < 0.02
    verdict = f"Collapsed since step {last}: image codebooks. 130 of 16,384 codes in use over"
    assert watched.health.summary()["verdict"].startswith(verdict)
    assert watched.health.summary()["verdict"].endswith("; perplexity 31.")


def test_each_codebook_is_told_of_once():
    """Of two that collapse at other times, one of them again."""
    health, said = judge(CollapseConfig(steps=5), None, 5.0, codes={"image": 512}), []
    for step in range(1, 101):
        figures = {"image/tokens": 4096.0, "image/usage_if_uniform": 1.0}
        for number, collapsed in ((0, 10 < step <= 30 or step > 80), (1, 20 < step <= 60)):
            figures |= {f"image/{number}/usage": 0.5, f"image/{number}/perplexity": 1.0 if collapsed else 300.0}
        said += [(step, text) for text in health.add(step, figures)]
    assert [step for step, _ in said] == [15, 25]
    assert "1 of 2 codebooks (0)" in said[0][1]
    assert "Collapsed since step 11: image codebooks. 2 of 2 codebooks (0, 1)" in said[1][1]


def test_a_sign_that_comes_and_goes_is_told_once_also_after_a_resume():
    watched, said = Watched(FSQConfig(levels=(4, 4)).build(), steps=1), []
    for cosine in [0.5, *[1.0] * 4, 0.5, 0.5, 1.0, 0.5] * 4 + [0.5] * 15 + [1.0] * 3:
        watched.resume()
        x = tokens(64, watched.quantizer)
        said += [watched.done for _ in watched.step(x, **{"text/embedding_cosine": cosine})]
    assert said == [4]


SIGNS = [
    ({"grad_norm": 0.0}, "the gradient is 0"),
    ({"text/embedding_cosine": 1.0 - 1e-8}, "all text embeddings of a batch are equal"),
    ({"loss": 4.852, "chance": CHANCE}, r"the loss is at chance. It is 4\.8520, that of a model that knows nothing"),
]


@pytest.mark.parametrize(("figures", "text"), SIGNS)
def test_signs_of_death_are_told_once(figures, text):
    watched = Watched(FSQConfig(levels=(4, 4)).build(), steps=5)
    said = [watched.step(tokens(64, watched.quantizer), **figures) for _ in range(9)]
    assert [len(messages) for messages in said] == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    text = f"Dead since step 1: {text}"
    assert re.match(rf"{text}.*start again with a lower optim\.lr", said[4][0])
    assert re.match(text, watched.health.summary()["verdict"])
    watched.step(tokens(64, watched.quantizer))
    assert watched.health.summary()["verdict"] == "no sign of collapse"


@pytest.mark.parametrize(("figures", "text"), SIGNS)
def test_signs_of_death_in_rare_reports_of_a_healthy_run_are_not_told(figures, text):
    """Two in a row may be of batches of one class; a third is not."""
    health, said, healthy = judge(CollapseConfig(), None, CHANCE, every=20), [], {"loss": 1.0, "grad_norm": 1.0}
    for number, is_ill in enumerate([0, 1, 0, 1, 1, 0, 1, 1, 1], start=1):
        said += [number for _ in health.add(20 * number, healthy | (figures if is_ill else {}))]
        assert health.summary()["verdict"].startswith("Dead since step 140: " if number == 9 else "no sign")
    assert said == [9]


def test_a_first_report_covers_the_steps_before_it_and_too_few_tokens_tell_nothing():
    watched = Watched(FSQConfig(levels=(4, 4)).build(), steps=5)
    watched.done = 99
    assert watched.step(tokens(64, watched.quantizer), loss=5.0) == []
    assert watched.health.summary()["verdict"].startswith("Dead since step 100: the loss")
    watched = Watched(LFQConfig(bits=12).build(), steps=1)
    assert [watched.step(torch.ones(3, 12)) for _ in range(3)] == [[], [], []]


def test_windows_of_another_codebook_begin_anew():
    former, watched = Watched(FSQConfig(levels=(4, 4)).build()), Watched(FSQConfig(levels=(5, 5)).build())
    former.step(tokens(64, former.quantizer))
    watched.windows.load(former.windows.tensors())
    watched.step(tokens(64, watched.quantizer))
    assert watched.figures["image/tokens"] == 64


def figures_by_step(split, resumed):
    """Metrics of a window by step; step 3 is skipped, and ``resumed`` says whether every step is one of a new run."""
    torch.manual_seed(0)
    quantizers = {"image": FSQConfig(levels=(4, 4)).build(), "text": VQConfig(dim=2, codebook_size=8).build()}
    window, found = CodeWindows(), []
    for step in range(8):
        mine = tokens(48, quantizers["image"], step).split(list(split))[dist.rank()]
        parts = [each(mine).stats for each in quantizers.values()]
        stats = dict(zip(quantizers, sync(parts, histograms=False), strict=True))
        if dist.is_distributed():
            with pytest.raises(ShapeError, match="histograms of one"):
                quantizers["image"].metrics(stats["image"])
        window.count(stats, torch.tensor(step == 3))
        windows = window.sums(stats)
        of = {name: each.metrics(windows[name]) for name, each in quantizers.items()}
        counts = {name: {"codes": each["codes"].tolist()} for name, each in windows.items()}
        found.append({n: counts[n] | {key: float(value) for key, value in each.items()} for n, each in of.items()})
        if resumed:
            tensors, window = window.tensors(), CodeWindows()
            window.load(tensors)
    return found


def test_windows_are_the_same_on_any_number_of_ranks_and_after_a_resume(ranks):
    expected = figures_by_step((48,), False)
    assert [int(each["image"]["tokens"]) for each in expected] == [48, 96, 144, 144, 192, 144, 192, 144]
    for split in ((30, 18), (7, 0, 1, 40)):
        for found in ranks(len(split), for_each, figures_by_step, [(split, False), (split, True)]):
            assert found == [expected, expected]


def test_a_dead_run_says_so(tmp_path, shards, caplog, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    changes = {"train__steps": 50, "train__report_every": 10, "train__precision": "fp32", "optim__lr": 0.05}
    with caplog.at_level("WARNING"):
        summary = train(TrainConfig.model_validate(run_tree(tmp_path, shards, **changes))).summary
    written = json.loads((tmp_path / "tiny" / "summary.json").read_text())["health"]
    assert written == summary.health
    assert written["verdict"].startswith("Dead since step ")
    assert f"  health      {written['verdict']}" in render(summary)
    warned = [record.getMessage() for record in caplog.records if "step" in record.getMessage()]
    assert [f"step {each['step']}: {each['text']}" for each in written["warnings"]] == warned
    assert written["warnings"][0]["step"] == 30
    for sign in ("image embeddings of a batch are equal", "the loss is at chance. It is 2.48", "1 of 64 codes in use"):
        assert sign in written["verdict"]
