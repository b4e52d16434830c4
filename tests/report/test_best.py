from __future__ import annotations

import pytest

from vqclip.errors import ConfigError
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


def test_a_figure_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"train.keep_best: got 'eval/x'; expected one of eval/a, eval/b"):
        Best("eval/x").see(1, {"eval/b": 1.0, "eval/a": 2.0})
