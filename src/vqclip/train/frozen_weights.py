"""The tensors that never change in a run: stored once in its folder, not in every checkpoint.

Every checkpoint's ``config.json`` has the digest of the file, so that no other one is ever read with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vqclip.errors import OtherRunError
from vqclip.io.atomic import FileDigest, replace_folder
from vqclip.io.tensors import first_names
from vqclip.tokenizer.folder import CONFIG_FILE, WEIGHTS_FILE, read_frozen_digest
from vqclip.tokenizer.saving import write_weights
from vqclip.tokenizer.stored import open_frozen
from vqclip.towers import ImageTower, TextTower


class FrozenWeights:
    """Frozen tensors of a run's towers; rank 0 writes and compares them, and no method is a collective.

    Args:
        folder: to store them in.
        model: with the weights that the run begins with.
        towers: those that are in the model as ``<modality>.tower``, by modality; none for a task that trains no tower.

    Attributes:
        names: of the tensors in the model's state dict; empty if no part of a tower is frozen for the whole run.
    """

    def __init__(self, folder: Path, model: nn.Module, towers: Mapping[str, ImageTower | TextTower]):
        self.path, self._model, self._towers = folder / WEIGHTS_FILE, model, towers
        self.names = frozenset(
            f"{modality}.tower.{name}" for modality, tower in towers.items() for name in tower.constants
        )
        self._digest: FileDigest | None = None

    def write(self) -> None:
        """Store the tensors of the model; replaces those of a run that ended before its first checkpoint.

        Raises:
            NonFiniteError: one contains NaN or infinity.
        """
        if not self.names:
            return
        state = self._model.state_dict()

        def fill(aside: Path) -> None:
            self._digest = write_weights(aside, {name: state[name] for name in sorted(self.names)})

        replace_folder(self.path.parent, fill)

    def section(self) -> dict[str, Any]:
        """Return the keys that a checkpoint's ``config.json`` needs to find the tensors and to merge adapters."""
        towers = self._towers.items()
        scales = {name: tower.adapter_scale for name, tower in towers if tower.adapter_scale is not None}
        frozen = {} if self._digest is None else {"frozen": self._digest.model_dump()}
        return frozen | ({"adapters": scales} if scales else {})

    def require_equal(self, model_folder: Path) -> None:
        """Check that the file is the one that a checkpoint needs, and that the model was built with the same weights.

        Raises:
            CheckpointError: the file is missing or damaged, or of another run.
            OtherRunError: the model has other frozen parts, or other weights in them.
        """
        if not self._towers:
            return
        self._digest, state = read_frozen_digest(model_folder), self._model.state_dict()
        others: list[str] = []
        if self._digest is not None:
            file = open_frozen(self.path, self._digest, model_folder / CONFIG_FILE)
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            others = sorted(stored.keys() ^ self.names)
        if others or (self._digest is None) == bool(self.names):
            raise OtherRunError(
                f"{self.path.parents[1]}: the run began with other frozen parts of towers"
                f"{f' ({first_names(others)})' if others else ''}; model.*.tower.train cannot change when a run "
                "resumes, nor with run.resume_allow. Restore it, or give this run another name (run.name=...)"
            )
        changed = [
            name
            for name in sorted(self.names)
            if stored[name].dtype != state[name].dtype or not torch.equal(stored[name], state[name].cpu())
        ]
        if changed:
            towers = [name for name in self._towers if any(each.startswith(f"{name}.") for each in changed)]
            settings = ", ".join(f"model.{name}.tower" for name in towers)
            raise OtherRunError(
                f"{self.path}: the run began with other weights of frozen towers than those that {settings} gives now: "
                f"{first_names(changed)}. Restore the file or package from which they come (checkpoint, pretrained), "
                "or give this run another name (run.name=...)"
            )
