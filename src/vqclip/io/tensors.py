"""Named tensors: checks, checksums, and reading and writing safetensors files safely."""

from __future__ import annotations

import functools
import hashlib
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vqclip.errors import CheckpointError, encodable
from vqclip.io.atomic import FileDigest, verify_open_file
from vqclip.io.files import open_regular

MAX_HEADER_BYTES = 16 << 20
"""Longer headers are not parsed; ten thousand tensors need 1 MiB."""
_CHUNK = 1 << 16
_SHOWN = 5


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that contain NaN or infinity. Waits for each device once."""
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
    """Return a 64-bit checksum of the bytes of each tensor, which any flipped bit changes. Waits for each device once.

    It detects accidents, not forgeries. It needs half a megabyte, and a copy of the largest tensor that is not
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
    """Sum the 8-byte words modulo 2^64, each times a different odd number: any change of one word shows."""
    odd = _odd_numbers(tensor.device)
    total = odd.new_zeros(())
    if not tensor.numel():  # it may have a stride of 0, which no view of other types has
        return total
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    for number, chunk in enumerate(data.split(8 * _CHUNK)):
        if len(chunk) % 8 or chunk.storage_offset() % 8:
            chunk = F.pad(chunk, (0, -len(chunk) % 8))
        words = chunk.view(torch.int64)
        total += (words * (odd[: len(words)] + 2 * _CHUNK * number)).sum()
    return total


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _CHUNK, 2, device=device)


def add_tensors(digest: hashlib._Hash, tensors: Mapping[str, Tensor]) -> None:
    """Add names, types, shapes and bytes of tensors to a SHA-256, in the order of their names."""
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"\n{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)


def module_digest(module: nn.Module, described: str = "") -> str:
    """Return the SHA-256 of all tensors of a module, and of what else determines its outputs, in words."""
    digest = hashlib.sha256(described.encode())
    add_tensors(digest, {**dict(module.named_parameters()), **dict(module.named_buffers())})
    return digest.hexdigest()


def first_names(names: Collection[str], shown: int = _SHOWN) -> str:
    """Return the first names, and the number of the others, as text."""
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(list(names)[:shown]) + more


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the usual permissions; the library makes it readable for its owner alone."""
    path.touch()  # umask and the folder's default access list decide the permissions
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        if encodable(str(path)) == str(path):
            safetensors.torch.save_file(tensors, path, metadata=metadata)
        else:  # a path that the library does not take
            path.write_bytes(safetensors.torch.save(tensors, metadata))
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{path}: cannot be written: {error}") from error
    with suppress(OSError):  # a file system without permissions
        path.chmod(mode)


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file, whose header has at most `MAX_HEADER_BYTES`.

    Raises:
        CheckpointError: it is missing or damaged, whether that shows now or when tensors are read.
    """
    with name_tensor_errors(path), open_verified(path) as file:
        yield file


def open_verified(path: Path, expected: FileDigest | None = None, source: str = "") -> Any:
    """Open a safetensors file once: the bytes that are compared with a digest are those that are read afterwards.

    Args:
        path: the file.
        expected: its digest; None if it was compared before.
        source: name of the file that contains the digest.

    Returns:
        The open file, which is closed when it is no longer used.

    Raises:
        CheckpointError: it is missing or damaged, or its header has more than `MAX_HEADER_BYTES`.
    """
    with name_tensor_errors(path), open_regular(path) as start:
        if expected is not None:
            verify_open_file(start, path, expected, source)
            start.seek(0)
        header = int.from_bytes(start.read(8), "little")
        if header > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: cannot be read, damaged or cut short: a header of {header} bytes; at most "
                f"{MAX_HEADER_BYTES} are read"
            )
        return safe_open(f"/dev/fd/{start.fileno()}", framework="pt")  # what is open here, whatever has this path now


@contextmanager
def name_tensor_errors(path: Path) -> Iterator[None]:
    """Turn errors of opening or reading a safetensors file into `CheckpointError`s with its path."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read, damaged or cut short: {error}") from error


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped from it: the parts that are not used take no memory.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def read_shapes(file: Any, names: Collection[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of some or all tensors in an open file, from its header alone."""
    every = list(file.keys())
    return {name: tuple(file.get_slice(name).get_shape()) for name in every if names is None or name in names}


def tensor_differences(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], prefix: str = "") -> list[str]:
    """Return a line for each missing or unexpected tensor in ``state``, and each of another shape or dtype."""
    shapes, got = ({f"{prefix}{n}": tuple(t.shape) for n, t in tensors.items()} for tensors in (expected, state))
    return shape_differences(shapes, got) + [
        f"{prefix}{name}: got dtype {state[name].dtype}, expected {want.dtype}"  # load_state_dict would round silently
        for name, want in expected.items()
        if name in state and state[name].dtype != want.dtype
    ]


def shape_differences(expected: Mapping[str, tuple[int, ...]], got: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a line for each missing or unexpected name, and each shape that differs."""
    problems = [f"missing {name}" for name in expected if name not in got]
    problems += [f"unexpected {name}" for name in got if name not in expected]
    both = [(name, got[name], expected[name]) for name in expected if name in got]
    return problems + [f"{name}: got shape {is_}, expected {want}" for name, is_, want in both if is_ != want]
