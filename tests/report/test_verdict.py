import json

import pytest

from tests.report.making import ABOUT, CONFIG, HEALTH, line, make_run, write_lines
from vqclip.evaluation import Result, write_evaluations
from vqclip.report.page import render_run
from vqclip.report.run_files import read_run
from vqclip.report.verdict import Verdict, judge


def verdict_on(folder) -> Verdict:
    return judge(read_run(folder))


def test_a_healthy_run_and_one_that_has_just_begun(tmp_path):
    found = verdict_on(make_run(tmp_path / "run"))
    assert (found.level, found.headline) == ("good", "Healthy")
    assert "fell from 2.65 (step 20) to 1.8; a model that knows nothing has 2.77" in found.findings[0].text
    assert verdict_on(make_run(tmp_path / "begun", steps=20)).headline == "Too early for a verdict"
    (tmp_path / "run" / "about.json").unlink()
    assert verdict_on(tmp_path / "run").headline == "The health is unknown"


def collapse(step):
    return {"image__3__usage": 1 / 64, "image__3__perplexity": 1.0} if step > 100 else {}


def few(step):
    return {"text__1__usage": 0.04, "text__1__perplexity": 2.0}


def overfit(step):
    return {"loss__contrastive": 0.01} | ({"eval__pairs__quantized__i2t_r1": 0.3} if step % 100 == 0 else {})


CHANGES = {
    "collapsed": collapse,
    "unused": few,
    "not finite": lambda step: {"loss__total": "NaN"} if step == 400 else {},
    "rising": lambda step: {"loss__contrastive": 0.5 + step / 100 if step > 200 else 2.7 - step / 100},
    "bad samples": lambda step: {"data__replaced": 4 * step, "data__replaced__damaged_image": 4 * step},
    "overfitted": overfit,
    "waiting": lambda step: {"data_wait": 0.6},
}
RISING = "Diverged since step 260: the loss is too high"
VERDICTS = {
    "collapsed": ("bad", "Collapsed since step 120: image codebooks", "1 of 6 codebooks (3): 1 of 64 codes"),
    "unused": ("warn", "Hardly used: 1 of 6 text codebooks", "text/1"),
    "not finite": ("bad", "Diverged at step 400: the loss or the gradient is not finite", "loss/total"),
    "rising": ("bad", RISING, "It is 4.100 now; it was 1.100 at step 200"),
    "bad samples": ("bad", "25 % of the samples were bad", "1,600 of 6,400 samples shown are in the place of others"),
    "overfitted": ("warn", "Overfitted since step 100", "R@1 of held-out data has not risen since then (30.0%)."),
    "waiting": ("good", "Healthy", "60 % of the time"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_ill_runs(tmp_path, case):
    level, headline, text = VERDICTS[case]
    found = verdict_on(make_run(tmp_path / "run", CHANGES[case]))
    assert (found.level, found.headline) == (level, headline)
    assert any(text in finding.text for finding in found.findings)


@pytest.mark.parametrize("name", ["collapse", "divergence"])
def test_what_the_run_does_not_look_for_the_page_does_not_find(tmp_path, name):
    change = {"collapse": lambda step: collapse(step) | few(step), "divergence": CHANGES["rising"]}[name]
    folder = make_run(tmp_path / "run", change)
    first = "Collapsed since step 120: image codebooks – and 1 more"
    assert verdict_on(folder).headline == (first if name == "collapse" else RISING)
    (folder / "about.json").write_text(json.dumps(ABOUT | {"health": HEALTH | {name: None}}))
    found = verdict_on(folder)
    assert found.headline == "Healthy"
    other = {"collapse": "divergence", "divergence": "collapse"}[name]
    assert found.findings[0].title == f"No sign of {other}"
    assert len(found.codebooks) == 12  # the table stays


def test_a_learning_rate_that_never_came_down(tmp_path):
    folder = make_run(tmp_path / "run", steps=200)
    assert verdict_on(folder).headline == "Healthy"  # it trains
    (folder / "stopped.json").write_text(json.dumps({"step": 200, "reason": "SIGINT"}))
    found = verdict_on(folder)
    assert (found.level, found.headline) == ("warn", "The learning rate never came down")
    assert found.findings[0].text == "It was 0.001 at step 200, of at most 0.001."
    (folder / "config.yaml").write_text(CONFIG.replace("optim: {", "optim: {schedule: constant, "))
    assert verdict_on(folder).headline == "Healthy"
    (folder / "config.yaml").write_text(CONFIG)
    lines = [line(step, lr=1e-3 if step < 100 else 1e-4) for step in range(20, 201, 20)]
    for rows in (lines, lines[-2:]):
        write_lines(folder / "metrics.jsonl", rows)
        assert verdict_on(folder).headline == "Healthy"


@pytest.mark.parametrize(
    ("steps", "summary", "headline"),
    [(400, {"ended_after": None}, "Healthy"), (200, {"ended_after": 200}, "The learning rate never came down")],
)
def test_the_rate_of_a_finished_run_may_be_high_unless_it_ended_early(tmp_path, steps, summary, headline):
    folder = make_run(tmp_path / "run", steps=steps)
    (folder / "summary.json").write_text(json.dumps(summary))
    assert verdict_on(folder).headline == headline


def test_detail_codebooks_are_judged(tmp_path):
    def change(step):
        figures = {"detail__tokens": 1000.0, "detail__usage_if_uniform": 1.0, "detail__usage": 0.5}
        for number, usage in enumerate((0.8, 1 / 64)):
            figures |= {f"detail__{number}__usage": usage, f"detail__{number}__perplexity": max(1.0, 50 * usage - 1)}
        return figures

    folder = make_run(tmp_path / "run", change)
    health = HEALTH | {"loss": "pixels/mse", "chance": "pixels/variance", "codes": {"detail": 64}}
    (folder / "about.json").write_text(json.dumps(ABOUT | {"health": health}))
    found = verdict_on(folder)
    assert found.headline == "Collapsed since step 20: detail codebooks"
    assert [each.name for each in found.codebooks] == ["detail/0", "detail/1"]
    assert "normalize" not in found.findings[0].advice  # the detail quantizer has no such setting
    assert "detail: 2 codebooks" in render_run(read_run(folder))


def test_a_run_that_a_loss_that_is_not_finite_has_stopped(tmp_path):
    folder = make_run(tmp_path / "run", steps=200)
    event = {"step": 213, "event": "nonfinite", "reason": "the loss is NaN", "applied": False, "sample_ids": []}
    write_lines(folder / "events.jsonl", [event])
    found = verdict_on(folder)
    assert (found.level, found.headline[:20]) == ("bad", "Diverged at step 213")
    assert "the loss is NaN" in found.findings[0].text


@pytest.mark.parametrize(
    ("rate", "chance", "samples", "headline"),
    [(0.11, 0.1, 100, "No better than chance"), (1.0, 1 / 3, 3, "Healthy")],
)
def test_figures_at_chance(folder, rate, chance, samples, headline):
    """None of three pairs can be told from chance."""
    rates = {mode: {"top1": rate} for mode in ("continuous", "quantized", "codes_only")}
    write_evaluations(folder, 400, [Result("set", "zero_shot", rates, {"top1": chance}, samples, 10, 10, {})])
    assert verdict_on(folder).headline == headline
