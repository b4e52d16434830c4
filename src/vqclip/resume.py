"""What a run saves to go on exactly, and what must be the same for it to go on at all.

The sample order, the augmentation and the randomness of the towers are functions of (seed, step), so the step is the
whole data position and there is no generator state to save.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from vqclip import checkpoint, dist
from vqclip.errors import CheckpointError, ConfigError
from vqclip.pretrained import load_weights, write_folder
from vqclip.step import TrainStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """Which checkpoints of a run stay."""

    newest: int
    """So many of the newest."""
    every: int | None = None
    """Also those after every so many steps; None for no others."""

    def keeps(self, step: int, best: int | None) -> bool:
        """Whether the checkpoint of ``step`` stays when it is no longer among the newest."""
        return step == best or (self.every is not None and step % self.every == 0)


class Snapshots:
    """Saves and restores the state of a run; a context, which ends when what was saved is on the disk.

    Args:
        folder: where the checkpoints lie.
        identity: JSON-able facts that define the trajectory, such as seed, batch size and data fingerprint; a
            checkpoint with others is refused.
        step: the training step, whose model, optimizer and gradient scaler are saved.
        kept: which checkpoints stay.
        allow: facts that may be others, by their names or the beginnings of these.
        in_background: write while the training goes on, from a copy in the host's memory.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        step: TrainStep,
        kept: Kept,
        allow: Sequence[str] = (),
        in_background: bool = True,
    ):
        self.folder, self.step, self.kept, self.allow, self.in_background = folder, step, kept, allow, in_background
        self.identity = json.loads(json.dumps(identity))  # as it will be read back
        self._model, self._optimizer, self._writer = checkpoint.Staging(), checkpoint.Staging(), checkpoint.Writer()

    def save(self, done: int, replaced: Mapping[str, int], best: int | None = None) -> None:
        """Save the state after ``done`` steps; rank 0 does, the others do nothing.

        The state is copied now; writing it takes its time in the background, and `wait` waits for that.

        Args:
            done: steps done.
            replaced: bad samples replaced so far, over all ranks: kind → number.
            best: a step whose checkpoint is kept as well.

        Raises:
            CheckpointError: on rank 0, when this or the former one cannot be written; older checkpoints are untouched.
        """
        if not dist.is_main():
            return
        self.wait()
        model, step = self.step.model, self.step
        save = functools.partial(
            checkpoint.save,
            self.folder,
            done,
            write_model=functools.partial(
                write_folder, config=model.section(), state=self._model.copy(model.state_dict())
            ),
            optimizer=checkpoint.pack_optimizer(step.optimizer, self._optimizer),
            state=copy.deepcopy(
                {
                    "identity": self.identity,
                    "scaler": step.scaler.state_dict(),
                    "skipped": step.skipped,
                    "guards": step.guards.state_dict(),
                    "replaced": dict(replaced),
                }
            ),
            keep_last=self.kept.newest,
            keep=functools.partial(self.kept.keeps, best=best),
        )
        self._writer.write(save)
        if not self.in_background:
            self.wait()

    def look(self) -> None:
        """Raise at once what has gone wrong in the background.

        Raises:
            CheckpointError: on rank 0, when a checkpoint could not be written.
        """
        self._writer.look()

    def wait(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            CheckpointError: on rank 0, when it cannot be written.
        """
        self._writer.wait()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close(failed=error is not None)

    def path(self, done: int) -> Path:
        """The folder of the checkpoint after ``done`` steps."""
        return self.folder / f"step-{done:08d}"

    def resume(self) -> tuple[int, dict[str, int]]:
        """Restore the newest good checkpoint, if there is one.

        Rank 0 chooses and verifies it, the others follow.

        Returns:
            The number of steps done, and that of the bad samples replaced in them, by kind.

        Raises:
            CheckpointError: when checkpoints exist but none is usable, or the newest belongs to another run.
            ConfigError: `allow` names what there is not.
        """
        found = checkpoint.latest(self.folder) if dist.is_main() else None
        path = dist.broadcast_json(None if found is None else str(found))
        if path is None:
            return 0, {}
        saved = checkpoint.load(Path(path), check=False)
        _require_same(saved.path, saved.state["identity"], self.identity, self.allow)
        load_weights(saved.model_folder, self.step.model)
        saved.restore_optimizer(self.step.optimizer)
        self.step.scaler.load_state_dict(saved.state["scaler"])
        self.step.skipped = saved.state["skipped"]
        self.step.guards.load_state_dict(saved.state["guards"])
        if dist.is_main():
            checkpoint.set_aside_newer(self.folder, saved.step)
        logger.info("resumed from %s: %d steps done", saved.path, saved.step)
        return saved.step, saved.state["replaced"]


def _require_same(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any], allow: Sequence[str]) -> None:
    """Raises CheckpointError listing every fact in which a checkpoint and this run differ and may not."""
    before, after = _flat(saved), _flat(now)
    keys = sorted(before.keys() | after.keys())
    for name in allow:
        if not any(_begins(key, name) for key in keys):
            raise ConfigError(f"run.resume_allow: got {name!r}; expected some of {', '.join(keys)}, or how they begin")
    differing = {
        key: f"  {key}: {before.get(key, 'absent')!r} in the checkpoint, {after.get(key, 'absent')!r} now"
        for key in keys
        if before.get(key) != after.get(key)
    }
    refused = [line for key, line in differing.items() if not any(_begins(key, name) for name in allow)]
    if refused:
        shown = "\n".join(refused[:20]) + (f"\n  ... and {len(refused) - 20} more" if len(refused) > 20 else "")
        raise CheckpointError(
            f"{path} belongs to another run, so going on from it would not be exact:\n{shown}\n"
            "restore these, give this run another name (run.name=...), or name in run.resume_allow what may differ"
        )
    for line in differing.values():
        logger.warning("%s: allowed to differ:%s", path, line)


def _begins(key: str, name: str) -> bool:
    return key == name or (key.startswith(name) and key[len(name)] in ".[ ")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        items = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list):
        items = [(f"{prefix}[{index}]", value) for index, value in enumerate(tree)]
    else:
        return {prefix: tree}
    return {path: leaf for key, value in items for path, leaf in _flat(value, key).items()} or {prefix: tree}
