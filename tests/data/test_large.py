"""The promises for data of a billion samples, with an index that is made without the data."""

from __future__ import annotations

import pytest
from benchmarks.order import start, start_full


@pytest.mark.slow
@pytest.mark.parametrize("samples", [10**6, 1_300_000_000])
def test_memory_before_the_first_batch(samples, tmp_path):
    first, further = start(samples, tmp_path)
    assert first["after"]["pss"] - first["before"]["pss"] < 400
    assert further["after"]["pss"] - further["before"]["pss"] < 50
    assert first["samples"] == further["samples"]
    assert len(set(first["samples"])) == 64
    assert max(first["samples"]) < samples


@pytest.mark.slow
def test_the_full_order_takes_memory_for_each_sample(tmp_path, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    found = start_full(10**6, tmp_path)
    assert 60 < found["after"]["uss"] - found["before"]["uss"] < 120
