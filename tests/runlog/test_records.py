from __future__ import annotations

import os
from pathlib import Path

import pytest

from vqclip.evaluation import Result
from vqclip.runlog.health import Health
from vqclip.runlog.metrics import SMALL_BYTES, MetricsLog, read_curves
from vqclip.runlog.records import Ranking, Records


class NoData:
    def take_replaced(self):
        return []

    def take_lengths(self):
        return {}


def write_on_a_disk_that_is_full_at_the_end(folder, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    with Records(folder, 0, NoData(), {}, Health(None, None, "loss", 1.0, {}), None) as records:
        for file in (records.metrics, *records._files):
            file.write(1, {"a": 1})
        monkeypatch.setattr(os, "fsync", full)


def test_all_files_are_closed_whatever_happens_to_one(tmp_path, monkeypatch, caplog):
    with pytest.raises(OSError, match="No space left"):
        write_on_a_disk_that_is_full_at_the_end(tmp_path, monkeypatch)
    monkeypatch.undo()
    paths = [f"{tmp_path}/{name}.jsonl" for name in ("metrics", "bad_samples", "events")]
    lost = "may lack its last lines: [Errno 28] No space left on device"
    assert sorted(caplog.messages) == sorted(f"{path}: {lost}: '{path}'" for path in paths)
    held = {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink() and each.exists()}
    assert not {each for each in held if each.startswith(str(tmp_path))}


def test_a_resumed_run_judges_every_row_of_a_long_file(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 2001):
            log.write(step, {"loss": 1.0, "note": "x" * 1200})
        log.write(2000, {"eval/n": 0.5})
    assert log.path.stat().st_size > SMALL_BYTES

    class Counting(Health):
        def add(self, step, figures):
            judged.append((step, dict(figures)))
            return []

    judged = []
    with Records(tmp_path, 2000, NoData(), {}, Counting(None, None, "loss", 1.0, {}), None):
        assert judged == [(step, {"loss": 1.0}) for step in range(1, 2001)]


def result(i2t, t2i):
    rates = {"i2t_r1": i2t, "i2t_r5": 0.9, "t2i_r1": t2i, "t2i_r5": 0.9}
    figures = {"continuous": rates, "quantized": rates, "codes_only": None}
    return Result("pairs", "retrieval", figures, dict.fromkeys(rates, 0.1), 9, None, 9, {"image": None, "text": None})


def test_each_evaluation_has_its_place_also_after_a_resume(tmp_path):
    ranking = Ranking(None, {})
    assert ranking.place(1, result(0.2, 0.2)) == ""
    assert ranking.place(2, result(0.1, 0.4)) == "best so far"
    assert ranking.place(3, result(0.2, 0.3)) == "best after step 2"
    with MetricsLog(tmp_path) as log:
        log.write(2, {"loss/total": 1.0})
        for step, rates in ((2, (0.1, 0.4)), (3, (0.2, 0.3))):
            log.write(step, {f"eval/{name}": rate for name, rate in result(*rates).scalars().items()})
    resumed = Ranking(None, read_curves(log.path).evaluations)
    assert resumed.place(3, result(0.2, 0.3)) == "best after step 2"
    assert resumed.place(4, result(0.3, 0.3)) == "best so far"


def test_the_metric_of_keep_best_decides_alone():
    ranking = Ranking("eval/pairs/quantized/i2t_r1", {})
    ranking.place(1, result(0.2, 0.2))
    assert ranking.place(2, result(0.1, 0.4)) == "best after step 1"
