"""Named tensors: whether they are finite, a checksum, and reading files of them safely."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vqclip.errors import CheckpointError
from vqclip.io.files import open_regular

MAX_HEADER_BYTES = 16 << 20
"""Longer headers are not parsed; ten thousand tensors need 1 MiB."""
_CHUNK = 1 << 16
_SHOWN = 5


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that contain NaN or infinity. Waits for each device once."""
    extremes: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():  # the extremes are NaN if any number is
            pair = torch.stack(torch.aminmax(tensor.detach())).double()
            extremes.setdefault(tensor.device, {})[name] = pair
    return [
        name
        for pairs in extremes.values()
        for name, finite in zip(pairs, torch.stack(list(pairs.values())).isfinite().all(1).tolist(), strict=True)
        if not finite
    ]


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A 64-bit checksum of the bytes of each tensor, which any flipped bit changes. Waits for each device once.

    It detects accidents, not forgeries. Takes half a megabyte of memory beside the largest tensor that is not
    contiguous.
    """
    sums: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        sums.setdefault(tensor.device, {})[name] = _checksum(tensor.detach())
    return {
        name: value
        for named in sums.values()
        for name, value in zip(named, torch.stack(list(named.values())).tolist(), strict=True)
    }


def _checksum(tensor: Tensor) -> Tensor:
    """Sum modulo 2^64 of the 8-byte words, each times an odd number of its own: no change of one word is lost."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    odd = _odd_numbers(data.device)
    total = odd.new_zeros(())
    for number, chunk in enumerate(data.split(8 * _CHUNK)):
        if len(chunk) % 8 or chunk.storage_offset() % 8:
            chunk = F.pad(chunk, (0, -len(chunk) % 8))
        words = chunk.view(torch.int64)
        total += (words * (odd[: len(words)] + 2 * _CHUNK * number)).sum()
    return total


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _CHUNK, 2, device=device)


def listed(names: Collection[str]) -> str:
    """The first names, and the number of the others."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(list(names)[:_SHOWN]) + more


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file, whose header is no larger than `MAX_HEADER_BYTES`.

    Raises:
        CheckpointError: it is missing or damaged, also where that shows while it is read.
    """
    try:
        with open_regular(path) as start:
            header = int.from_bytes(start.read(8), "little")
        if header > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: cannot be read, damaged or cut short: a header of {header} bytes; at most {MAX_HEADER_BYTES} "
                "are read"
            )
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read, damaged or cut short: {error}") from error


def shapes_in(file: Any, names: Collection[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in an open file, from its header alone; by default of all of them."""
    every = list(file.keys())
    return {name: tuple(file.get_slice(name).get_shape()) for name in every if names is None or name in names}


def misfits(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], prefix: str = "") -> list[str]:
    """Every way in which ``state`` is not what ``expected`` is: tensors that lack, are too many, or of another kind."""
    shapes, got = ({f"{prefix}{n}": tuple(t.shape) for n, t in tensors.items()} for tensors in (expected, state))
    return misshapen(shapes, got) + [
        f"{prefix}{name}: got dtype {state[name].dtype}, expected {want.dtype}"  # load_state_dict would round silently
        for name, want in expected.items()
        if name in state and state[name].dtype != want.dtype
    ]


def misshapen(expected: Mapping[str, tuple[int, ...]], got: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Differences between two sets of names and shapes, in words."""
    problems = [f"missing {name}" for name in expected if name not in got]
    problems += [f"unexpected {name}" for name in got if name not in expected]
    both = [(name, got[name], expected[name]) for name in expected if name in got]
    return problems + [f"{name}: got shape {is_}, expected {want}" for name, is_, want in both if is_ != want]
