import errno
import math
import os
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError

from tests.models import tiny_model
from vqclip.errors import CheckpointError, ConfigError
from vqclip.evaluation.encode import save_ids
from vqclip.evaluation.results import write_json
from vqclip.io import parts
from vqclip.io.atomic import remove_leftovers, replace_folder, write_file, write_text
from vqclip.io.files import cache_folder
from vqclip.io.json_files import add_checksum, read_versioned
from vqclip.io.parts import Part
from vqclip.io.tensors import checksums, map_tensors, save_tensors
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


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_rename_loses_nothing(tmp_path, number, moment):
    target = tmp_path / "tokenizer"
    replace_folder(target, writing("old"))
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), str(number), moment], timeout=60)
    assert done.returncode == 9
    with pytest.raises(OSError, match="No space left"):  # the next try may go wrong as well
        replace_folder(target, full)
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


def test_what_a_system_refuses_and_nobody_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("vqclip.io.files.sync", refuse)  # of a folder that cannot be listed
    write_file(tmp_path / "a", b"")
    monkeypatch.setattr(Path, "chmod", refuse)
    save_tensors({}, tmp_path / "b")
    monkeypatch.delenv("VQCLIP_CACHE", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", mock.Mock(side_effect=KeyError))
    with pytest.raises(ConfigError, match="set VQCLIP_CACHE or HOME"):
        cache_folder()


def disk_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_full)
        with pytest.raises(OSError, match="No space left on device: '.*r.json'"):
            write_json(tmp_path / "r.json", [])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No space left on device: '.*target'"):
        replace_folder(tmp_path / "target", disk_full)
    with pytest.raises(OSError, match="No space left on device: '.*a.tar'"):
        write_file(tmp_path / "a.tar", disk_full)

    def refuse(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", refuse)
    with pytest.raises(OSError, match="a.safetensors: cannot be written: I/O error: No space"):
        save_tensors({}, tmp_path / "a.safetensors")
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


def test_a_link_to_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    for text in ("old", "new", "newest"):
        replace_folder(tmp_path / "link", writing(text))
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "disk" / "real" / "content").read_text() == text
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []


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


VERSIONS = {"format": "thing", "format_version": 2}


@pytest.mark.parametrize(("key", "value"), [("format", None), ("format_version", 3)])
def test_another_version_is_told_before_the_hash_is_compared(tmp_path, key, value):
    """A later version may hash otherwise."""
    path = tmp_path / "thing.json"
    path.write_bytes(add_checksum({**VERSIONS, key: value, "number": 3}).replace(b"3", b"3 "))
    with pytest.raises(CheckpointError, match=rf"{key} is {value!r}, this vqclip reads {VERSIONS[key]!r}; make anew"):
        read_versioned(path, VERSIONS, "make anew")


@pytest.mark.parametrize("dtype", [torch.float32, torch.half, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("length", [1, 3, 17])
def test_every_flipped_bit_changes_the_checksum(dtype, length):
    wide = torch.arange(length + 1).to(dtype)
    for tensor in (wide[1:], torch.stack([wide, wide])[:, 0]):  # misaligned; not contiguous
        plain = tensor.contiguous().clone()
        before = checksums({"a": tensor})
        assert before == checksums({"a": plain})
        data = plain.view(torch.uint8)
        for place in range(len(data) * 8 if dtype != torch.bool else 0):
            data[place // 8] ^= 1 << place % 8
            assert checksums({"a": plain}) != before
            data[place // 8] ^= 1 << place % 8


def test_a_change_far_into_a_large_tensor_is_seen():
    tensor = torch.zeros(300_000)
    before = checksums({"a": tensor, "empty": torch.zeros(0), "number": torch.tensor(1.0)})
    tensor[299_999] = 1e-45
    after = checksums({"a": tensor, "empty": torch.zeros(0), "number": torch.tensor(1.0)})
    assert [before[name] == after[name] for name in before] == [False, True, True]


# ---- Files that several processes write have the bytes of those that one writes, and what is mixed up is noticed.


TENSORS = {
    "wide": torch.arange(7 * 3, dtype=torch.float32).view(7, 3) / 3,
    "one row": torch.ones(1, 5, dtype=torch.float64),
    "é/half": torch.arange(5).to(torch.bfloat16),
    "none": torch.empty(0, 3),
    "step": torch.tensor(4.0),
    "flag": torch.tensor([True, False, True]),
    **{str(dtype): torch.ones(3, dtype=dtype) for dtype in parts._CODES},
}


def split(number, processes):
    """Rows as `torch.chunk` cuts them; what has no axis belongs to the first process."""
    found = {}
    for name, tensor in TENSORS.items():
        shape = tuple(tensor.shape)
        if not shape:
            found[name] = Part(shape, tensor.dtype, tensor if number == 0 else None)
            continue
        each = math.ceil(shape[0] / processes)
        found[name] = Part(shape, tensor.dtype, tensor[each * number : each * (number + 1)], each * number)
    return found


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
def test_files_have_the_bytes_of_one_process(tmp_path, monkeypatch, processes):
    monkeypatch.setattr(parts, "_CHUNK", 16)
    path, expected = tmp_path / "parts", tmp_path / "whole"
    save_tensors(dict(TENSORS), expected)
    parts.create(path, split(0, processes))
    for number in reversed(range(processes)):
        parts.write(path, split(number, processes))
    assert path.read_bytes() == expected.read_bytes()
    for number in range(processes):
        parts.require_equal(path, split(number, processes))
    assert all(torch.equal(each, TENSORS[name]) for name, each in map_tensors(path).items())


def test_a_file_of_other_tensors_is_not_written_to(tmp_path):
    path = tmp_path / "parts"
    parts.create(path, split(0, 2) | {"more": Part((2,), torch.float32, None)})
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="another header"):
        parts.write(path, split(0, 2))
    assert path.read_bytes() == before
    with pytest.raises(FileExistsError):
        parts.create(path, split(0, 2))
