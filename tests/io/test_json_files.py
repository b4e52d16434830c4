from __future__ import annotations

import pytest

from vqclip.errors import CheckpointError
from vqclip.io.json_files import add_checksum, describe_differences, read_versioned

VERSIONS = {"format": "thing", "format_version": 2}


def test_what_was_sealed_comes_back_without_its_versions(tmp_path):
    path = tmp_path / "thing.json"
    path.write_bytes(add_checksum({**VERSIONS, "number": 3}))
    assert read_versioned(path, VERSIONS, "make it anew") == {"number": 3}
    path.write_bytes(path.read_bytes().replace(b"3", b"4"))
    with pytest.raises(CheckpointError, match="does not match its own checksum"):
        read_versioned(path, VERSIONS, "make it anew")
    with pytest.raises(OSError, match="No such file"):
        read_versioned(tmp_path / "other.json", VERSIONS, "make it anew")


@pytest.mark.parametrize(("key", "value"), [("format", "other"), ("format", None), ("format_version", 3)])
def test_another_version_is_told_before_the_hash_is_compared(tmp_path, key, value):
    """A later version may hash otherwise."""
    path = tmp_path / "thing.json"
    path.write_bytes(add_checksum({**VERSIONS, key: value, "number": 3}).replace(b"3", b"3 "))
    with pytest.raises(
        CheckpointError, match=rf"{key} is {value!r}, this vqclip reads {VERSIONS[key]!r}; make it anew"
    ):
        read_versioned(path, VERSIONS, "make it anew")


def test_each_leaf_that_differs_has_a_line():
    before = {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    after = {"a": {"b": 2, "c": [1]}, "d": 3}
    assert describe_differences(before, after, "in the file") == {
        "a.b": "  a.b: 1 in the file, 2 now",
        "a.c[1]": "  a.c[1]: 2 in the file, absent now",
    }
    # a setting that is off may be absent
    assert describe_differences({"a": 1}, {"a": 1, "new": None, "section": {"old": None}}, "in the file") == {}
