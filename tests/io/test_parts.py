"""Files that several processes write have the bytes of those that one writes, and what is mixed up is noticed."""

from __future__ import annotations

import math

import pytest
import torch

from vqclip.errors import CheckpointError
from vqclip.io import parts
from vqclip.io.parts import Part
from vqclip.io.tensors import map_tensors, save_tensors

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


def test_rows_that_another_process_has_overwritten_are_noticed(tmp_path):
    path = tmp_path / "parts"
    parts.create(path, split(0, 2))
    for number in range(2):
        parts.write(path, split(number, 2))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last row of booleans
    path.write_bytes(data)
    parts.require_equal(path, split(0, 2))
    with pytest.raises(CheckpointError, match="are not those that were written"):
        parts.require_equal(path, split(1, 2))


def test_a_file_of_other_tensors_is_not_written_to(tmp_path):
    path = tmp_path / "parts"
    parts.create(path, split(0, 2) | {"more": Part((2,), torch.float32, None)})
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="another header"):
        parts.write(path, split(0, 2))
    assert path.read_bytes() == before
    with pytest.raises(FileExistsError):
        parts.create(path, split(0, 2))
