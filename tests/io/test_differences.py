from __future__ import annotations

from vqclip.io.json_files import describe_differences


def test_each_leaf_that_differs_has_a_line():
    before = {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    after = {"a": {"b": 2, "c": [1]}, "d": 3}
    assert describe_differences(before, after, "in the file") == {
        "a.b": "  a.b: 1 in the file, 2 now",
        "a.c[1]": "  a.c[1]: 2 in the file, absent now",
    }


def test_a_setting_that_is_off_may_be_absent():
    assert describe_differences({"a": 1}, {"a": 1, "new": None, "section": {"old": None}}, "in the file") == {}
