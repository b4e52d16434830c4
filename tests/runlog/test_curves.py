from __future__ import annotations

import json
import math
import time

from tests.report.making import line, write_lines
from vqclip.runlog import curves
from vqclip.runlog.curves import POINTS, read_curves


def test_lines_of_a_step_are_merged_and_numbers_that_are_not_finite_are_floats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(
        path, [{"step": 1, "a": 1, "text": "x", "flag": True}, {"step": 1, "b": "NaN"}, {"step": 1, "eval/n": 1.0}]
    )
    found = read_curves(path)
    assert list(found.steps[1]) == ["a", "b"]
    assert math.isnan(found.steps[1]["b"])
    assert found.evaluations == {1: {"n": 1.0}}


def test_lines_of_a_run_before_it_was_resumed_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": step, "a": value} for step, value in ((1, 1), (2, 1), (3, 1), (2, 5), (3, 6))])
    assert read_curves(path).get("a") == ([1, 2, 3], [1, 5, 6])


def test_damaged_lines_are_counted_and_a_line_in_the_making_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps({"step": 1, "a": 1}).encode()
    path.write_bytes(
        good + b"\n\xff\xfe{\n[1]\n" + b'{"step": -3}\n{"step": 2, "a": 1' + b"0" * 400 + b"}\n" + good[:5]
    )
    found = read_curves(path)
    assert (found.damaged, found.get("a")) == (3, ([1, 2], [1.0, math.inf]))


def test_a_long_file_is_sampled_with_all_evaluations_and_the_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    padding = "x" * 3000
    with path.open("w") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({"step": step, "a": step, "padding": padding}) + "\n")
            if step % 5000 == 0:
                file.write(json.dumps({"step": step, "eval/n": step}) + "\n")
    start = time.process_time()
    found = read_curves(path)
    assert time.process_time() - start < 3
    assert found.thinned
    assert POINTS / 2 < len(found.steps) <= POINTS + 25
    assert [min(found.steps), max(found.steps)] == [1, 20_000]
    assert list(found.evaluations) == [5000, 10_000, 15_000, 20_000]


def test_sampling_finds_what_reading_every_line_finds(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    lines = [line(step) for step in range(1, 50)]
    lines[20:20] = [{"step": 20, "eval/n": 0.5}]
    write_lines(path, lines)
    every = read_curves(path)
    monkeypatch.setattr(curves, "SMALL_BYTES", 0)
    monkeypatch.setattr(curves, "POINTS", 5000)
    sampled = read_curves(path)
    assert (sampled.steps, sampled.evaluations) == (every.steps, every.evaluations)


def test_a_line_of_any_length_costs_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "MAX_LINE", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1}\n' + b"x" * 10_000 + b"\n" + b'{"step": 2, "a": 1}\n')
    found = read_curves(path)
    assert (list(found.steps), found.damaged) == ([1, 2], 1)
