from __future__ import annotations

import multiprocessing
import operator
import os
import pickle

from vqclip.data.lookup import Recent, locate


def test_an_index_is_in_the_last_interval_that_begins_before_it() -> None:
    assert [locate([0, 2, 2, 5], index) for index in range(5)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]


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
