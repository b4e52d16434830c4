"""Initial weights from a local file, read without running code and loaded strictly."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.io.tensors import nonfinite_names, tensor_differences


def load_checkpoint(model: nn.Module, path: Path, unused: Sequence[str] = (), key: str = "tower.checkpoint") -> None:
    """Load all weights in ``path`` into ``model``, which must have exactly these. Half precision becomes fp32.

    Args:
        model: the model to fill.
        path: a safetensors file (by its suffix) or a PyTorch file that contains only tensors: a state dict, or one
            under ``state_dict`` or ``model``.
        unused: modules that the file may contain and ``model`` does not have, such as a classifier.
        key: key path of ``path``, for errors.

    Raises:
        ConfigError: a file that is missing, damaged or contains more than tensors; missing or unexpected tensors, or
            tensors of the wrong shape or dtype.
    """
    expected = model.state_dict()
    state = {
        name: _widen_half(tensor, expected.get(name))
        for name, tensor in _read(path, key).items()
        if not name.startswith(tuple(f"{part}." for part in unused))
    }
    problems = tensor_differences(expected, state) or [
        f"{name}: contains NaN or infinity" for name in nonfinite_names(state)
    ]
    if problems:
        raise ConfigError(f"{key}: {path} does not fit the model: " + "; ".join(problems[:10]))
    model.load_state_dict(state, strict=True)


def _widen_half(tensor: Tensor, expected: Tensor | None) -> Tensor:
    """Convert half precision to fp32 if the shape fits: a small file can declare a huge tensor."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if half and expected is not None and expected.shape == tensor.shape else tensor


def require_plain_size(path: Path) -> None:
    """Check that a PyTorch file is not compressed, as torch's own files are not: unpacking could fill the memory.

    Raises:
        ValueError: its parts are larger than the file, or it is damaged.
        OSError: the file cannot be read.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as parts:
        claimed = sum(part.file_size for part in parts.infolist())
    if claimed > path.stat().st_size:
        raise ValueError(f"its parts claim to unpack to {claimed} bytes, from a file of {path.stat().st_size}")


def _read(path: Path, key: str) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        require_plain_size(path)
        stored: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: {path}: no such file") from error
    except Exception as error:  # torch and pickle raise many kinds of errors for damaged files
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{key}: {path} cannot be read: {type(error).__name__}: {reason}; expected a .safetensors file, "
            "or a PyTorch file that contains only tensors (torch.load with weights_only=True)"
        ) from error
    for name in ("state_dict", "model"):
        if isinstance(stored, dict) and isinstance(stored.get(name), dict):
            stored = stored[name]
    if not isinstance(stored, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in stored.items()
    ):
        raise ConfigError(f"{key}: {path}: got a {type(stored).__name__}, expected a state dict: tensors by name")
    return stored
