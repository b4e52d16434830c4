import json
import logging
import math
import os
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest

from tests.report.making import line, write_lines
from vqclip.errors import DataError
from vqclip.evaluation import Result
from vqclip.runlog import metrics as runlog_metrics
from vqclip.runlog.health import Health, HealthSettings
from vqclip.runlog.metrics import LAST_LINES, POINTS, SMALL_BYTES, JsonLines, read_curves, read_metrics
from vqclip.runlog.records import Records, place_evaluation


def steps(path) -> list[int]:
    return [entry["step"] for entry in read_metrics(path)]


def test_every_line_is_valid_json_and_on_the_disk_at_once(tmp_path):
    values = {"loss": 0.5, "big": 1e300, "n": 3, "nan": math.nan, "up": math.inf, "down": -math.inf}
    with closing(JsonLines(tmp_path / "run" / "metrics.jsonl")) as log:
        log.write(1, {**values, "note": "π\n", "ok": True, "nothing": None})
        text = log.path.read_bytes()
    (written,) = text.splitlines()
    entry = json.loads(written, parse_constant=pytest.fail)
    assert entry["loss"] == 0.5
    assert (entry["nan"], entry["up"], entry["down"]) == ("NaN", "Infinity", "-Infinity")
    assert (entry["note"], entry["ok"], entry["nothing"]) == ("π\n", True, None)
    (back,) = read_metrics(log.path)
    assert math.isnan(back["nan"])
    assert (back["up"], back["down"], back["big"], back["note"]) == (math.inf, -math.inf, 1e300, "π\n")


def test_resume_drops_later_steps_and_a_broken_line(tmp_path, caplog):
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as log:
        for step in range(1, 8):
            log.write(step, {"loss": step / 3})
        log.write(7, {"eval": 0.5})
    kept = log.path.read_bytes().splitlines(keepends=True)[:4]
    with log.path.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    with caplog.at_level(logging.WARNING), closing(JsonLines(tmp_path / "metrics.jsonl", start_step=4)) as log:
        assert log.path.read_bytes().splitlines(keepends=True) == kept
        log.write(5, {"loss": 9.0})
    assert "dropped 4 lines of steps after 4 and 1 broken ones" in caplog.text
    assert steps(log.path) == [1, 2, 3, 4, 5]
    caplog.clear()
    JsonLines(tmp_path / "metrics.jsonl", start_step=5).close()
    assert steps(log.path) == [1, 2, 3, 4, 5]
    assert not caplog.text
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_resume_reads_only_the_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    unread = b"no line\n" + b'{"step": 1}\n' * 2
    path.write_bytes(unread + b'{"step": 2, "a": 1}\n{"step": 2, "a": 3, "b": 2}\n{"step": 3}\n')
    with closing(JsonLines(tmp_path / "metrics.jsonl", start_step=2)) as log:
        assert log.recorded == {"step": 2, "a": 3, "b": 2}
    assert path.read_bytes() == unread + b'{"step": 2, "a": 1}\n{"step": 2, "a": 3, "b": 2}\n'


def test_a_deleted_file_ends_no_run(tmp_path, caplog):
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as log:
        for step in range(1, 40):
            log.write(step, {"loss": 1.0})
            log.flush()
            if step == 20:
                log.path.unlink()
    assert steps(log.path) == list(range(21, 40))
    assert caplog.text.count("metrics.jsonl: was deleted; a new file begins with step 21") == 1


def test_reading_names_the_broken_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for bad in (b"[1]\n", b'{"loss": 1}\n', b'{"step": true}\n', b'{"step": 2}', b"\xff\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(b'{"step": 1}\n' + bad)
        with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a line of metrics"):
            list(read_metrics(path))


def test_lines_of_a_step_are_merged_and_numbers_that_are_not_finite_are_floats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = {"a": 1, "text": "x", "flag": True}, {"b": "NaN"}, {"eval/n": 1.0}
    write_lines(path, [{"step": 1} | row for row in rows])
    found = read_curves(path)
    assert list(found.steps[1]) == ["a", "b"]
    assert math.isnan(found.steps[1]["b"])
    assert found.evaluations == {1: {"n": 1.0}}


def test_damaged_lines_are_counted_and_a_line_in_the_making_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps({"step": 1, "a": 1}).encode()
    damaged, infinite = b'\xff\xfe{\n[1]\n{"step": -3}\n', b'{"step": 2, "a": 1' + b"0" * 400 + b"}\n"
    path.write_bytes(good + b"\n" + damaged + infinite + good[:5])
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
    assert POINTS / 2 < len(found.steps) <= POINTS + LAST_LINES + 5
    assert [min(found.steps), max(found.steps)] == [1, 20_000]
    assert list(found.evaluations) == [5000, 10_000, 15_000, 20_000]


def test_sampling_finds_what_reading_every_line_finds(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    lines = [line(step) for step in range(1, 50)]
    lines[20:20] = [{"step": 20, "eval/n": 0.5}]
    write_lines(path, lines)
    every = read_curves(path)
    monkeypatch.setattr(runlog_metrics, "SMALL_BYTES", 0)
    monkeypatch.setattr(runlog_metrics, "POINTS", 5000)
    sampled = read_curves(path)
    assert (sampled.steps, sampled.evaluations) == (every.steps, every.evaluations)


def test_a_file_that_is_cut_while_it_is_read(tmp_path, monkeypatch):
    """A run that resumes does this; read from a mapping, it would end the process."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(json.dumps({"step": n, "a": 1, "b": "x" * 1000}).encode() + b"\n" for n in range(3000)))
    parse = runlog_metrics.parse_line
    monkeypatch.setattr(runlog_metrics, "parse_line", lambda line: os.truncate(path, 5000) or parse(line))
    assert list(read_curves(path).steps)[:1] == [0]


def test_lines_of_a_forged_file_are_not_read_one_by_one(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n" * (SMALL_BYTES + 1))
    parsed = []
    monkeypatch.setattr(runlog_metrics, "parse_line", parsed.append)
    read_curves(path)
    assert len(parsed) <= POINTS + LAST_LINES


def test_a_line_of_any_length_costs_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(runlog_metrics, "MAX_LINE", 100)
    monkeypatch.setattr(runlog_metrics, "SMALL_BYTES", 0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1}\n' + b"x" * 10_000 + b"\n" + b'{"step": 2, "a": 1}\n')
    found = read_curves(path)
    assert (list(found.steps), found.damaged) == ([1, 2], 1)


NOTHING = HealthSettings(collapse=None, divergence=None, loss="loss", chance=1.0, codes={})


class NoData:
    def take_replaced(self):
        return []

    def take_lengths(self):
        return {}


def test_all_files_are_closed_whatever_happens_to_one(tmp_path, monkeypatch):
    records = Records(tmp_path, 0, NoData(), {}, Health(NOTHING), None)
    for file in (records.metrics, *records._files):
        file.write(1, {"a": 1})
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left on device: '.*jsonl'"):
        records.__exit__(None, None, None)
    held = {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink() and each.exists()}
    assert not {each for each in held if each.startswith(str(tmp_path))}


def test_a_resumed_run_judges_every_row_of_a_long_file(tmp_path):
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as log:
        for step in range(1, 2001):
            log.write(step, {"loss": 1.0, "note": "x" * 1200})
        log.write(2000, {"eval/n": 0.5})
    assert log.path.stat().st_size > SMALL_BYTES

    class Counting(Health):
        def add(self, step, figures):
            judged.append((step, dict(figures)))
            return []

    judged = []
    with Records(tmp_path, 2000, NoData(), {}, Counting(NOTHING), None):
        assert judged == [(step, {"loss": 1.0}) for step in range(1, 2001)]


def result(i2t, t2i):
    rates = {"i2t_r1": i2t, "i2t_r5": 0.9, "t2i_r1": t2i, "t2i_r5": 0.9}
    figures = {"continuous": rates, "quantized": rates, "codes_only": None}
    return Result("pairs", "retrieval", figures, dict.fromkeys(rates, 0.1), 9, None, 9, {"image": None, "text": None})


def test_each_evaluation_has_its_place():
    before = {2: result(0.1, 0.4).scalars(), 3: result(0.2, 0.3).scalars(), 4: {"another/quantized/top1": 1.0}}
    assert place_evaluation(result(0.2, 0.2), {}, None) == ""
    assert place_evaluation(result(0.2, 0.3), before, None) == "best after step 2"
    assert place_evaluation(result(0.3, 0.3), before, None) == "best so far"
    assert place_evaluation(result(0.2, 0.4), before, "eval/pairs/quantized/i2t_r1") == "best after step 3"
