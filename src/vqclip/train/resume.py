"""Resuming a run: find the newest usable checkpoint, check that it belongs to this run, restore it on all ranks.

rank 0        newest checkpoint -> verify -> compare with the run; if it is damaged, the one before it
every rank    its rows of every tensor: read from the files, or received from rank 0
              compare the bits of all ranks
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vqclip import checkpoint, dist
from vqclip.checkpoint import OPTIMIZER_FILE, STATE_FILE, OptimizerState
from vqclip.errors import CheckpointError, ConfigError, OtherRunError
from vqclip.io.json_files import describe_differences, flatten, validate
from vqclip.io.tensors import first_names, map_tensors, nonfinite_names
from vqclip.quantizers.vectors import MAX_COUNTED_CODES
from vqclip.tokenizer.folder import read_weights
from vqclip.train.checkpointer import DISCRIMINATORS, MODEL_FILE, Checkpointer, RunState, parameter_of
from vqclip.train.ema import AVERAGE, checked_averages, read_averages
from vqclip.train.step import TrainStep

logger = logging.getLogger(__name__)


class Resumed(NamedTuple):
    """Position at which a run continues."""

    step: int
    """Steps done."""
    counts: dict[str, dict[str, int]]
    """The counts that `Checkpointer.save` stored."""
    best: dict[str, Any] | None
    """The best step that it stored."""


def resume(checkpointer: Checkpointer, allow: Sequence[str] = ()) -> Resumed:
    """Restore the newest usable checkpoint, if there is one. A collective.

    Rank 0 alone verifies it. It sends the tensors to the other ranks, which need no access to its disk; with weights in
    shards and a folder that all see, every rank reads its rows.

    Args:
        checkpointer: of the run; model, optimizer, scaler and guards of its step are restored.
        allow: settings that may differ from the checkpoint's, by their names or the beginnings of these.

    Returns:
        The position: step 0 without a checkpoint.

    Raises:
        CheckpointError: checkpoints exist but none is usable, or the newest belongs to another run.
        ConfigError: ``allow`` contains an unknown name.
    """
    step, files = checkpointer.step, dict[str, Mapping[str, Tensor]]()

    def find() -> dict[str, Any] | None:
        paths = checkpointer.find()
        found = checkpoint.use_latest(
            checkpointer.folder, lambda path: _verify(checkpointer.fetch(path), checkpointer, allow), paths
        )
        if found is None:
            checkpointer.frozen.write()
            return None
        facts, tensors = found
        files.update(tensors)
        checkpointer.set_aside_newer(facts["step"])
        best = facts["state"]["best"]
        if best is not None and (path := checkpointer.path(best["step"])) in paths:
            checkpointer.fetch(path)
        return facts

    found = dist.run_on_main(find)
    if found is None:
        checkpointer.require_equal(0, constants=True)
        return Resumed(0, {}, None)
    done, state = found["step"], RunState.model_validate(found["state"])
    rows = _rows_of_rank(checkpointer, Path(found["path"]).name, files)
    _restore_state(step, state, rows[STATE_FILE])
    _load_weights(checkpointer, rows)
    kind, groups = found["optimizer"]
    checkpoint.restore_optimizer(step.optimizer, OptimizerState(kind, groups, rows[OPTIMIZER_FILE]))
    if done:
        step.move_to_step(done - 1)  # as after the step that the checkpoint was saved after
    checkpointer.written = done
    checkpointer.require_equal(done, constants=True)
    logger.info("resumed from step %d: %s", done, found["path"])
    counts = {"replaced": dict(state.replaced), "caption_lengths": dict(state.caption_lengths)}
    return Resumed(done, counts, state.best.model_dump() if state.best else None)


def load_model(checkpointer: Checkpointer, done: int) -> None:
    """Load the weights of the checkpoint after ``done`` steps, and their averages; rank 0 verifies it. A collective.

    Raises:
        CheckpointError: on every rank, if it is missing or damaged.
    """
    step, files = checkpointer.step, dict[str, Mapping[str, Tensor]]()

    def verify() -> None:
        saved = checkpoint.load(checkpointer.path(done))
        files[STATE_FILE] = {} if step.ema is None else read_averages(saved, step.model)
        files[MODEL_FILE] = read_weights(saved.model_folder, checkpointer.model_tensors())

    dist.run_on_main(verify)
    _load_weights(checkpointer, _rows_of_rank(checkpointer, checkpointer.path(done).name, files))


def _verify(
    path: Path, checkpointer: Checkpointer, allow: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Mapping[str, Tensor]]]:
    """Read a checkpoint on rank 0, and compare it with the run; raises CheckpointError. The state is restored already.

    Returns:
        JSON values for the other ranks; file → its tensors, mapped from it.
    """
    step, saved = checkpointer.step, checkpoint.load(path)
    state = validate(path / "state.json", RunState, saved.state, section="state")
    _require_same(path, state.identity, checkpointer.identity, allow)
    checkpointer.frozen.require_equal(saved.model_folder)
    weights = read_weights(saved.model_folder, checkpointer.model_tensors())
    optimizer = checkpoint.read_optimizer(path, step.optimizer, step.parallel.weights.shapes)
    tensors = saved.tensors(_most_numbers(step))
    try:
        if step.ema is not None:
            checked_averages(dict(step.model.named_parameters()), tensors)
        _restore_state(step, state, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path / 'state.json'}: cannot be used ({type(error).__name__}: {error})") from error
    facts = {"path": str(path), "step": saved.step, "state": state.model_dump()}
    facts["optimizer"] = [optimizer.kind, optimizer.groups]
    return facts, {MODEL_FILE: weights, OPTIMIZER_FILE: optimizer.tensors, STATE_FILE: tensors}


class _Rows(Mapping[str, Tensor]):
    """This rank's rows of the tensors in a file of a checkpoint. Reading one may be a collective.

    Args:
        step: whose weights the rows are of.
        tensors: the whole tensors, mapped from the file; on rank 0 alone, or on every rank.
        outlines: name → shape and type of every tensor, if rank 0 has to send them.
    """

    def __init__(
        self, step: TrainStep[Any], tensors: Mapping[str, Tensor], outlines: Mapping[str, tuple[list[int], str]] | None
    ):
        self._step, self._tensors, self._outlines = step, tensors, outlines
        self._names = dict.fromkeys(tensors if outlines is None else outlines)

    def __getitem__(self, name: str) -> Tensor:
        if self._outlines is None:
            whole = self._tensors[name]
        else:
            shape, dtype = self._outlines[name]
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=self._step.device)
            if dist.is_main():
                whole.copy_(self._tensors[name])
            dist.broadcast_(whole)
        return self._step.parallel.weights.rows(parameter_of(name), whole)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _rows_of_rank(checkpointer: Checkpointer, name: str, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, _Rows]:
    """Return this rank's rows of the files of a checkpoint. A collective.

    Args:
        checkpointer: of the run.
        name: of the checkpoint.
        files: file → tensors, on rank 0.
    """
    outlines = {
        file: {name: (list(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()}
        for file, tensors in files.items()
    }
    outlines = dist.broadcast_json(outlines)
    if dist.is_distributed() and not checkpointer.is_shared:
        return {file: _Rows(checkpointer.step, files.get(file, {}), each) for file, each in outlines.items()}
    with dist.raise_on_all_ranks():
        if not dist.is_main():
            folder = checkpointer.folder / name
            files = {file: map_tensors(folder / file) if each else {} for file, each in outlines.items()}
    return {file: _Rows(checkpointer.step, tensors, None) for file, tensors in files.items()}


def _load_weights(checkpointer: Checkpointer, rows: Mapping[str, _Rows]) -> None:
    """Load this rank's rows of the weights and of their averages. A collective."""
    step, stored = checkpointer.step, rows[MODEL_FILE]
    with torch.no_grad():
        for name, tensor in checkpointer.model_tensors().items():
            dist.local_rows(tensor).copy_(stored[name])
    for quantizer in step.task.quantizers().values():
        quantizer.load_state_dict(quantizer.state_dict())  # so that hooks derive attributes from it
    if step.ema is not None:
        step.ema.load({name: rows[STATE_FILE][name] for name in rows[STATE_FILE] if name.startswith(AVERAGE)})


def _restore_state(step: TrainStep[Any], state: RunState, tensors: Mapping[str, Tensor]) -> None:
    running = step.scaler.state_dict()
    if {name: type(value) for name, value in state.scaler.items()} != {n: type(v) for n, v in running.items()}:
        raise ValueError(f"scaler: got {sorted(state.scaler)}, expected numbers for {sorted(running)}")
    step.scaler.load_state_dict(dict(state.scaler))
    windows = {name: tensors[name] for name in tensors if not name.startswith((AVERAGE, DISCRIMINATORS))}
    step.guards.load_state_dict(state.guards, windows)
    if step.task.discriminators is not None:
        found = {name: tensors[name] for name in tensors if name.startswith(DISCRIMINATORS)}
        if bad := nonfinite_names(found):
            raise ValueError(f"these tensors contain NaN or infinity: {first_names(bad)}")
        step.task.discriminators.load_state_dict(
            {name.removeprefix(DISCRIMINATORS): tensor for name, tensor in found.items()}
        )


def _most_numbers(step: TrainStep[Any]) -> int:
    """Return a bound for the averages, the discriminators and the codebook windows of this model.

    Also for one with other codebooks, where the run allows it.
    """
    sizes = [size for quantizer in step.task.quantizers().values() for size in quantizer.codebook_sizes]
    windows = 2**24 + 2 * sum(1 + size for size in sizes if size <= MAX_COUNTED_CODES)
    modules = (step.model, step.task.discriminators)
    return windows + sum(each.numel() for module in modules if module is not None for each in module.parameters())


def _require_same(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any], allow: Sequence[str]) -> None:
    """Raise OtherRunError with every setting in which a checkpoint and this run differ and may not."""
    keys = sorted(flatten(saved).keys() | flatten(now).keys())
    for name in allow:
        if not any(_begins(key, name) for key in keys):
            raise ConfigError(
                f"run.resume_allow: got {name!r}; expected names among {', '.join(keys)}, or their beginnings"
            )
    differing = describe_differences(saved, now, "in the checkpoint")
    refused = [line for key, line in differing.items() if not any(_begins(key, name) for name in allow)]
    if refused:
        shown = "\n".join(refused[:20]) + (f"\n  ... and {len(refused) - 20} more" if len(refused) > 20 else "")
        raise OtherRunError(
            f"{path} belongs to another run, so resuming from it would not be exact:\n{shown}\n"
            "restore these, give this run another name (run.name=...), or list in run.resume_allow what may differ"
        )
    for line in differing.values():
        logger.warning("%s: allowed to differ:%s", path, line)


def _begins(key: str, name: str) -> bool:
    return key == name or (key.startswith(name) and key[len(name)] in ".[ ")
