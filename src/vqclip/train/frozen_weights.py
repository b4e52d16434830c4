"""The tensors that never change in a run: stored once in its folder, not in every checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vqclip.errors import CheckpointError, OtherRunError
from vqclip.io.atomic import FileDigest, replace_folder
from vqclip.io.json_files import Strict, add_checksum, read_checked
from vqclip.io.tensors import first_names, nonfinite_names, open_tensors, read_shapes, shape_differences
from vqclip.tokenizer.folder import WEIGHTS_FILE, read_frozen_digest
from vqclip.tokenizer.saving import write_weights
from vqclip.tokenizer.stored import verify_frozen
from vqclip.towers import ImageTower, TextTower

_CONFIG = "frozen.json"
_VERSIONS = {"format": "vqclip-frozen", "version": 1}


class _Stored(Strict):
    weights: FileDigest


class FrozenWeights:
    """Frozen tensors of a run's towers; rank 0 writes and verifies them, and no method is a collective.

    Args:
        folder: to store them in.
        model: with the weights that the run begins with.
        towers: those that are in the model as ``<modality>.tower``, by modality; none for a task that trains no tower.
    """

    def __init__(self, folder: Path, model: nn.Module, towers: Mapping[str, ImageTower | TextTower]):
        self.folder, self._model, self._towers = folder, model, towers
        self.names = frozenset(
            f"{modality}.tower.{name}" for modality, tower in towers.items() for name in tower.constants
        )
        """Their names in the model's state dict; empty if no part of a tower is frozen for the whole run."""

    @property
    def path(self) -> Path:
        """File of the tensors."""
        return self.folder / WEIGHTS_FILE

    @functools.cached_property
    def digest(self) -> FileDigest:
        """Digest of the file; written or verified before."""
        hint = (
            "; the checkpoints of this run need the weights of frozen towers there. Restore the folder, or train under "
            "another name (run.name=...)"
        )
        return read_checked(self.folder / _CONFIG, _Stored, _VERSIONS, "use the vqclip that wrote it", hint).weights

    def write(self) -> None:
        """Store the tensors of the model; replaces those of a run that ended before its first checkpoint.

        Raises:
            NonFiniteError: one contains NaN or infinity.
        """
        if not self.names:
            return
        state = self._model.state_dict()

        def fill(aside: Path) -> None:
            digest = write_weights(aside, {name: state[name] for name in sorted(self.names)})
            (aside / _CONFIG).write_bytes(add_checksum({**_VERSIONS, "weights": digest.model_dump()}))

        replace_folder(self.folder, fill)
        vars(self).pop("digest", None)

    def verify(self) -> None:
        """Compare every byte of the file with its digest.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        if self.names:
            verify_frozen(self.path, self.digest, self.folder / _CONFIG)

    def section(self) -> dict[str, Any]:
        """Return the keys that a checkpoint's ``config.json`` needs to find the tensors and to merge adapters."""
        towers = self._towers.items()
        scales = {name: tower.adapter_scale for name, tower in towers if tower.adapter_scale is not None}
        frozen = {"frozen": self.digest.model_dump()} if self.names else {}
        return frozen | ({"adapters": scales} if scales else {})

    def require_equal(self, model_folder: Path) -> None:
        """Check that a checkpoint was saved beside this file, and that the model was built with the same weights.

        Raises:
            CheckpointError: the checkpoint needs another file.
            OtherRunError: the model has other frozen parts, or other weights in them.
        """
        if not self._towers:
            return
        found = read_frozen_digest(model_folder)
        if (found is None) == bool(self.names):
            raise self._other_parts_error([])
        if found is not None and found != self.digest:
            raise CheckpointError(
                f"{model_folder}: was saved with other frozen weights than those in {self.path}; restore the file of "
                "its run"
            )
        if self.names and (problems := self._differences()):
            towers = [name for name in ("image", "text") if any(each.startswith(f"{name}.") for each in problems)]
            settings = ", ".join(f"model.{name}.tower" for name in towers)
            raise OtherRunError(
                f"{self.path}: the run began with other weights of frozen towers than those that {settings} gives now: "
                f"{first_names(problems)}. Restore the file or package from which they come (checkpoint, pretrained), "
                "or give this run another name (run.name=...)"
            )

    def _differences(self) -> list[str]:
        """Return a line for each tensor of the file that the model does not have with the same bits."""
        state = self._model.state_dict()
        with open_tensors(self.path) as file:
            shapes = read_shapes(file)
            if others := sorted(shapes.keys() ^ self.names):
                raise self._other_parts_error(others)
            if problems := shape_differences({name: tuple(state[name].shape) for name in self.names}, shapes):
                return problems
            stored = {name: file.get_tensor(name) for name in sorted(self.names)}
        if bad := nonfinite_names(stored):
            raise CheckpointError(
                f"{self.path}: these tensors contain NaN or infinity: {first_names(bad)}; restore a copy of it, which "
                "all checkpoints need"
            )
        return [
            f"{name} has other values"
            for name, tensor in stored.items()
            if tensor.dtype != state[name].dtype or not torch.equal(tensor, state[name].cpu())
        ]

    def _other_parts_error(self, names: list[str]) -> OtherRunError:
        return OtherRunError(
            f"{self.folder.parent}: the run began with other frozen parts of towers"
            f"{f' ({first_names(names)})' if names else ''}; model.*.tower.train cannot change when a run resumes, nor "
            "with run.resume_allow. Restore it, or give this run another name (run.name=...)"
        )
