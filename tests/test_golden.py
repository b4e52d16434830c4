"""Small runs see, lose and export what is recorded in tests/golden.json; see `tests.golden`."""

import json

import pytest

from tests import golden
from tests.ranks import RankPool

RECORDED = json.loads(golden.RECORD.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with golden.prepared(tmp_path_factory.mktemp("golden")) as runs:
        yield runs


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED["runs"])
def test_a_run_repeats_its_record(ranks: RankPool, runs: dict[str, golden.Golden], tmp_path, name: str):
    exact = RECORDED["machine"] == golden.this_machine()
    assert golden.differences(RECORDED["runs"][name], golden.run_golden(ranks, runs[name], tmp_path), exact) == []


def test_differences_name_the_first_step():
    entry = RECORDED["runs"]["fsq"]
    other = json.loads(json.dumps(entry))
    assert golden.differences(entry, other, True) == []
    other["loss"][7] = (float.fromhex(other["loss"][7]) * (1 + 1e-9)).hex()
    (line,) = golden.differences(entry, other, True)
    assert line.startswith("loss of step 7: ")
    assert golden.differences(entry, other, False) == []
    other["loss"][8] = (float.fromhex(other["loss"][8]) * 1.1).hex()
    other["samples"][4] = "0" * 12
    other["exported"]["text"]["shape"] = [4, 12, 2]
    assert [line.partition(":")[0] for line in golden.differences(entry, other, False)] == [
        "samples of step 4",
        "loss of step 8",
        "exported text tokenizer",
    ]
