"""Saving a run: what a checkpoint contains, when it is refused, and which ones stay.

    every rank      copy what it writes to host memory: its rows of weights in shards, and rank 0 all else
    every rank      rank 0 makes the files -> all write their rows -> all compare them with the disk
    rank 0          writes the rest, hashes the files, writes the manifest last, renames the folder

A checkpoint does not depend on the number of ranks or on whether they had shards. All but the copy happens in the
background. Where the ranks do not see one run folder, rank 0 copies whole tensors, and writes alone. Nothing of a save
counts before its manifest: a rank that dies leaves a folder that the next save removes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, JsonValue
from torch import Tensor

from vqclip import checkpoint, dist
from vqclip.checkpoint import MODEL, OPTIMIZER_FILE, STATE_FILE
from vqclip.checkpoint.optimizer import optimizer_tensors
from vqclip.errors import CheckpointError, DistributedError, NonFiniteError
from vqclip.io import parts
from vqclip.io.json_files import Strict
from vqclip.io.parts import Part
from vqclip.io.tensors import checksums, first_names, nonfinite_names
from vqclip.tokenizer.folder import WEIGHTS_FILE
from vqclip.tokenizer.stored import FROZEN_FOLDER
from vqclip.train.ema import AVERAGE
from vqclip.train.frozen_weights import FrozenWeights
from vqclip.train.run_store import RunMirror
from vqclip.train.step import TrainStep

logger = logging.getLogger(__name__)

DISCRIMINATORS = "discriminators/"
"""Beginning of the names of discriminators among the tensors of a checkpoint."""
MODEL_FILE = f"{MODEL}/{WEIGHTS_FILE}"
"""File of the model's tensors in a checkpoint."""


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Best(Strict):
    step: _Count
    figure: str
    value: float


class RunState(Strict):
    """``state.json`` of a checkpoint.

    The sample order, the augmentation and the random numbers of the towers are functions of (seed, step): the step is
    the whole data position, and there is no generator state to save.
    """

    identity: dict[str, JsonValue]
    scaler: dict[str, float | int]
    guards: dict[str, JsonValue]
    replaced: dict[str, _Count]
    caption_lengths: dict[Annotated[str, Field(pattern=r"^[0-9]{1,4}$")], _Count]
    best: _Best | None


def parameter_of(name: str) -> str:
    """Return the parameter that a tensor of a checkpoint belongs to: itself, a moment ``a/exp_avg``, or ``ema/a``."""
    return name.removeprefix(AVERAGE).partition("/")[0]


def is_shared(folder: Path) -> bool:
    """Return whether all ranks see one folder under the path that each of them was given. A collective."""
    return not dist.any_rank(len(dist.ranks_that_see(folder)) < dist.world_size())


class Checkpointer:
    """Saves the state of a run, see `vqclip.train.resume` for the way back.

    A context manager: it ends when all saved checkpoints are on the disk.

    Args:
        folder: of all checkpoints of the run.
        identity: JSON-able settings that define the trajectory, such as seed, batch size and data fingerprint; a
            checkpoint with other ones is refused on resume.
        step: the training step, whose model, optimizer, gradient scaler and guards are saved.
        keep_last: number of recent checkpoints to keep.
        in_background: write during the next steps, from a copy in host memory.
        mirror: of a run at a URL, on rank 0; a checkpoint is saved when it is there.
        timeout_s: longest wait for another rank's part of a checkpoint, in seconds.
        keep_every: also keep the checkpoints after every ``keep_every`` steps; None for no others.

    Attributes:
        is_shared: whether the weights are in shards and all ranks see the run's folder: each then writes its own rows.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        step: TrainStep,
        keep_last: int,
        in_background: bool = True,
        mirror: RunMirror | None = None,
        timeout_s: float = 600.0,
        keep_every: int | None = None,
    ):
        self.mirror = mirror
        self.folder, self.step, self.in_background = folder, step, in_background
        self._keep_last, self._keep_every = keep_last, keep_every
        self.identity = json.loads(json.dumps(identity))  # as it is read back
        self.frozen = FrozenWeights(folder.parent / FROZEN_FOLDER, step.model, step.task.towers)
        self.written: int | None = None
        """Steps of the newest checkpoint that this run has written completely, or resumed from."""
        self._staged: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future[None]] | None = None
        """Steps of the checkpoint that is being written, and the job that does it."""
        self.is_shared = bool(step.weights.shapes) and is_shared(folder.parent)
        self._timeout_s = timeout_s
        self._group: dist.BackgroundGroup | None = None

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
        self.wait()
        files, step, is_main = self._copy(), self.step, dist.is_main()
        if not (is_main or self.is_shared):
            return
        identity, scaler, guards = self.identity, step.scaler.state_dict(), step.guards.state_dict()
        state = copy.deepcopy({"identity": identity, "scaler": scaler, "guards": guards, "best": best, **counts})
        frozen, best_step, every = self.frozen.section(), best["step"] if best else None, self._keep_every

        def keep(number: int) -> bool:
            return number == best_step or (every is not None and number % every == 0)

        def fill(folder: Path) -> None:
            self._write_tensors(files, folder)
            step.task.write_model(folder / MODEL, frozen)

        def write() -> None:  # uses nothing that the training changes
            begun = time.perf_counter()
            if not is_main:
                self._write_tensors(files, checkpoint.unfinished_path(self.folder, done))
                return
            path = checkpoint.save(self.folder, done, fill, state, self._keep_last, keep)
            if self.mirror is not None:
                self.mirror.upload_checkpoint(path, self._keep_last, keep)
            logger.debug("checkpoint written in %.2f s", time.perf_counter() - begun)

        self._writing = done, self._thread.submit(write)
        if not self.in_background:
            self.wait()

    def _copy(self) -> dict[str, dict[str, Part]]:
        """Copy what this rank writes to host memory. A collective.

        Returns:
            File in the checkpoint's folder → name of each tensor → this rank's part. Where several ranks write, the
            names of files have a random suffix until all is written, so that a rank left over from a killed job does
            not find the files of another one.
        """
        suffix = f".{dist.broadcast_json(secrets.token_hex(8))}" if self.is_shared else ""
        weights, files, found = self.step.weights, self._files(), dict[str, dict[str, Part]]()
        files[STATE_FILE] |= self.step.guards.tensors()
        found[OPTIMIZER_FILE + suffix] = {}  # also before the first step
        for kind, tensors in files.items():
            for name, tensor in tensors.items():
                file = f"{MODEL}/{self.step.task.weights_file(name)}" if kind == MODEL_FILE else kind
                if self.is_shared:
                    part = weights.part(parameter_of(name), tensor)
                else:
                    whole = weights.gather(parameter_of(name), tensor)
                    part = Part(tuple(whole.shape), whole.dtype, whole if dist.is_main() else None)
                if part.rows is not None:
                    part = part._replace(rows=self._to_host(f"{file} {name}", part.rows))
                found.setdefault(file + suffix, {})[name] = part
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return found

    def _to_host(self, name: str, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to contiguous memory of the host, which the next copy of this name overwrites.

        New memory would cost more than the copy; the idea is that of torch's asynchronous distributed checkpoints.
        """
        held = self._staged.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._staged[name] = held
        return held.copy_(tensor.detach(), non_blocking=True)

    def _write_tensors(self, files: Mapping[str, Mapping[str, Part]], folder: Path) -> None:
        """Write the files of tensors, in a background thread of every rank that writes.

        Args:
            files: result of `_copy`.
            folder: unfinished folder of the checkpoint, which rank 0 has made.

        Raises:
            CheckpointError: on every rank, if one could not write or does not find what it has written.
            DistributedError: a rank died.
        """
        what = f"{folder}: writing this rank's part of the checkpoint"
        for work in (parts.create, parts.write, *([parts.require_equal] if self._group else [])):
            with self._group.raise_on_all_ranks(what) if self._group else contextlib.nullcontext():
                try:
                    for file, each in files.items():
                        if dist.is_main() or work is not parts.create:
                            work(folder / file, each)
                except OSError as error:
                    raise CheckpointError(f"{what}: {error}; older checkpoints are untouched") from error
        if self.is_shared and dist.is_main():
            for file in files:
                (folder / file).rename((folder / file).with_suffix(""))

    def raise_if_failed(self) -> None:
        """Raise an error of the background thread, without waiting for it.

        Raises:
            CheckpointError: on rank 0, when a checkpoint could not be written.
        """
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait until what was saved is on the disk, or this rank's part of it.

        Raises:
            CheckpointError: when it cannot be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing[1].result()
            self.written = writing[0]

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model in checkpoints: all but those that the run stores once."""
        state = self.step.model.state_dict()
        return {name: each for name, each in state.items() if name not in self.frozen.names}

    def _files(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of each file of a checkpoint but those of the guards; of shards, this rank's rows."""
        step, others = self.step, self.step.task.discriminators
        model = {name: dist.local_rows(tensor) for name, tensor in self.model_tensors().items()}
        state = {} if step.ema is None else step.ema.tensors()
        if others is not None:
            state |= {f"{DISCRIMINATORS}{name}": tensor for name, tensor in others.state_dict().items()}
        return {MODEL_FILE: model, OPTIMIZER_FILE: optimizer_tensors(step.optimizer), STATE_FILE: state}

    def tensors(self, in_shards: bool = True) -> dict[str, Tensor]:
        """Return the tensors to check before a save, frozen ones included, by names that say what they are.

        Args:
            in_shards: return those of which every rank has other rows.
        """
        shapes, files = self.step.weights.shapes, self._files()
        files[MODEL_FILE] = {name: dist.local_rows(each) for name, each in self.step.model.state_dict().items()}
        return {
            f"{kind}{name}": tensor
            for kind, tensors in zip(("model.", "optimizer.", ""), files.values(), strict=True)
            for name, tensor in tensors.items()
            if in_shards or parameter_of(name) not in shapes
        }

    def require_finite(self, done: int) -> None:
        """Check weights, codebooks and optimizer state on all ranks. A collective.

        Raises:
            NonFiniteError: on every rank, when one holds NaN or infinity; names the tensors and the rank.
        """
        found = dist.gather_json(nonfinite_names(self.tensors()))
        bad = [
            f"{first_names(names)}{f' on rank {rank}' if dist.is_distributed() else ''}"
            for rank, names in enumerate(found)
            if names
        ]
        if bad:
            raise NonFiniteError(
                f"after step {done}: NaN or infinity in {'; '.join(bad[:3])}. This state is not saved, and no later "
                f"step could repair it. {self.newest()}. Lower optim.lr, lengthen optim.warmup_steps, or use "
                "train.precision: bf16 or fp32"
            )

    def require_equal(self, done: int) -> None:
        """Compare the bits of model and optimizer over all ranks. A collective.

        Codebooks that are not synchronised must have been made equal before. Of weights in shards there are no two
        copies to compare.

        Raises:
            DistributedError: on every rank, when they differ; names the ranks in the minority, and the tensors.
        """
        if not dist.is_distributed():
            return
        mine = checksums(self.tensors(in_shards=False))
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
        if self.is_shared:
            self._group = dist.BackgroundGroup(self._timeout_s)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:
                raise
            logger.exception("the last checkpoint could not be written")
        finally:
            self._thread.shutdown()
            if self._group is not None:
                self._group.close()

    def find(self) -> list[Path]:
        """Return the checkpoints of the run, oldest first, on rank 0; those at a URL may not be on this disk yet."""
        return checkpoint.checkpoints(self.folder) if self.mirror is None else self.mirror.checkpoints()

    def path(self, done: int) -> Path:
        """Return the folder of the checkpoint after ``done`` steps."""
        return self.folder / checkpoint.checkpoint_name(done)
