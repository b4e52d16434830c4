from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tests.models import tiny_model
from vqclip.evaluation.encode import save_ids
from vqclip.evaluation.results import write_json
from vqclip.io.atomic import remove_leftovers, replace_folder, write_file, write_text
from vqclip.io.tensors import save_tensors
from vqclip.runlog.metrics import JsonLines
from vqclip.search import CodeIndex

KILLED = """
import os, sys
from pathlib import Path
from vqclip.io.atomic import replace_folder

rename, left, after = Path.rename, int(sys.argv[2]), sys.argv[3] == "after"

def killed(self, target):
    global left
    left -= 1
    if left == 0 and not after:
        os._exit(9)
    rename(self, target)
    if left == 0:
        os._exit(9)

Path.rename = killed
replace_folder(Path(sys.argv[1]), lambda aside: (aside / "content").write_text("new"))
"""


def writing(text: str):
    return lambda aside: (aside / "content").write_text(text)


def full(aside: Path) -> None:
    (aside / "half").write_text("x")
    raise OSError("No space left on device")


def fails(target: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        replace_folder(target, full)


def test_a_folder_is_made_whole_or_stays_as_it_was(tmp_path):
    target = tmp_path / "deep" / "tokenizer"
    fails(target)
    assert not target.exists()
    replace_folder(target, writing("old"))
    fails(target)
    assert (target / "content").read_text() == "old"
    replace_folder(target, writing("new"))
    assert (target / "content").read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["tokenizer"]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_rename_loses_nothing(tmp_path, number, moment):
    target = tmp_path / "tokenizer"
    replace_folder(target, writing("old"))
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), str(number), moment], timeout=60)
    assert done.returncode == 9
    fails(target)  # the next try may go wrong as well
    assert (target / "content").read_text() == ("new" if (number, moment) == (2, "after") else "old")
    replace_folder(target, writing("newest"))
    assert (target / "content").read_text() == "newest"
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_tensors_are_as_readable_as_any_other_file(tmp_path, mask):
    """safetensors' own files are for their owner alone: another user could read the configuration and no weights."""
    model = tiny_model().build()
    before = os.umask(mask)
    try:
        model.save_pretrained(tmp_path / "tokenizer")
        ids = torch.zeros(2, 4, 1, dtype=torch.int64)
        CodeIndex.build(model.image, ids).save(tmp_path / "index")
        save_ids(tmp_path / "ids.safetensors", ids, (64,))
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}


def disk_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space left on device: '.*target'"):
        replace_folder(tmp_path / "target", disk_full)
    with pytest.raises(OSError, match="No space left on device: '.*a.tar'"):
        write_file(tmp_path / "a.tar", disk_full)

    def refuse(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", refuse)
    with pytest.raises(OSError, match="a.safetensors: cannot be written: I/O error: No space"):
        save_tensors({}, tmp_path / "a.safetensors")


def test_a_full_disk_names_the_file_of_lines_and_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_full)
        for name, write in (("page.html", lambda path: write_text(path, "x")), ("r.json", lambda p: write_json(p, []))):
            with pytest.raises(OSError, match=f"No space left on device: '.*{name}'"):
                write(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    lines = JsonLines(tmp_path / "metrics.jsonl")
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="No space left on device: '.*metrics.jsonl'"):
        lines.write(1, {"a": 1})


def test_links_pipes_and_devices_are_written_through(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_text(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True)
    write_text(tmp_path / "pipe", "through")
    assert reader.communicate(timeout=30)[0] == "through"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*/full"):
        write_text(tmp_path / "full", "text")


def test_what_is_being_written_is_not_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process has opened and closed it once more, to hash it."""
    replace = os.replace

    def late(aside: Path, path: Path) -> None:
        remove_leftovers(tmp_path)
        replace(aside, path)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", late)
        write_file(tmp_path / "file", lambda file: file.write(b"all"))
    assert (tmp_path / "file").read_bytes() == b"all"
    (tmp_path / ".tmp-left-over").touch()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
