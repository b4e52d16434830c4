"""Write tokenizer folders; `vqclip.tokenizer.folder` reads them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from vqclip.errors import ConfigError, NonFiniteError
from vqclip.io.atomic import FileDigest, digest_file, replace_folder, restore_folder
from vqclip.io.files import expand_home
from vqclip.io.json_files import add_checksum, read_json
from vqclip.io.tensors import first_names, nonfinite_names, save_tensors
from vqclip.pixels.decoder import PIXELS_FILE
from vqclip.tokenizer.folder import (
    CONFIG_FILE,
    EXTRA_FILES,
    FILES,
    MODALITIES,
    MODEL_TYPES,
    PIXELS_PREFIX,
    PROCESSOR_FILE,
    VERSIONS,
    WEIGHTS_FILE,
)

PROCESSOR_CLASS = "VqclipImageProcessor"
"""Class of `vqclip.integrations.transformers` that reads the images of a folder."""
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
"""No further files, as for towers of timm and open_clip."""


def save_folder(
    folder: str | Path, config: dict[str, Any], state: dict[str, Tensor], files: Mapping[str, bytes] = NO_FILES
) -> None:
    """Write a tokenizer folder atomically. An existing tokenizer is replaced, together with its card.

    Raises:
        ConfigError: something would be lost: a tokenizer of another modality, another model, or other files.
        CheckpointError: the existing configuration is damaged.
    """
    target = expand_home(folder).resolve()  # renaming a link would leave what it points to
    restore_folder(target)
    if target.exists() and not (target / CONFIG_FILE).exists():  # the configuration is written last
        _write_folder(target, config, state, files)
        return
    if target.exists():
        _require_nothing_lost(target, config)
    replace_folder(target, lambda temporary: _write_folder(temporary, config, state, files))


def _write_folder(folder: Path, config: dict[str, Any], state: dict[str, Tensor], files: Mapping[str, bytes]) -> None:
    write_tokenizer_files(folder, config, state, files)
    if "image" in config:
        (folder / PROCESSOR_FILE).write_text(json.dumps({"image_processor_type": PROCESSOR_CLASS}))


def _require_nothing_lost(folder: Path, config: dict[str, Any]) -> None:
    """Check that ``folder`` contains only a tokenizer that ``config`` may replace; raise ConfigError otherwise."""
    stored, _ = read_json(folder / CONFIG_FILE)
    if stored.get("format") != VERSIONS["format"]:
        raise ConfigError(f"{folder}: contains another model's {CONFIG_FILE}, which would be lost; name another folder")
    if others := [name for name in MODALITIES if stored.get(name) is not None and name not in config]:
        raise ConfigError(
            f"{folder}: contains a tokenizer of modality {others[0]!r}, which would be lost; name another folder, or "
            "save both into one with vqclip.model.CLIP.save_pretrained"
        )
    if stored.get("pixels") is not None and "pixels" not in config:
        raise ConfigError(f"{folder}: contains a pixel decoder, which would be lost; name another folder")
    if foreign := sorted(path.name for path in folder.iterdir() if path.name not in FILES):
        raise ConfigError(
            f"{folder}: contains {', '.join(foreign[:5])} beside a tokenizer, which would be lost; name another folder"
        )
    if Path.cwd().is_relative_to(folder):
        raise ConfigError(f"{folder}: is the working folder, which cannot be replaced; name another folder")


def write_tokenizer_files(
    folder: Path, config: dict[str, Any], state: dict[str, Tensor] | None, files: Mapping[str, bytes] = NO_FILES
) -> None:
    """Write ``config`` (JSON-able), ``state`` and ``files`` to ``folder``, which is made if missing; not atomic.

    The weights of a pixel decoder, for which ``config`` has a section ``pixels``, are written to a file of their own.
    Without ``state``, the weights are in the folder already.

    Raises:
        NonFiniteError: a tensor contains NaN or infinity, and nothing is written.
    """
    if state is not None:
        _require_finite(folder, state)
        decoder = {name: tensor for name, tensor in state.items() if name.startswith(PIXELS_PREFIX)}
        assert bool(decoder) == ("pixels" in config)
        _write_tensors(folder / WEIGHTS_FILE, {name: tensor for name, tensor in state.items() if name not in decoder})
        if decoder:
            _write_tensors(folder / PIXELS_FILE, decoder)
    if "pixels" in config:
        digest = digest_file(folder / PIXELS_FILE)
        config = config | {"pixels": config["pixels"] | {"weights": digest.model_dump()}}
    for name, content in files.items():
        assert name in EXTRA_FILES, name
        (folder / name).write_bytes(content)
    write_config(folder, config, tuple(files))


def write_weights(folder: Path, state: dict[str, Tensor]) -> FileDigest:
    """Write ``state`` to ``folder``, which is made if missing, and return the digest of the file; not atomic.

    Raises:
        NonFiniteError: a tensor contains NaN or infinity, and nothing is written.
    """
    _require_finite(folder, state)
    return _write_tensors(folder / WEIGHTS_FILE, state)


def _require_finite(folder: Path, state: dict[str, Tensor]) -> None:
    if bad := nonfinite_names(state):
        raise NonFiniteError(f"{folder}: not written, as these tensors contain NaN or infinity: {first_names(bad)}")


def _write_tensors(path: Path, state: dict[str, Tensor]) -> FileDigest:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(_make_storable(state), path)
    return digest_file(path)


def _make_storable(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU, with copies of tied ones."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        plain = tensor.detach().cpu().contiguous()
        memory = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone() if memory in seen else plain
        seen.add(memory)
    return stored


def write_config(folder: Path, config: dict[str, Any], files: Collection[str] = ()) -> None:
    """Write ``config.json`` with the digests of the weights and the further files in ``folder``, and its checksum."""
    weights = digest_file(folder / WEIGHTS_FILE).model_dump()
    digests = {name: digest_file(folder / name).model_dump() for name in files}
    extra: dict[str, Any] = {"files": digests} if digests else {}
    if modalities := tuple(name for name in MODALITIES if name in config):
        extra["model_type"] = MODEL_TYPES[modalities]
    (folder / CONFIG_FILE).write_bytes(add_checksum({**VERSIONS, "weights": weights, **extra, **config}))
