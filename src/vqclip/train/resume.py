"""Resuming a run: find the newest usable checkpoint, check that it belongs to this run, restore it on all ranks.

rank 0        newest checkpoint -> verify -> compare with the run; if it is damaged, the one before it
every rank    its rows of every tensor, which rank 0 sends one after the other
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
from vqclip.checkpoint import OPTIMIZER_FILE, STATE_FILE
from vqclip.checkpoint.optimizer import read_optimizer, restore_optimizer
from vqclip.errors import CheckpointError, ConfigError, OtherRunError
from vqclip.io.json_files import describe_differences, flatten, validate
from vqclip.io.tensors import first_names, nonfinite_names
from vqclip.quantizers.vectors import MAX_COUNTED_CODES
from vqclip.tokenizer.folder import read_weights
from vqclip.train.checkpointer import DISCRIMINATORS, MODEL_FILE, Checkpointer, RunState, parameter_of
from vqclip.train.ema import AVERAGE, averages_in, read_averages, require_averages
from vqclip.train.optim import set_lr
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

    Rank 0 alone verifies it. It sends the tensors to the other ranks, which need no access to its disk.

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
        mirror, paths = checkpointer.mirror, checkpointer.find()
        fetch = mirror.fetch if mirror is not None else Path
        found = checkpoint.use_latest(
            checkpointer.folder, lambda path: _verify(fetch(path), checkpointer, allow), paths
        )
        if found is None:
            checkpointer.frozen.write()
            return None
        path, state, tensors = found
        files.update(tensors)
        checkpoint.set_aside_newer(checkpointer.folder, checkpoint.step_of(path))
        if state.best is not None and (best := checkpointer.path(state.best.step)) in paths:
            fetch(best)
        return {"path": str(path), "state": state.model_dump()}

    found = dist.run_on_main(find)
    if found is None:
        checkpointer.require_equal(0)
        return Resumed(0, {}, None)
    path, state = Path(found["path"]), RunState.model_validate(found["state"])
    done = checkpoint.step_of(path)
    rows = _rows_of_rank(step, files)
    _restore_state(step, state, _load_weights(checkpointer, rows))
    restore_optimizer(step.optimizer, rows[OPTIMIZER_FILE])
    if done:  # as after the step that the checkpoint was saved after
        step.move_to_step(done - 1)
        set_lr(step.optimizer, step.schedule(done - 1))
    checkpointer.written = done
    checkpointer.require_equal(done)
    logger.info("resumed from step %d: %s", done, path)
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
        files[MODEL_FILE] = read_weights(saved.model_folder, checkpointer.model_tensors())
        averages = {} if step.ema is None else read_averages(saved, step.model)
        files[STATE_FILE] = {f"{AVERAGE}{name}": each for name, each in averages.items()}

    dist.run_on_main(verify)
    _load_weights(checkpointer, _rows_of_rank(step, files))


def _verify(
    path: Path, checkpointer: Checkpointer, allow: Sequence[str]
) -> tuple[Path, RunState, dict[str, Mapping[str, Tensor]]]:
    """Read a checkpoint on rank 0, and compare it with the run; raises CheckpointError. The state is restored already.

    Returns:
        The path; its state; file → its tensors, mapped from it.
    """
    step, saved = checkpointer.step, checkpoint.load(path)
    state = validate(path / "state.json", RunState, saved.state, section="state")
    _require_same(path, state.identity, checkpointer.identity, allow)
    checkpointer.frozen.require_equal(saved.model_folder)
    weights = read_weights(saved.model_folder, checkpointer.model_tensors())
    optimizer = read_optimizer(path, step.optimizer, step.weights.shapes)
    tensors = saved.tensors()
    total, most = sum(each.numel() for each in tensors.values()), _most_numbers(step)
    if total > most:  # before memory is taken
        raise CheckpointError(f"{path / STATE_FILE}: contains {total} numbers; expected at most {most} of this model")
    require_averages(dict(step.model.named_parameters()), averages_in(tensors))
    try:
        _restore_state(step, state, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path / 'state.json'}: cannot be used ({type(error).__name__}: {error})") from error
    return path, state, {MODEL_FILE: weights, OPTIMIZER_FILE: optimizer, STATE_FILE: tensors}


def _most_numbers(step: TrainStep) -> int:
    """Return a bound for the averages, the discriminators and the codebook windows of this model.

    Also for one with other codebooks, where the run allows it.
    """
    sizes = [size for quantizer in step.task.quantizers().values() for size in quantizer.codebook_sizes]
    windows = 2**24 + 2 * sum(1 + size for size in sizes if size <= MAX_COUNTED_CODES)
    modules = (step.model, step.task.discriminators)
    return windows + sum(each.numel() for module in modules if module is not None for each in module.parameters())


def _rows_of_rank(
    step: TrainStep, files: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Iterator[tuple[str, Tensor]]]:
    """Return for each file of a checkpoint the names and this rank's rows of its tensors. A collective.

    Every item is a collective too, in which rank 0 sends one whole tensor: all ranks run all iterators to their end, in
    the same order.

    Args:
        step: of the run.
        files: file → tensors, on rank 0.
    """
    outlines = dist.broadcast_json(
        {
            file: {name: (list(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()}
            for file, tensors in files.items()
        }
    )

    def read(file: str) -> Iterator[tuple[str, Tensor]]:
        for name, (shape, dtype) in outlines[file].items():
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=step.device)
            if dist.is_main():
                whole.copy_(files[file][name])
            rows = step.weights.rows(parameter_of(name), dist.broadcast_(whole))
            yield name, rows if rows is whole else rows.clone()  # so that nobody keeps the whole one

    return {file: read(file) for file in outlines}


def _load_weights(checkpointer: Checkpointer, rows: Mapping[str, Iterator[tuple[str, Tensor]]]) -> dict[str, Tensor]:
    """Load this rank's rows of the weights, their averages, and what the codebooks derive from theirs. A collective.

    Args:
        checkpointer: of the run.
        rows: result of `_rows_of_rank`.

    Returns:
        The tensors of the state.
    """
    step, own, state = checkpointer.step, checkpointer.model_tensors(), dict(rows[STATE_FILE])
    with torch.no_grad():
        for name, tensor in rows[MODEL_FILE]:
            dist.local_rows(own[name]).copy_(tensor)
    for quantizer in step.task.quantizers().values():
        quantizer.load_state_dict(quantizer.state_dict())
    if step.ema is not None:
        step.ema.load(averages_in(state))
    return state


def _restore_state(step: TrainStep, state: RunState, tensors: Mapping[str, Tensor]) -> None:
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


def _require_same(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any], allow: Sequence[str]) -> None:
    """Raise OtherRunError with every setting in which a checkpoint and this run differ and may not."""
    keys = sorted(flatten(saved).keys() | flatten(now).keys())
    for name in allow:
        if not any(_begins(key, name) for key in keys):
            raise ConfigError(
                f"run.resume_allow: got {name!r}; expected names among {', '.join(keys)}, or their beginnings"
            )
    differing = describe_differences(saved, now, "in the checkpoint")
    refused = {key: line for key, line in differing.items() if not any(_begins(key, name) for name in allow)}
    if [*refused] == ["train.steps"]:
        before, steps = (flatten(settings).get("train.steps") for settings in (saved, now))
        if isinstance(steps, int) and (done := checkpoint.step_of(path)) >= steps:
            raise OtherRunError(
                f"{path} has done {done} steps, and this run asks for {steps}; expected more, or another run.name=..."
            )
        raise OtherRunError(
            f"{path} is of a run of {before} steps, and this one asks for {steps}. To train on, with the "
            f"learning rates of a run of {steps}, the same command with this at its end:\n"
            "  'run.resume_allow=[train.steps]'\n"
            "or, for a new run, another run.name=..."
        )
    if refused:
        lines = [*refused.values()]
        shown = "\n".join(lines[:20]) + (f"\n  ... and {len(refused) - 20} more" if len(refused) > 20 else "")
        raise OtherRunError(
            f"{path} belongs to another run, so resuming from it would not be exact:\n{shown}\n"
            "restore these, give this run another name (run.name=...), or list in run.resume_allow what may differ"
        )
    for line in differing.values():
        logger.warning("%s: allowed to differ: %s", path, line.strip())


def _begins(key: str, name: str) -> bool:
    return key == name or (key.startswith(name) and key[len(name)] in ".[ ")
