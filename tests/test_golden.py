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
