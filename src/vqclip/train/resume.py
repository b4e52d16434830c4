"""Resuming a run: find the newest usable checkpoint, check that it belongs to this run, restore it on all ranks.

rank 0                                                every rank
newest checkpoint -> verify -> compare identity
                  -> load into model and optimizer -> receive them from rank 0 -> compare the bits of all ranks
                  or, with weights in shards       -> read its rows, or receive them
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vqclip import checkpoint, dist
from vqclip.checkpoint import OptimizerState
from vqclip.errors import CheckpointError, ConfigError, OtherRunError
from vqclip.io.json_files import describe_differences, flatten, validate
from vqclip.io.tensors import first_names, map_tensors, nonfinite_names
from vqclip.quantizers.usage import MAX_COUNTED_CODES
from vqclip.tokenizer.folder import load_weights, read_weights
from vqclip.train.checkpointer import DISCRIMINATORS, Checkpointer
from vqclip.train.ema import AVERAGE, checked_averages, read_averages
from vqclip.train.run_state import RunState
from vqclip.train.sharding import Stored
from vqclip.train.step import TrainStep, broadcast_module

logger = logging.getLogger(__name__)

_Outlines = Mapping[str, Sequence[Any]]
"""Shape and dtype of tensors by name."""


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

    Rank 0 alone reads it and sends it to the other ranks, which need no access to its disk.

    Args:
        checkpointer: of the run; model, optimizer, scaler and guards of its step are restored.
        allow: settings that may differ from the checkpoint's, by their names or the beginnings of these.

    Returns:
        The position: step 0 without a checkpoint.

    Raises:
        CheckpointError: checkpoints exist but none is usable, or the newest belongs to another run.
        ConfigError: ``allow`` contains an unknown name.
    """
    step, read = checkpointer.step, dict[str, Tensor]()

    def restore() -> dict[str, Any] | None:
        paths = checkpointer.find()
        found = checkpoint.use_latest(
            checkpointer.folder, lambda path: _restore(checkpointer.fetch(path), checkpointer, allow), paths
        )
        if found is None:
            checkpointer.frozen.write()
            return None
        saved, state, optimizer, tensors = found
        read.update(tensors)
        checkpointer.set_aside_newer(saved.step)
        if state.best is not None and (best := checkpointer.path(state.best.step)) in paths:
            checkpointer.fetch(best)
        return {
            "path": str(saved.path),
            "step": saved.step,
            "state": state.model_dump(),
            "optimizer": [optimizer.kind, optimizer.groups, _outline(optimizer.tensors)],
            "averages": _outline(_averages(tensors)),
        }

    restored = dist.run_on_main(restore)
    if restored is None:
        checkpointer.require_equal(0, constants=True)
        return Resumed(0, {}, None)
    done, state = restored["step"], RunState.model_validate(restored["state"])
    if step.sharding is None:
        broadcast_module(step.model)
        _broadcast_optimizer(step, *restored["optimizer"])
        tensors = _broadcast(read)
        if not dist.is_main():
            _restore_state(step, state, tensors)
    else:
        tensors = _broadcast({name: each for name, each in read.items() if not name.startswith(AVERAGE)})
        if not dist.is_main():
            _restore_state(step, state, tensors)
        path = checkpointer.folder / Path(restored["path"]).name
        _, groups, outline = restored["optimizer"]
        _load_shards(checkpointer, path, restored["averages"], (groups, outline))
    if done:
        step.move_to_step(done - 1)  # as after the step that the checkpoint was saved after
    checkpointer.written = done
    checkpointer.require_equal(done, constants=True)
    logger.info("resumed from step %d: %s", done, restored["path"])
    counts = {"replaced": dict(state.replaced), "caption_lengths": dict(state.caption_lengths)}
    return Resumed(done, counts, state.best.model_dump() if state.best else None)


def load_model(checkpointer: Checkpointer, done: int) -> None:
    """Load the weights of the checkpoint after ``done`` steps, and their averages; rank 0 reads it. A collective.

    Raises:
        CheckpointError: on every rank, if it is missing or damaged.
    """
    step, read = checkpointer.step, dict[str, Tensor]()

    def load() -> _Outlines:
        saved = checkpoint.load(checkpointer.path(done))
        if step.ema is not None:
            read.update(read_averages(saved, step.model))
        if step.sharding is not None:
            read_weights(saved.model_folder, _stored_tensors(checkpointer))
            return _outline(read)
        load_weights(saved.model_folder, step.model, checkpointer.frozen.names)
        if step.ema is not None:
            step.ema.load(read)
        return {}

    averages = dist.run_on_main(load)
    if step.sharding is not None:
        _load_shards(checkpointer, checkpointer.path(done), averages)
        return
    broadcast_module(step.model)
    tensors = _broadcast(read)
    if step.ema is not None and not dist.is_main():
        step.ema.load(tensors)


def _load_shards(
    checkpointer: Checkpointer, path: Path, averages: _Outlines, optimizer: tuple[list[Any], _Outlines] | None = None
) -> None:
    """Load this rank's rows of a checkpoint that rank 0 has verified. A collective.

    Args:
        checkpointer: of the run.
        path: of the checkpoint; only rank 0 need have it unless the run's folder is shared.
        averages: those in the checkpoint.
        optimizer: groups and tensors of the optimizer; None loads none.
    """
    step, sharding, everywhere = checkpointer.step, checkpointer.step.sharding, checkpointer.is_shared
    assert sharding is not None

    def map_file(file: str, outlines: _Outlines) -> Stored:
        typed = {name: (shape, _dtype(dtype)) for name, (shape, dtype) in outlines.items()}
        with dist.raise_on_all_ranks():
            return Stored(map_tensors(path / file) if everywhere or dist.is_main() else {}, typed, everywhere)

    sharding.load_model(map_file(checkpoint.MODEL_FILE, {}), checkpointer.frozen.names)
    if optimizer is not None:
        groups, outlines = optimizer
        sharding.load_optimizer(step.optimizer, groups, map_file(checkpoint.OPTIMIZER_FILE, outlines))
    if step.ema is not None:
        step.ema.load(sharding.averages(map_file(checkpoint.STATE_FILE, averages)) if averages else {})


def _restore(
    path: Path, checkpointer: Checkpointer, allow: Sequence[str]
) -> tuple[checkpoint.Checkpoint, RunState, OptimizerState, dict[str, Tensor]]:
    """Verify a checkpoint and load it into the running model and optimizer; raises CheckpointError."""
    step, saved = checkpointer.step, checkpoint.load(path)
    state = validate(path / "state.json", RunState, saved.state, section="state")
    _require_same(path, state.identity, checkpointer.identity, allow)
    checkpointer.frozen.require_equal(saved.model_folder)
    tensors = saved.tensors(_most_numbers(step))
    if step.sharding is None:
        load_weights(saved.model_folder, step.model, checkpointer.frozen.names)
        restored = saved.restore_optimizer(step.optimizer)
    else:
        read_weights(saved.model_folder, _stored_tensors(checkpointer))
        restored = saved.optimizer_for(step.sharding.optimizer)
    try:
        if step.sharding is not None and step.ema is not None:
            checked_averages(dict(step.model.named_parameters()), tensors)
        small = {name: each for name, each in tensors.items() if step.sharding is None or not name.startswith(AVERAGE)}
        _restore_state(step, state, small)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path / 'state.json'}: cannot be used ({type(error).__name__}: {error})") from error
    return saved, state, restored, tensors


def _stored_tensors(checkpointer: Checkpointer) -> dict[str, Tensor]:
    """Return the tensors of the model that checkpoints contain, for their shapes."""
    state = checkpointer.step.model.state_dict()
    return {name: each for name, each in state.items() if name not in checkpointer.frozen.names}


def _averages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if name.startswith(AVERAGE)}


def _restore_state(step: TrainStep[Any], state: RunState, tensors: Mapping[str, Tensor]) -> None:
    running = step.scaler.state_dict()
    if {name: type(value) for name, value in state.scaler.items()} != {n: type(v) for n, v in running.items()}:
        raise ValueError(f"scaler: got {sorted(state.scaler)}, expected numbers for {sorted(running)}")
    step.scaler.load_state_dict(dict(state.scaler))
    windows = {name: tensor for name, tensor in tensors.items() if not name.startswith((AVERAGE, DISCRIMINATORS))}
    step.guards.load_state_dict(state.guards, windows)
    if step.task.discriminators is not None:
        found = {name: each for name, each in tensors.items() if name.startswith(DISCRIMINATORS)}
        if bad := nonfinite_names(found):
            raise ValueError(f"these tensors contain NaN or infinity: {first_names(bad)}")
        step.task.discriminators.load_state_dict(
            {name.removeprefix(DISCRIMINATORS): tensor for name, tensor in found.items()}
        )
    if step.ema is not None:  # otherwise run.resume_allow has dropped them
        step.ema.load(tensors)


def _most_numbers(step: TrainStep[Any]) -> int:
    """Return a bound for the averages, the discriminators and the codebook windows of this model.

    Also for one with other codebooks, where the run allows it.
    """
    sizes = [size for quantizer in step.task.quantizers().values() for size in quantizer.codebook_sizes]
    windows = 2**24 + 2 * sum(1 + size for size in sizes if size <= MAX_COUNTED_CODES)
    modules = (step.model, step.task.discriminators)
    return windows + sum(each.numel() for module in modules if module is not None for each in module.parameters())


def _broadcast_optimizer(step: TrainStep[Any], kind: str, groups: list[dict[str, Any]], outline: _Outlines) -> None:
    """Copy rank 0's optimizer state to every rank, tensor by tensor and in place. A collective."""
    if not dist.is_main():  # tensors of one number each, until the state has its own memory
        tensors = {name: torch.zeros((), dtype=_dtype(dtype)).expand(shape) for name, (shape, dtype) in outline.items()}
        checkpoint.restore_optimizer(step.optimizer, OptimizerState(kind, groups, tensors))
    for tensor in checkpoint.optimizer_tensors(step.optimizer).values():
        dist.broadcast_(tensor)


def _outline(tensors: Mapping[str, Tensor]) -> _Outlines:
    return {name: (list(each.shape), str(each.dtype)) for name, each in tensors.items()}


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def _broadcast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return rank 0's tensors on every rank. A collective."""
    outline = dist.broadcast_json(_outline(tensors))
    if not dist.is_main():
        tensors = {name: torch.empty(shape, dtype=_dtype(dtype)) for name, (shape, dtype) in outline.items()}
    for tensor in tensors.values():
        dist.broadcast_(tensor)
    return tensors


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
