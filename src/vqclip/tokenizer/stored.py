"""Tensors of a model that are stored in parts: frozen towers once for a whole run, adapters beside their matrices.

    runs/base/frozen/model.safetensors               tensors that never change in the run
    runs/base/checkpoints/step-.../model/config.json   ``frozen``: digest of that file; ``adapters``: their factors
                                        model.safetensors   all other tensors

An exported folder contains everything in one file, with adapters merged into the matrices that they change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vqclip.errors import CheckpointError
from vqclip.io.atomic import FileDigest, verify_file
from vqclip.io.tensors import first_names, open_tensors

FROZEN_FOLDER = "frozen"
"""Folder in that of a run."""
_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
"""Parts of names that `peft` gives to an adapted layer's own tensors and to the two matrices of its adapter."""


def frozen_file(model_folder: Path, weights: str) -> Path:
    """Return the path of the frozen tensors of the run that contains a checkpoint's ``model_folder``."""
    return model_folder.absolute().parent.parent.parent / FROZEN_FOLDER / weights


def verify_frozen(path: Path, digest: FileDigest, source: Path) -> None:
    """Compare the frozen tensors of a run with the digest in ``source``.

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
        verify_file(path, digest, str(source))
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


class JoinedTensors:
    """Several open safetensors files as one, with adapters merged when a tensor is read.

    Args:
        files: open files by their paths.
        scales: beginning of names → factor on the adapters below it.
        replaced: tensors to use in place of stored ones, by stored name.
    """

    def __init__(
        self, files: Mapping[Path, Any], scales: Mapping[str, float], replaced: Mapping[str, Tensor] | None = None
    ):
        self._scales, self._replaced = scales, replaced or {}
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path, file in files.items():
            names = list(file.keys())
            if twice := [name for name in names if name in self._file_of]:
                raise CheckpointError(f"tensors that are stored twice: {first_names(twice)}")
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

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor."""
        return _merge(self._names[name], self._read, self._scales, self._file_of)

    def merge_replaced(self) -> dict[str, Tensor]:
        """Return the replaced tensors, with adapters merged, by their names without adapters."""
        layers = {name.removesuffix(end) for name in self._replaced for end in (_A, _B) if name.endswith(end)}
        others = {name: tensor for name, tensor in self._replaced.items() if not name.endswith((_A, _B))}
        return others | {f"{layer}.weight": self.get_tensor(f"{layer}.weight") for layer in sorted(layers)}

    def _read(self, name: str) -> Tensor:
        found = self._replaced.get(name)
        return self._file_of[name].get_tensor(name) if found is None else found


@contextmanager
def open_joined(
    paths: list[Path], scales: Mapping[str, float], replaced: Mapping[str, Tensor] | None = None
) -> Iterator[JoinedTensors]:
    """Open safetensors files as one; arguments as of `JoinedTensors`.

    Raises:
        CheckpointError: a file is missing or damaged, or adapters do not fit their matrices.
    """
    with ExitStack() as stack:
        files = {path: stack.enter_context(open_tensors(path)) for path in paths}
        try:
            yield JoinedTensors(files, scales, replaced)
        except (RuntimeError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{paths[0]}: adapters do not fit their matrices: {error}") from error


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
