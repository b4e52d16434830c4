"""A safetensors file that several processes write at once, each its own rows of the tensors.

    one process      create(path, parts)       header and full size
    every process    write(path, parts)        its rows at their places, synced to the disk
    every process    require_equal(path, parts)  the rows in the file against those in memory

The bytes are those of the file that `vqclip.io.tensors.save_tensors` writes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vqclip.errors import CheckpointError
from vqclip.io.files import open_regular

_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Names of types in the format; a file contains the last ones first."""
_CHUNK = 16 << 20


class Part(NamedTuple):
    """Rows of a tensor that this process writes."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    rows: Tensor | None
    """Contiguous, on the CPU; the whole tensor if it has no axis; None if another process writes them all."""
    first: int = 0
    """Number of the first row."""


def create(path: Path, parts: Mapping[str, Part]) -> None:
    """Make the file with its header and full size; `rows` are not written.

    Args:
        path: of the file, which does not exist.
        parts: every tensor by name.

    Raises:
        OSError: the file exists, or the disk is full.
    """
    header, _, size = _layout(parts)
    with open(path, "xb") as file:
        file.write(header)
        file.truncate(size)


def write(path: Path, parts: Mapping[str, Part]) -> None:
    """Write the rows of this process, and wait until they are on the disk.

    Args:
        path: of a file that a process has made with `create`.
        parts: every tensor by name, with the shapes and types given to `create`.

    Raises:
        CheckpointError: the file has another header.
        OSError: the file is missing, or the disk is full.
    """
    header, starts, _ = _layout(parts)
    with open_regular(path) as file:
        if file.read(len(header)) != header:
            raise CheckpointError(f"{path}: has another header than this process expects")
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # not for reading: no page of other rows is cached
    try:
        for offset, data in _chunks(parts, starts):
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], offset + done)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_equal(path: Path, parts: Mapping[str, Part]) -> None:
    """Compare the rows of this process in the file with those in memory, after all processes have written.

    Raises:
        CheckpointError: a byte differs: the file system mixes up what several processes write to one file.
        OSError: the file cannot be read.
    """
    _, starts, _ = _layout(parts)
    with open_regular(path) as file:
        for offset, data in _chunks(parts, starts):
            if os.pread(file.fileno(), len(data), offset) != data:
                raise CheckpointError(
                    f"{path}: bytes from {offset} on are not those that were written; the disk is damaged, or the file "
                    "system mixes up what several processes write to one file. Expected a run.folder on a local disk "
                    "or a shared file system that can, or one that rank 0 alone sees"
                )


def _layout(parts: Mapping[str, Part]) -> tuple[bytes, dict[str, int], int]:
    """Return the header, the place of each tensor, and the size of the file."""
    rank = {dtype: -number for number, dtype in enumerate(_CODES)}
    entries, starts, end = {}, dict[str, int](), 0
    for name in sorted(parts, key=lambda name: (rank[parts[name].dtype], name)):
        part = parts[name]
        starts[name], end = end, end + math.prod(part.shape) * part.dtype.itemsize
        entries[name] = {"dtype": _CODES[part.dtype], "shape": list(part.shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end


def _chunks(parts: Mapping[str, Part], starts: Mapping[str, int]) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of this process with their places in the file."""
    for name, part in parts.items():
        if part.rows is None or part.rows.numel() == 0:
            continue
        row = math.prod(part.shape[1:]) * part.dtype.itemsize
        data = part.rows.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(data), _CHUNK):
            yield starts[name] + part.first * row + begin, data[begin : begin + _CHUNK]
