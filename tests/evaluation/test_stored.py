from __future__ import annotations

import dataclasses
import json
import os

import pytest

from tests.evaluation.made import PlainModel
from tests.evaluation.test_details import SMALL, number_captions
from vqclip.errors import CheckpointError
from vqclip.evaluation import evaluate, read_evaluation, stored_files, write_evaluations


@pytest.fixture
def result(tmp_path):
    task = number_captions(tmp_path / "data", [["no 0"], ["no 1", "number 3"], ["number 0"], ["no 3"]])
    return evaluate(PlainModel(4), [task], details=SMALL)[0]


def test_what_is_written_is_read_again_with_its_step(tmp_path, result):
    other = dataclasses.replace(result, name="../../etc/<script>", details=None)
    paths = write_evaluations(tmp_path / "run", 30, [result, other])
    assert paths == stored_files(tmp_path / "run")
    assert {path.parent for path in paths} == {tmp_path / "run" / "report"}
    found = [read_evaluation(path) for path in paths]
    assert [(each.step, each.result) for each in found] == [(30, result), (30, other)]


def test_only_the_newest_evaluation_stays(tmp_path, result):
    write_evaluations(tmp_path, 1, [result, dataclasses.replace(result, name="another")])
    (tmp_path / "report" / "notes.txt").write_text("of the user")
    (path,) = write_evaluations(tmp_path, 2, [result])
    assert stored_files(tmp_path) == [path]
    assert read_evaluation(path).step == 2
    assert (tmp_path / "report" / "notes.txt").exists()


def test_a_write_that_is_interrupted_leaves_the_former_file(tmp_path, result, monkeypatch):
    (path,) = write_evaluations(tmp_path, 1, [result])

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_evaluations(tmp_path, 2, [result])
    assert read_evaluation(path).step == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(colour=1), "colour"),
        (lambda body: body["result"]["usage"]["image"].update(colour=1), "colour"),
        (lambda body: body["result"].update(samples="many"), "samples"),
        (lambda body: body["result"]["chance"].update(i2t_r1=float("nan")), "finite"),
        (lambda body: body.update(step=-1), "step"),
    ],
)
def test_a_damaged_file_is_a_clear_error(tmp_path, result, change, message):
    (path,) = write_evaluations(tmp_path, 1, [result])
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=message) as error:
        read_evaluation(path)
    assert str(path) in str(error.value)


def test_a_cut_file_and_a_large_one_are_clear_errors(tmp_path, result):
    (path,) = write_evaluations(tmp_path, 1, [result])
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckpointError, match="EOF"):
        read_evaluation(path)
    path.write_bytes(b" " * (17 << 20))
    with pytest.raises(CheckpointError, match="more than"):
        read_evaluation(path)


def test_credentials_are_masked(tmp_path, result):
    note = "https://cdn.example/a.tar?X-Amz-Signature=topsecret is slow"
    (path,) = write_evaluations(tmp_path, 1, [dataclasses.replace(result, notes=[note])])
    assert "topsecret" not in path.read_text()
