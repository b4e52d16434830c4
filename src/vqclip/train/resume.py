"""What a run saves to go on exactly, and what must be the same for it to go on at all.

The sample order, the augmentation and the randomness of the towers are functions of (seed, step), so the step is the
whole data position and there is no generator state to save.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, JsonValue
from torch import Tensor

from vqclip import checkpoint, dist
from vqclip.checkpoint import OptimizerState
from vqclip.errors import CheckpointError, ConfigError, DistributedError, NonFiniteError, OtherRunError
from vqclip.io.json_files import Strict, validate
from vqclip.io.tensors import checksums, first_names, nonfinite_names
from vqclip.tokenizer.folder import load_weights
from vqclip.tokenizer.saving import write_folder
from vqclip.train.step import TrainStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints of a run stay."""

    newest: int
    """So many of the newest."""
    every: int | None = None
    """Also those after every so many steps; None for no others."""

    def keeps(self, step: int, best: int | None) -> bool:
        """Whether the checkpoint of ``step`` stays when it is no longer among the newest."""
        return step == best or (self.every is not None and step % self.every == 0)


_Count = Annotated[int, Field(ge=0)]


class _Best(Strict):
    step: _Count
    figure: str
    value: float


class _State(Strict):
    """``state.json`` of a checkpoint."""

    identity: dict[str, JsonValue]
    scaler: dict[str, float | int]
    skipped: _Count
    guards: dict[str, JsonValue]
    replaced: dict[str, _Count]
    best: _Best | None = None
    caption_lengths: dict[Annotated[str, Field(pattern=r"^[0-9]{1,4}$")], _Count] = {}


class Resumed(NamedTuple):
    """Where a run continues."""

    step: int
    """Steps done."""
    counts: dict[str, dict[str, int]]
    """The counts that `Snapshots.save` was given for them."""
    best: dict[str, Any] | None
    """The best step that it was given."""


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
        kept: RetentionPolicy,
        allow: Sequence[str] = (),
        in_background: bool = True,
    ):
        self.folder, self.step, self.kept, self.allow, self.in_background = folder, step, kept, allow, in_background
        self.identity = json.loads(json.dumps(identity))  # as it will be read back
        self._model, self._optimizer, self._writer = checkpoint.Staging(), checkpoint.Staging(), checkpoint.Writer()
        self._guards = checkpoint.Staging()
        self._writing: int | None = None
        self._written: int | None = None

    def save(self, done: int, counts: Mapping[str, Mapping[str, int]], best: Mapping[str, Any] | None = None) -> None:
        """Check the state after ``done`` steps on all ranks, and save it on rank 0. A collective.

        The state is copied now and written in the background; `wait` waits for that.

        Args:
            done: steps done.
            counts: ``replaced``, bad samples so far by kind, and ``caption_lengths``, over all ranks.
            best: ``step``, ``figure`` and ``value`` of the best step so far, whose checkpoint is kept as well.

        Raises:
            NonFiniteError: on every rank, when the state of one contains NaN or infinity; nothing is written.
            DistributedError: on every rank, when their states differ; nothing is written.
            CheckpointError: on rank 0, when this or the former one cannot be written; older checkpoints are untouched.
        """
        self.require_finite(done)
        self.require_equal(done)
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
                    "best": best,
                    **counts,
                }
            ),
            tensors=self._guards.copy(step.guards.tensors()),
            keep_last=self.kept.newest,
            keep=functools.partial(self.kept.keeps, best=best["step"] if best else None),
        )
        self._writer.write(save)
        self._writing = done
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
        if self._writing is not None:
            self._writing, self._written = None, self._writing

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint would contain, by ``model.`` or ``optimizer.`` and its name there."""
        state = {f"model.{name}": tensor for name, tensor in self.step.model.state_dict().items()}
        found = checkpoint.optimizer_tensors(self.step.optimizer)
        return state | {f"optimizer.{name}": tensor for name, tensor in found.items()}

    def require_finite(self, done: int) -> None:
        """Check weights, codebooks and optimizer state on all ranks. A collective.

        Raises:
            NonFiniteError: on every rank, when one holds NaN or infinity; names the tensors and the rank.
        """
        found = dist.gather_json(nonfinite_names(self.tensors()))
        bad = [f"{first_names(names)}{_on(rank)}" for rank, names in enumerate(found) if names]
        if bad:
            raise NonFiniteError(
                f"after step {done}: NaN or infinity in {'; '.join(bad[:3])}. This state is not saved, and no later "
                f"step could mend it. {self.newest()}. Lower optim.lr, lengthen optim.warmup_steps, or use "
                "train.precision: bf16 or fp32"
            )

    def require_equal(self, done: int) -> None:
        """Compare the bits of model and optimizer over all ranks. A collective.

        Codebooks that are not synchronised must have been made equal before.

        Raises:
            DistributedError: on every rank, when they differ; names the ranks in the minority, and the tensors.
        """
        if not dist.is_distributed():
            return
        mine = checksums(self.tensors())
        prints = dist.gather_json(hashlib.sha256(repr(mine).encode()).hexdigest())
        if len(set(prints)) == 1:
            return
        usual = Counter(prints).most_common(1)[0][0]  # of equals that of the lowest rank
        every = dist.gather_json(mine)
        reference = every[prints.index(usual)]
        others = [rank for rank, each in enumerate(prints) if each != usual]
        names = sorted(
            name for name in reference if any(every[rank].get(name) != reference[name] for rank in others)
        ) or ["other tensors"]
        raise DistributedError(
            f"after step {done}: rank {', '.join(map(str, others))} differs from rank {prints.index(usual)} in "
            f"{first_names(names)}, so the ranks no longer train one model; memory may be damaged on either. "
            f"This state is not saved. {self.newest()}. The same command continues from there"
        )

    def newest(self) -> str:
        """Name the newest checkpoint that this run has written or resumed from, on every rank. A collective."""

        def find() -> str | None:
            try:
                self.wait()
            except CheckpointError as error:
                logger.error("%s", error)
            return None if self._written is None else str(self.path(self._written))

        path = dist.run_on_main(find)
        if path is None:
            return "There is no checkpoint of this run yet"
        return f"{path} is the newest checkpoint; its tensors were finite when this run wrote or read it"

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close(failed=error is not None)

    def path(self, done: int) -> Path:
        """The folder of the checkpoint after ``done`` steps."""
        return self.folder / checkpoint.checkpoint_name(done)

    def load_model(self, done: int) -> None:
        """Load the weights of the checkpoint after ``done`` steps: rank 0 verifies and reads it. A collective.

        Raises:
            CheckpointError: on every rank, if it is missing or damaged.
        """
        dist.run_on_main(lambda: load_weights(checkpoint.load(self.path(done)).model_folder, self.step.model))
        for tensor in self.step.model.state_dict().values():
            dist.broadcast_(tensor)
        self.step.model.load_state_dict(self.step.model.state_dict())  # so that hooks derive attributes from it

    def resume(self) -> Resumed:
        """Restore the newest usable checkpoint, if there is one.

        Rank 0 alone reads it and sends it to the other ranks, which need not see its disk.

        Returns:
            Where the run continues: at step 0 without a checkpoint.

        Raises:
            CheckpointError: when checkpoints exist but none is usable, or the newest belongs to another run.
            ConfigError: `allow` names what there is not.
        """
        read: list[tuple[OptimizerState, dict[str, Tensor]]] = []

        def restore() -> dict[str, Any] | None:
            found = checkpoint.use_latest(self.folder, self._restore)
            if found is None:
                return None
            saved, state, optimizer, windows = found
            read.append((optimizer, windows))
            checkpoint.set_aside_newer(self.folder, saved.step)
            return {
                "path": str(saved.path),
                "step": saved.step,
                "state": state.model_dump(),
                "optimizer": [optimizer.kind, optimizer.groups, _outline(optimizer.tensors)],
                "windows": _outline(windows),
            }

        restored = dist.run_on_main(restore)
        if restored is None:
            return Resumed(0, {}, None)
        step, state = restored["step"], _State.model_validate(restored["state"])
        if read:
            ((optimizer, windows),) = read
        else:
            kind, groups, outline = restored["optimizer"]
            optimizer, windows = OptimizerState(kind, groups, _empty(outline)), _empty(restored["windows"])
        for tensor in (*self.step.model.state_dict().values(), *optimizer.tensors.values(), *windows.values()):
            dist.broadcast_(tensor)
        if not dist.is_main():
            self.step.model.load_state_dict(self.step.model.state_dict())  # so that hooks derive attributes from it
            checkpoint.restore_optimizer(self.step.optimizer, optimizer)
            self._restore_state(state, windows)
        self._written = step
        self.require_equal(step)
        logger.info("resumed from step %d: %s", step, restored["path"])
        counts = {"replaced": dict(state.replaced), "caption_lengths": dict(state.caption_lengths)}
        return Resumed(step, counts, state.best.model_dump() if state.best else None)

    def _restore(self, path: Path) -> tuple[checkpoint.Checkpoint, _State, OptimizerState, dict[str, Tensor]]:
        """Put a checkpoint into the running model and optimizer, having verified it; raises CheckpointError."""
        saved = checkpoint.load(path)
        state = validate(path / "state.json", _State, saved.state, section="state")
        _require_same(path, state.identity, self.identity, self.allow)
        load_weights(saved.model_folder, self.step.model)
        optimizer, windows = saved.restore_optimizer(self.step.optimizer), saved.tensors()
        try:
            self._restore_state(state, windows)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{path / 'state.json'}: cannot be used ({type(error).__name__}: {error})") from error
        return saved, state, optimizer, windows

    def _restore_state(self, state: _State, windows: Mapping[str, Tensor]) -> None:
        running = self.step.scaler.state_dict()
        if {name: type(value) for name, value in state.scaler.items()} != {n: type(v) for n, v in running.items()}:
            raise ValueError(f"scaler: got {sorted(state.scaler)}, expected numbers for {sorted(running)}")
        self.step.scaler.load_state_dict(dict(state.scaler))
        self.step.skipped = state.skipped
        self.step.guards.load_state_dict(state.guards, windows)


def _outline(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()}


def _empty(outline: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocate tensors that another rank has read."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (shape, dtype) in outline.items()
    }


def _on(rank: int) -> str:
    return f" on rank {rank}" if dist.is_distributed() else ""


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
        raise OtherRunError(
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
