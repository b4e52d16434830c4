"""Tensors of a model as they are stored, and the fingerprint of a tokenizer, which is equal before and after.

A run stores them in parts: frozen towers once for the whole run, adapters beside their matrices.

    runs/base/frozen/model.safetensors               tensors that never change in the run
    runs/base/checkpoints/step-.../model/config.json   ``frozen``: digest of that file; ``adapters``: their factors
                                        model.safetensors   all other tensors

An exported folder contains everything in one file, with adapters merged into the matrices that they change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vqclip.errors import CheckpointError
from vqclip.io.atomic import FileDigest
from vqclip.io.tensors import add_tensors, first_names, name_tensor_errors, open_verified

if TYPE_CHECKING:
    from vqclip.tokenizer.decoder import TokenizerDecoder

FROZEN_FOLDER = "frozen"
"""Folder in that of a run."""
_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
"""Parts of names that `peft` gives to an adapted layer's own tensors and to the two matrices of its adapter."""


def frozen_file(model_folder: Path, weights: str) -> Path:
    """Return the path of the frozen tensors of the run that contains a checkpoint's ``model_folder``."""
    return model_folder.absolute().parent.parent.parent / FROZEN_FOLDER / weights


def open_frozen(path: Path, digest: FileDigest, source: Path) -> Any:
    """Open the frozen tensors of a run, and compare every byte with the digest in ``source``; see `open_verified`.

    Raises:
        CheckpointError: the file is missing, damaged, or that of another run.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; {source} needs it: a run stores the weights of frozen towers there once for all "
            "its checkpoints. Restore it, or move the checkpoint back into its run's folder; vqclip export-tokenizer "
            "writes folders that need no other"
        )
    try:
        return open_verified(path, digest, str(source))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. All checkpoints of the run need it: restore a copy of it, or train under another name "
            "(run.name=...)"
        ) from error


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a module with the adapters of its towers merged, so that no name or shape shows them."""
    scales = {
        f"{name}." if name else "": scale
        for name, each in module.named_modules()
        if (scale := getattr(each, "adapter_scale", None)) is not None
    }
    state = module.state_dict()
    names = _plain_names(state, scales)
    return {plain: _merge(name, state.__getitem__, scales, state) for plain, name in names.items()}


def fingerprint(tokenizer: TokenizerDecoder) -> str:
    """Return the SHA-256 of a tokenizer's configuration, weights and vocabulary, in hexadecimal digits.

    It is equal for a tokenizer in memory and the one loaded from its folder, on any device. ``tokenizer.double()``
    does not change it, for it changes no value of float32 weights. Neither does a pixel decoder, which changes no id.

    Raises:
        VqclipError: it was loaded without its tower.
    """
    digest = hashlib.sha256(json.dumps([tokenizer.modality, tokenizer.section()], sort_keys=True).encode())
    state = merged_state(tokenizer).items()
    add_tensors(digest, {name: _narrow(tensor) for name, tensor in state if not name.startswith("pixels.")})
    for name, content in sorted(tokenizer.files().items()):
        digest.update(f"\n{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def pixels_fingerprint(tokenizer: TokenizerDecoder) -> str | None:
    """Return the SHA-256 of the configuration and weights of a tokenizer's pixel decoder; None without one."""
    if tokenizer.pixels is None:
        return None
    digest = hashlib.sha256(json.dumps(tokenizer.pixels_section(), sort_keys=True).encode())
    add_tensors(digest, {name: _narrow(tensor) for name, tensor in tokenizer.pixels.state_dict().items()})
    return digest.hexdigest()


def _narrow(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if it is in float64 and this changes no value."""
    narrow = tensor.float() if tensor.dtype == torch.float64 else tensor
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


class StoredTensors:
    """Open safetensors files as one, with adapters merged when a tensor is read.

    Args:
        files: open files by their paths.
        scales: beginning of names → factor on the adapters below it.

    Raises:
        CheckpointError: a tensor is in two files.
    """

    def __init__(self, files: Mapping[Path, Any], scales: Mapping[str, float]):
        self._scales = scales
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path, file in files.items():
            names = list(file.keys())
            if twice := [name for name in names if name in self._file_of]:
                raise CheckpointError(f"{path}: tensors that are stored twice: {first_names(twice)}")
            self._file_of |= dict.fromkeys(names, file)
            self._path_of |= dict.fromkeys(names, path)
        self._names = _plain_names(self._file_of, scales)

    def keys(self) -> list[str]:
        """Return the names, without adapters."""
        return list(self._names)

    def path_of(self, name: str) -> Path:
        """Return the path of the file that contains a tensor."""
        return self._path_of[self._names[name]]

    def get_slice(self, name: str) -> Any:
        """Return an object with the shape of a tensor."""
        stored = self._names[name]
        return self._file_of[stored].get_slice(stored)

    def get_tensor(self, name: str, replaced: Mapping[str, Tensor] | None = None) -> Tensor:
        """Read a tensor, with tensors to use in place of stored ones, by stored name.

        Raises:
            CheckpointError: it cannot be read, or its adapter does not fit it.
        """
        stored, instead = self._names[name], replaced or {}

        def read(each: str) -> Tensor:
            return instead[each] if each in instead else self._file_of[each].get_tensor(each)

        path = self._path_of[stored]
        with name_tensor_errors(path):
            try:
                return _merge(stored, read, self._scales, self._file_of)
            except (RuntimeError, KeyError) as error:
                raise CheckpointError(f"{path}: adapters do not fit their matrices: {error}") from error

    def merge_adapters(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merge adapters among ``tensors``, such as their moving averages, into the stored matrices that they change.

        Returns:
            All tensors, by the names that they have in a model without adapters.

        Raises:
            CheckpointError: an adapter has no matrix, or does not fit it.
        """
        layers = {name.removesuffix(end) for name in tensors for end in (_A, _B) if name.endswith(end)}
        if lacking := sorted(layer for layer in layers if f"{layer}.weight" not in self._names):
            raise CheckpointError(f"adapters do not fit their matrices: there are none for {first_names(lacking)}")
        merged = {f"{layer}.weight": self.get_tensor(f"{layer}.weight", tensors) for layer in sorted(layers)}
        return {name: tensor for name, tensor in tensors.items() if not name.endswith((_A, _B))} | merged


def _plain_names(stored: Mapping[str, Any], scales: Mapping[str, float]) -> dict[str, str]:
    """Return stored names by their names without adapters; the matrices of adapters are left out."""
    prefixes = tuple(scales)
    return {
        name.replace(_BASE, ".") if name.startswith(prefixes) else name: name
        for name in stored
        if not (name.startswith(prefixes) and name.endswith((_A, _B)))
    }


def _merge(name: str, read: Callable[[str], Tensor], scales: Mapping[str, float], stored: Mapping[str, Any]) -> Tensor:
    """Return a tensor with the change of its adapter: W + scale · B A."""
    tensor = read(name)
    layer, base, part = name.rpartition(_BASE)
    if not base or part != "weight" or not {f"{layer}{_A}", f"{layer}{_B}"} & stored.keys():
        return tensor
    scale = next(scale for prefix, scale in scales.items() if name.startswith(prefix))
    after, before = (read(f"{layer}{end}").to(tensor.device) for end in (_B, _A))
    floats = after.is_floating_point() and before.is_floating_point()
    if not floats or tensor.shape != after.shape[:1] + before.shape[1:]:
        got = " and ".join(f"{tuple(each.shape)} {each.dtype}" for each in (after, before))
        raise RuntimeError(f"{layer}: got {got} for {tuple(tensor.shape)} {tensor.dtype}")
    change = after.double() @ before.double()
    return (tensor.detach().double() + scale * change).to(tensor.dtype).detach()
