"""First weights from a local file: read without running what it holds, loaded strictly."""

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


def load_checkpoint(model: nn.Module, path: Path, unused: Sequence[str] = ()) -> None:
    """Load the weights in ``path`` into ``model``: every one, and no other. Half precision is widened to fp32.

    Args:
        model: what is filled.
        path: a safetensors file (by its ending) or a PyTorch file of tensors alone: a state dict, or one under
            ``state_dict`` or ``model``.
        unused: modules that the file may hold and ``model`` does not have, such as a classifier.

    Raises:
        ConfigError: for a file that is missing, damaged or holds more than tensors, and for missing, unexpected or
            wrongly shaped or typed tensors.
    """
    expected = model.state_dict()
    state = {
        name: _widen_half(tensor, expected.get(name))
        for name, tensor in _read(path).items()
        if not name.startswith(tuple(f"{part}." for part in unused))
    }
    problems = tensor_differences(expected, state) or [
        f"{name}: contains NaN or infinity" for name in nonfinite_names(state)
    ]
    if problems:
        raise ConfigError(f"tower.checkpoint: {path} does not fit the model: " + "; ".join(problems[:10]))
    model.load_state_dict(state, strict=True)


def _widen_half(tensor: Tensor, expected: Tensor | None) -> Tensor:
    """Half precision as fp32, where the shape fits: a few bytes may claim to be any number of elements."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if half and expected is not None and expected.shape == tensor.shape else tensor


def require_plain_size(path: Path) -> None:
    """Refuse a PyTorch file whose parts, unpacked, are larger than the file: torch itself packs nothing.

    Raises:
        ValueError: it is such a file, or a damaged one.
        OSError: it cannot be read.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as parts:
        claimed = sum(part.file_size for part in parts.infolist())
    if claimed > path.stat().st_size:
        raise ValueError(f"its parts claim to unpack to {claimed} bytes, from a file of {path.stat().st_size}")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        require_plain_size(path)
        stored: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"tower.checkpoint: {path}: no such file") from error
    except Exception as error:  # a damaged file makes torch and pickle raise nearly anything
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"tower.checkpoint: {path} cannot be read: {type(error).__name__}: {reason}; expected a .safetensors file, "
            "or a PyTorch file that holds tensors alone (torch.load with weights_only=True)"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(stored, dict) and isinstance(stored.get(key), dict):
            stored = stored[key]
    if not isinstance(stored, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in stored.items()
    ):
        raise ConfigError(
            f"tower.checkpoint: {path}: got a {type(stored).__name__} that is no state dict; expected tensors by name"
        )
    return stored
