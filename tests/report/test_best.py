from __future__ import annotations

from vqclip.report.best import Best

METRIC = "eval/pairs/codes_only/i2t_r1"


def test_the_best_step_of_the_run_so_far():
    history = [{"step": 1, "loss": 3.0}, {"step": 2, METRIC: 0.5}, {"step": 4, METRIC: 0.7}, {"step": 6, METRIC: 0.6}]
    best = Best(METRIC, history)
    assert best.step == 4
    best.see(8, {METRIC: 0.7})
    assert best.step == 4  # of equals the first
    best.see(10, {METRIC: 0.71})
    assert best.step == 10
    assert Best(METRIC).step is None
