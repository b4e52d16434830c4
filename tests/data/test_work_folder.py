"""Items are made once by the processes of a folder, whatever ends them, and what is damaged is made again."""

import json
import os
import time

import pytest

from tests.ranks import start_process
from vqclip.data.work_folder import FolderLayout, WorkFolder
from vqclip.errors import ConfigError, DataError
from vqclip.io.atomic import write_file

LAYOUT = FolderLayout({"format": "made", "format_version": 1}, ".txt", "make", "OUT")


def open_folder(path, items=6, **settings):
    return WorkFolder(path, {"colour": "red", **settings}, items, LAYOUT)


def make(path, dies_at=None, pause=0.0):
    """Make all items of a folder; a process for tests."""
    folder = open_folder(path)
    for item in folder.claim(wait=True):
        if item == dies_at:
            (path / "dying").touch()
            time.sleep(60)
        time.sleep(pause)
        file = write_file(folder.file(item), f"{item} by {os.getpid()}".encode())
        folder.add_record(item, file, item)


def test_processes_share_items_and_take_over_those_of_a_killed_one(tmp_path):
    dying = start_process(make, tmp_path, 2)
    while not (tmp_path / "dying").exists():
        assert dying.is_alive()
        time.sleep(0.05)
    others = [start_process(make, tmp_path, None, 0.1) for _ in range(2)]
    time.sleep(0.5)
    assert open_folder(tmp_path).record(2) is None
    dying.kill()
    for process in (dying, *others):
        process.join(60)
    folder = open_folder(tmp_path)
    records = folder.records()
    assert [record.samples for record in records] == [*range(6)]
    makers = [folder.file(item).read_text().split()[-1] for item in range(6)]
    assert makers[2] != str(dying.pid)
    folder.finish(records, 0.0, "--tolerance")
    assert json.loads((tmp_path / "manifest.json").read_text())["samples"] == 15
    assert not [*(tmp_path / "claims").iterdir()]
    assert not list(folder.claim())


def test_machines_that_see_no_common_locks_take_items_in_other_orders(tmp_path):
    folder = open_folder(tmp_path, 99)
    (tmp_path / "claims" / "00098").write_text("process 1 on elsewhere\n")
    taken = list(folder.claim())
    assert sorted(taken) == [*range(99)]
    assert taken != sorted(taken)
    assert list(folder.claim()) == [*range(99)]
    (tmp_path / "claims" / "00000").mkdir()
    with pytest.raises(DataError, match=r"claims/00000: cannot be locked \(Is a directory\)"):
        list(folder.claim())


@pytest.mark.parametrize("damage", ["short", "flipped", "decayed", "missing", "record", "moved"])
def test_what_is_damaged_is_made_again(tmp_path, damage):
    folder = open_folder(tmp_path)
    for item in folder.claim():
        bad = [{"sample_id": 7, "kind": "no image", "reason": "why"}]
        folder.add_record(item, write_file(folder.file(item), b"abc"), 1, bad, more=[1])
    record = folder.record(1, verify=True)
    assert record.bad[0].sample_id == 7
    assert record.facts == {"more": [1]}
    file, path = folder.file(1), tmp_path / "records" / "00001.json"
    before, other = path.stat().st_mtime_ns, path.with_name("00002.json").read_bytes()
    changes = {"record": path.read_bytes()[:-9], "moved": other, "short": b"ab"}
    changed = path if damage in ("record", "moved") else file
    changed.write_bytes(changes.get(damage, b"abd"))
    os.utime(file, ns=(before, before + (damage == "flipped")))
    if damage == "missing":
        file.unlink()
    assert (folder.record(1) is None) == (damage != "decayed")  # only reading the file finds it
    assert folder.record(1, verify=True) is None
    assert list(folder.claim()) == [1]
    assert folder.records() is None


def test_damaged_settings_cost_only_a_folder_of_the_cache(tmp_path):
    for in_cache in (False, True):
        make(tmp_path / "folder")
        (tmp_path / "folder" / "settings.json").write_text("{")
        assert WorkFolder.existing(tmp_path / "folder", LAYOUT, in_cache) is None
        assert (tmp_path / "folder" / "00003.txt").exists() is not in_cache
        (tmp_path / "folder" / "settings.json").unlink(missing_ok=True)
        assert WorkFolder.existing(tmp_path / "folder", LAYOUT) is None
        for path in (tmp_path / "folder").rglob("*.*"):
            path.unlink()


def test_a_folder_of_other_files_is_left_as_it_is(tmp_path):
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(ConfigError, match=r"has no settings\.json, but contains photo\.jpg; expected an empty folder"):
        open_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]
