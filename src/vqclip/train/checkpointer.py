"""Saving a run: what a checkpoint contains, when it is refused, and which ones stay."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor

from vqclip import checkpoint, dist
from vqclip.errors import CheckpointError, DistributedError, NonFiniteError
from vqclip.io.tensors import checksums, first_names, nonfinite_names
from vqclip.tokenizer.stored import FROZEN_FOLDER
from vqclip.train.ema import AVERAGE
from vqclip.train.frozen_weights import FrozenWeights
from vqclip.train.run_state import RetentionPolicy
from vqclip.train.run_store import RunMirror
from vqclip.train.shard_files import ShardCopy, ShardFiles, is_shared
from vqclip.train.step import TrainStep

logger = logging.getLogger(__name__)

DISCRIMINATORS = "discriminators/"
"""Beginning of the names of discriminators among the tensors of a checkpoint."""


class _Copied(NamedTuple):
    """Tensors of a checkpoint in host memory, on rank 0; without any if every rank writes its own."""

    model: dict[str, Tensor] | None
    optimizer: checkpoint.OptimizerState
    beside: dict[str, Tensor]
    shards: ShardCopy | None = None


class Checkpointer:
    """Saves the state of a run, see `vqclip.train.resume` for the way back.

    A context manager: it ends when all saved checkpoints are on the disk.

    Args:
        folder: of all checkpoints of the run.
        identity: JSON-able settings that define the trajectory, such as seed, batch size and data fingerprint; a
            checkpoint with other ones is refused on resume.
        step: the training step, whose model, optimizer, gradient scaler and guards are saved.
        retention: which checkpoints stay.
        in_background: write during the next steps, from a copy in host memory.
        mirror: of a run at a URL, on rank 0; a checkpoint is saved when it is there.
        timeout_s: longest wait for another rank's part of a checkpoint, in seconds.

    Attributes:
        is_shared: whether the weights are in shards and all ranks see the run's folder: each then writes and reads its
            own rows.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        step: TrainStep[Any],
        retention: RetentionPolicy,
        in_background: bool = True,
        mirror: RunMirror | None = None,
        timeout_s: float = 600.0,
    ):
        self.mirror = mirror
        self.folder, self.step, self.retention, self.in_background = folder, step, retention, in_background
        self.identity = json.loads(json.dumps(identity))  # as it is read back
        self.frozen = FrozenWeights(folder.parent / FROZEN_FOLDER, step.model, step.task.towers)
        self.written: int | None = None
        """Steps of the newest checkpoint that this run has written completely, or resumed from."""
        self._model, self._optimizer, self._writer = checkpoint.Staging(), checkpoint.Staging(), checkpoint.Writer()
        self._state = checkpoint.Staging()
        self._writing: int | None = None
        self.is_shared, self._timeout_s = step.sharding is not None and is_shared(folder.parent), timeout_s
        self._shard_files: ShardFiles | None = None

    def save(self, done: int, counts: Mapping[str, Mapping[str, int]], best: Mapping[str, Any] | None = None) -> None:
        """Check the state after ``done`` steps on all ranks, and save it. A collective.

        The state is copied now and written in the background; `wait` waits for that.

        Args:
            done: steps done.
            counts: ``replaced``, bad samples so far by kind, and ``caption_lengths``, over all ranks.
            best: ``step``, ``figure`` and ``value`` of the best step so far, whose checkpoint is kept as well.

        Raises:
            NonFiniteError: on every rank, when the state of one contains NaN or infinity; nothing is written.
            DistributedError: on every rank, when their states differ; nothing is written.
            CheckpointError: on rank 0, when this or the previous one cannot be written; older ones are untouched. On
                every rank, when it is one of several that write.
        """
        self.require_finite(done)
        self.require_equal(done)
        step = self.step
        self.wait()
        copied = self._copy()
        if not dist.is_main():
            if copied.shards is not None:
                path = checkpoint.unfinished_path(self.folder, done)
                self._write(functools.partial(self._write_shards, copied.shards, path), done)
            return
        save = functools.partial(
            self._save,
            self.folder,
            done,
            write_model=functools.partial(step.task.write_model, state=copied.model, extra=self.frozen.section()),
            optimizer=copied.optimizer,
            state=copy.deepcopy(
                {
                    "identity": self.identity,
                    "scaler": step.scaler.state_dict(),
                    "guards": step.guards.state_dict(),
                    "best": best,
                    **counts,
                }
            ),
            tensors=copied.beside,
            write_tensors=None if copied.shards is None else functools.partial(self._write_shards, copied.shards),
            keep_last=self.retention.newest,
            keep=functools.partial(self.retention.keeps, best=best["step"] if best else None),
        )
        self._write(save, done)

    def _write(self, work: Callable[[], object], done: int) -> None:
        self._writer.write(work)
        self._writing = done
        if not self.in_background:
            self.wait()

    def _write_shards(self, copied: ShardCopy, folder: Path) -> None:
        assert self._shard_files is not None
        self._shard_files.write(copied, folder)

    def _copy(self) -> _Copied:
        """Copy the tensors of a checkpoint to host memory. A collective.

        Each rank copies what it writes, and rank 0 everything if it alone sees the folder.
        """
        step, sharding = self.step, self.step.sharding
        windows, beside, model = step.guards.tensors(), self._beside_the_model(), self._model_tensors()
        if sharding is not None and self._shard_files is not None:
            moments, beside = checkpoint.optimizer_tensors(step.optimizer), windows | beside
            files = {
                checkpoint.MODEL_FILE: {name: (name, each) for name, each in model.items()},
                checkpoint.OPTIMIZER_FILE: {name: (name.partition("/")[0], each) for name, each in moments.items()},
                checkpoint.STATE_FILE: {name: (name.removeprefix(AVERAGE), each) for name, each in beside.items()},
            }
            layout = checkpoint.pack_optimizer(sharding.optimizer)
            return _Copied(
                None, layout, {}, self._shard_files.copy({file: each for file, each in files.items() if each})
            )
        if sharding is not None:
            beside = {f"{AVERAGE}{name}": each for name, each in sharding.gather(_averages(step)).items()}
            copied = sharding.gather(model), sharding.gather_optimizer(step.optimizer)
            return _Copied(*copied, self._state.copy(windows) | beside)
        if not dist.is_main():
            return _Copied({}, checkpoint.OptimizerState("", [], {}), {})
        optimizer = checkpoint.pack_optimizer(step.optimizer, self._optimizer)
        return _Copied(self._model.copy(model), optimizer, self._state.copy(windows | beside))

    def _save(self, folder: Path, done: int, *, keep_last: int, keep: Callable[[int], bool], **content: Any) -> None:
        # The copy of a run at a URL keeps the newest one there too: without it, this one would not be uploaded later.
        here = keep_last if self.mirror is None else max(2, keep_last)
        path = checkpoint.save(folder, done, keep_last=here, keep=keep, **content)
        if self.mirror is not None:
            self.mirror.upload_checkpoint(path, keep_last, keep)

    def raise_if_failed(self) -> None:
        """Raise an error of the background thread, without waiting for it.

        Raises:
            CheckpointError: on rank 0, when a checkpoint could not be written.
        """
        self._writer.raise_if_failed()

    def wait(self) -> None:
        """Wait until what was saved is on the disk, or this rank's part of it.

        Raises:
            CheckpointError: when it cannot be written.
        """
        self._writer.wait()
        if self._writing is not None:
            self._writing, self.written = None, self._writing

    def _model_tensors(self, constants: bool = False) -> dict[str, Tensor]:
        """Return the tensors of the model, with or without those that never change in the run; rows of shards."""
        state = self.step.model.state_dict()
        return {
            name: dist.local_rows(tensor)
            for name, tensor in state.items()
            if constants or name not in self.frozen.names
        }

    def tensors(self, constants: bool = False) -> dict[str, Tensor]:
        """Return every tensor to check before a save: of the model, the optimizer and what is saved beside them.

        Args:
            constants: return those that the run stores once, too.
        """
        state = {f"model.{name}": tensor for name, tensor in self._model_tensors(constants).items()}
        found = checkpoint.optimizer_tensors(self.step.optimizer)
        return state | {f"optimizer.{name}": tensor for name, tensor in found.items()} | self._beside_the_model()

    def _beside_the_model(self) -> dict[str, Tensor]:
        """Return the moving averages and the discriminators."""
        averages = {} if self.step.ema is None else self.step.ema.tensors()
        others = self.step.task.discriminators
        state = {} if others is None else others.state_dict()
        return averages | {f"{DISCRIMINATORS}{name}": tensor for name, tensor in state.items()}

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
                f"step could repair it. {self.newest()}. Lower optim.lr, lengthen optim.warmup_steps, or use "
                "train.precision: bf16 or fp32"
            )

    def require_equal(self, done: int, constants: bool = False) -> None:
        """Compare the bits of model and optimizer over all ranks. A collective.

        Codebooks that are not synchronised must have been made equal before. Of weights in shards there are no two
        copies to compare.

        Args:
            done: steps done.
            constants: compare the tensors that never change in the run, too; once is enough.

        Raises:
            DistributedError: on every rank, when they differ; names the ranks in the minority, and the tensors.
        """
        if not dist.is_distributed():
            return
        mine = checksums(self._equal_tensors(constants))
        prints = dist.gather_json(hashlib.sha256(repr(mine).encode()).hexdigest())
        if len(set(prints)) == 1:
            return
        usual = Counter(prints).most_common(1)[0][0]  # among equally common ones, that of the lowest rank
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

    def _equal_tensors(self, constants: bool) -> dict[str, Tensor]:
        """Return the tensors that are equal on all ranks: all but those in shards."""
        sharding, every = self.step.sharding, self.tensors(constants)
        if sharding is None:
            return every
        kinds = ("model.", "optimizer.", AVERAGE)
        bare = {
            name: next((name.removeprefix(kind) for kind in kinds if name.startswith(kind)), name) for name in every
        }
        return {name: each for name, each in every.items() if bare[name].partition("/")[0] not in sharding.shards}

    def newest(self) -> str:
        """Name the newest checkpoint that this run has written or resumed from, on every rank. A collective."""

        def find() -> str | None:
            try:
                self.wait()
            except CheckpointError as error:
                logger.error("%s", error)
            return None if self.written is None else str(self.path(self.written))

        path = dist.run_on_main(find)
        if path is None:
            return "There is no checkpoint of this run yet"
        return f"{path} is the newest checkpoint; its tensors were finite when this run wrote or read it"

    def __enter__(self) -> Checkpointer:
        if self.is_shared and self.step.sharding is not None:
            self._shard_files = ShardFiles(self.step.sharding.shards, self._timeout_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._writer.close(failed=error is not None)
        finally:
            if self._shard_files is not None:
                self._shard_files.close()

    def find(self) -> list[Path]:
        """Return the checkpoints of the run, oldest first, on rank 0; `fetch` them before they are read."""
        return checkpoint.checkpoints(self.folder) if self.mirror is None else self.mirror.checkpoints()

    def fetch(self, path: Path) -> Path:
        """Fetch a checkpoint of a run at a URL unless it is on this disk, on rank 0, and return its path."""
        return path if self.mirror is None else self.mirror.fetch(path)

    def set_aside_newer(self, done: int) -> None:
        """Rename checkpoints newer than ``done`` steps, on rank 0; see `vqclip.checkpoint.set_aside_newer`."""
        checkpoint.set_aside_newer(self.folder, done)
        if self.mirror is not None:
            self.mirror.remove_newer(done)

    def path(self, done: int) -> Path:
        """Return the folder of the checkpoint after ``done`` steps."""
        return self.folder / checkpoint.checkpoint_name(done)


def _on(rank: int) -> str:
    return f" on rank {rank}" if dist.is_distributed() else ""


def _averages(step: TrainStep[Any]) -> dict[str, Tensor]:
    return {} if step.ema is None else step.ema.averages
