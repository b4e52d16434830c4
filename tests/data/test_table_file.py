import multiprocessing
import operator
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from vqclip.data.lookup import Recent
from vqclip.data.table_file import Table, Texts, find_table, open_table, save_table
from vqclip.errors import DataError

FACTS = {"version": 1, "notes": ["a"]}
ARRAYS = {
    "begins": np.arange(5, dtype=np.uint32),
    "digests": np.arange(48, dtype=np.uint8).reshape(3, 16)[::-1],
    "none": np.zeros((0, 4), np.int64),
    **Texts.join(["é", "", "caf\udce9"])._asdict(),
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.table"
    save_table(path, FACTS, ARRAYS, "x")
    table = open_table(path, {"version": 1})
    assert table.facts == FACTS
    assert table.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(table.arrays[name], array)
        assert table.arrays[name].dtype == array.dtype
    texts = Texts(table.arrays["content"], table.arrays["ends"])
    assert texts.are_consistent
    assert [texts.read(number) for number in range(3)] == ["é", "", "caf\udce9"]
    with pytest.raises(ValueError, match="read-only"):
        table.arrays["begins"][0] = 1
    before = path.read_bytes()
    save_table(path, FACTS, ARRAYS, "x")
    assert path.read_bytes() == before
    assert find_table(path, {"version": 2}, "x") is None
    with pytest.raises(DataError, match="version is 1; expected 2"):
        open_table(path, {"version": 2})


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.table"
    save_table(path, FACTS, ARRAYS, "x")
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(DataError):
            open_table(path, {})
    for size in (0, 7, 100, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(DataError):
            open_table(path, {})
    assert find_table(path, {}, "the data") is None
    assert "damaged index of the data is made again" in caplog.text
    path.write_bytes(data)
    assert isinstance(find_table(path, {}, "x"), Table)
    assert find_table(tmp_path / "missing", {}, "x") is None


# ---- what is looked up and kept


def test_the_values_used_last_are_kept() -> None:
    made: list[str] = []
    closed: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key * 2

    kept = Recent[str, str](6, size=len, close=closed.append)
    for key in ("a", "b", "a", "c", "d", "a", "b"):
        assert kept.get(key, make) == key * 2
    assert (made, closed, len(kept)) == (["a", "b", "c", "d", "b"], ["bb", "cc"], 3)
    assert kept.get("long", make) == "longlong"  # larger than the limit, and alone
    assert len(kept) == 1


def test_other_processes_make_their_own() -> None:
    kept = Recent[int, str](2, size=operator.methodcaller("__len__"))
    kept.get(1, str)
    assert len(pickle.loads(pickle.dumps(kept))) == 0

    def make_another() -> None:
        kept.get(2, str)
        os._exit(len(kept))

    process = multiprocessing.get_context("fork").Process(target=make_another)
    process.start()
    process.join(60)
    assert process.exitcode == 1
