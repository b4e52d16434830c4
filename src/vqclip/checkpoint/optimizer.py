"""An optimizer's state as named tensors and JSON, and back, bit for bit."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.optim import Optimizer

from vqclip.checkpoint.background import Staging
from vqclip.checkpoint.plain import check_plain
from vqclip.errors import CheckpointError, NonFiniteError
from vqclip.io.json_files import Strict, read_plain, write_plain
from vqclip.io.tensors import first_names, nonfinite_names, open_tensors, read_shapes, save_tensors

logger = logging.getLogger(__name__)

_TENSORS = "optimizer.safetensors"
_LAYOUT = "optimizer.json"
# Options for how a step is computed, not for its result: the running optimizer's own are kept.
_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
# Set by the schedule before every step: restored without comparison.
_SCHEDULED = frozenset({"lr"})
_SHOWN = 5
# Keys that an optimizer's step expects in the state of a parameter.
_SLOTS = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}}


class _Parameter(Strict):
    shape: list[int]
    dtype: str
    scalars: dict[str, JsonValue]


class _Group(Strict):
    options: dict[str, JsonValue]
    parameters: dict[str, _Parameter]


class _Layout(Strict):
    kind: str
    groups: list[_Group]


@dataclass(frozen=True)
class OptimizerState:
    """Copy of an optimizer's state, independent of the optimizer.

    A parameter has the name it was given to the optimizer with (``AdamW(model.named_parameters())``), or without
    names its number, counted over all groups.
    """

    kind: str
    """Class name of the optimizer."""
    groups: list[dict[str, Any]]
    """For each parameter group ``options`` and ``parameters``: name to shape, dtype and scalars; JSON values."""
    tensors: dict[str, Tensor]
    """``<parameter>/<key>`` → contiguous tensor on the CPU."""


def pack_optimizer(optimizer: Optimizer, staging: Staging | None = None) -> OptimizerState:
    """Copy the state of ``optimizer`` to the CPU.

    Args:
        optimizer: its state is copied exactly.
        staging: memory to copy to, which the result uses until the next copy. Default: new memory.

    Raises:
        CheckpointError: a part of the state is neither a tensor nor a JSON value.
    """
    groups: list[dict[str, Any]] = []
    for group, named in _named_groups(optimizer):
        parameters: dict[str, Any] = {}
        for name, parameter in named.items():
            state = optimizer.state.get(parameter, {})
            scalars = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            check_plain(scalars, f"optimizer state of parameter {name!r}")
            parameters[name] = {**_outline(parameter), "scalars": scalars}
        groups.append({"options": _options(group), "parameters": parameters})
    return OptimizerState(type(optimizer).__name__, groups, (staging or Staging()).copy(optimizer_tensors(optimizer)))


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor in the state of ``optimizer`` itself, by ``<parameter>/<key>``."""
    return {
        f"{name}/{key}": value
        for _, named in _named_groups(optimizer)
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def write_optimizer(state: OptimizerState, folder: Path) -> None:
    """Write ``state`` into ``folder`` as ``optimizer.json`` and ``optimizer.safetensors``.

    Raises:
        NonFiniteError: a tensor contains NaN or infinity; nothing is written.
    """
    if bad := nonfinite_names(state.tensors):
        raise NonFiniteError(f"{folder}: optimizer state with NaN or infinity is not written: {first_names(bad)}")
    save_tensors(state.tensors, folder / _TENSORS)
    write_plain(folder / _LAYOUT, {"kind": state.kind, "groups": state.groups})


def read_optimizer(folder: Path, optimizer: Optimizer | None = None) -> OptimizerState:
    """Read the files of ``write_optimizer``.

    Args:
        folder: of the checkpoint.
        optimizer: the running optimizer; its sizes are compared before memory is allocated.

    Raises:
        CheckpointError: a file is missing or damaged, or its tensors do not fit or contain NaN or infinity.
    """
    layout, path = read_plain(folder / _LAYOUT, _Layout), folder / _TENSORS
    with open_tensors(path) as file:
        shapes = read_shapes(file)
        if optimizer is not None and (problems := list(_shape_problems(optimizer, shapes))):
            raise CheckpointError(f"{path} does not fit the running optimizer: {'; '.join(problems[:_SHOWN])}")
        tensors = {name: file.get_tensor(name) for name in shapes}
    if bad := nonfinite_names(tensors):
        raise CheckpointError(f"{path}: these tensors contain NaN or infinity: {first_names(bad)}")
    return OptimizerState(layout.kind, [group.model_dump() for group in layout.groups], tensors)


def restore_optimizer(optimizer: Optimizer, state: OptimizerState) -> None:
    """Load ``state`` into ``optimizer``; nothing changes unless everything fits.

    Tensors keep their dtype bit for bit (``Optimizer.load_state_dict`` casts them to the parameter's) and go to the
    device that the running optimizer needs them on, in the memory layout of the parameter. The learning rate is taken
    from ``state``; ``fused``, ``foreach`` and the like stay as they are in ``optimizer``.

    Args:
        optimizer: over the same named parameters, in the same groups.
        state: result of ``pack_optimizer``.

    Raises:
        CheckpointError: another kind of optimizer, or parameters or options that differ; the message names them.
    """
    if type(optimizer).__name__ != state.kind:
        raise CheckpointError(f"the checkpoint is of {state.kind}, the running optimizer is {type(optimizer).__name__}")
    running = list(_named_groups(optimizer))
    problems = [
        *_parameter_problems(running, state),
        *_option_problems(running, state),
        *_slot_problems(running, state),
    ]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"the checkpoint does not fit the running optimizer:\n{listed}")

    slots = _slots(state)
    optimizer.state.clear()
    for (group, named), saved in zip(running, state.groups, strict=True):
        for option in _SCHEDULED & group.keys() & saved["options"].keys():
            _set_option(group, option, saved["options"][option])
        on_device = bool(group.get("fused") or group.get("capturable"))
        for name, parameter in named.items():
            values = dict(saved["parameters"][name]["scalars"])
            for key, tensor in slots.get(name, {}).items():
                stays = key == "step" and not on_device  # torch keeps the step counter on the CPU unless told otherwise
                values[key] = _place(tensor, parameter, torch.device("cpu") if stays else parameter.device)
            if values:
                optimizer.state[parameter] = values


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _named_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Each parameter group with its parameters by name."""
    seen: set[str] = set()
    for group in optimizer.param_groups:
        numbers = range(len(seen), len(seen) + len(group["params"]))
        names = group.get("param_names") or [str(number) for number in numbers]
        named = dict(zip(names, group["params"], strict=True))
        if len(named) != len(names) or seen & named.keys():
            raise CheckpointError("two parameters of the optimizer have one name; names must be unique over all groups")
        seen |= named.keys()
        yield group, named


def _outline(parameter: Tensor) -> dict[str, Any]:
    return {"shape": list(parameter.shape), "dtype": str(parameter.dtype).removeprefix("torch.")}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        plain = value.item() if isinstance(value, Tensor) else value  # a learning rate may be a 0-d tensor
        check_plain(plain, f"optimizer option {key!r}")
        options[key] = list(plain) if isinstance(plain, tuple) else plain
    return options


def _slots(state: OptimizerState) -> dict[str, dict[str, Tensor]]:
    slots: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in state.tensors.items():
        name, _, key = full_name.rpartition("/")
        slots.setdefault(name, {})[key] = tensor
    return slots


def _place(tensor: Tensor, parameter: Tensor, device: torch.device) -> Tensor:
    if tensor.shape != parameter.shape:
        return tensor.to(device, copy=True)
    # Fused kernels iterate over memory: the state needs the strides of the parameter, as torch made it.
    return torch.empty_like(parameter, dtype=tensor.dtype, device=device, requires_grad=False).copy_(tensor)


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _parameter_problems(running: list[tuple[dict[str, Any], dict[str, Tensor]]], state: OptimizerState) -> list[str]:
    here = {name: (number, tensor) for number, (_, named) in enumerate(running) for name, tensor in named.items()}
    there = {
        name: (number, outline)
        for number, group in enumerate(state.groups)
        for name, outline in group["parameters"].items()
    }
    problems = []
    if missing := [name for name in here if name not in there]:
        problems.append(f"parameters that are not in the checkpoint: {first_names(missing)}")
    if added := [name for name in there if name not in here]:
        problems.append(f"parameters that only the checkpoint has: {first_names(added)}")
    if len(running) != len(state.groups):
        problems.append(f"{len(state.groups)} parameter groups in the checkpoint, {len(running)} here")
    for name in (name for name in here if name in there):
        (group, parameter), (saved_group, outline) = here[name], there[name]
        if group != saved_group:
            problems.append(f"parameter {name!r}: in group {saved_group} of the checkpoint, in group {group} here")
        for key, value in _outline(parameter).items():
            if value != outline[key]:
                problems.append(f"parameter {name!r}: {key} {outline[key]} in the checkpoint, {value} here")
    return problems


def _option_problems(running: list[tuple[dict[str, Any], dict[str, Tensor]]], state: OptimizerState) -> list[str]:
    problems = []
    for number, ((group, _), saved) in enumerate(zip(running, state.groups, strict=False)):
        here, there = _options(group), saved["options"]
        for key in sorted(here.keys() | there.keys()):
            if key in here and key in there and (here[key] == there[key] or key in _SCHEDULED):
                if key in _SCHEDULED and not _is_rate(there[key]):
                    problems.append(f"option {key!r} of group {number}: got {there[key]!r:.40}, expected a number")
                continue
            change = f"option {key!r} of group {number}: {there.get(key)!r} in the checkpoint, {here.get(key)!r} here"
            if key in _IMPLEMENTATION or key not in here or key not in there:
                logger.warning("%s: the running optimizer's is kept", change)
            else:
                problems.append(change)
    return problems


def _shape_problems(optimizer: Optimizer, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the tensors that are neither scalars nor have the shape of their parameter."""
    running = {name: tuple(tensor.shape) for _, named in _named_groups(optimizer) for name, tensor in named.items()}
    for full_name, shape in shapes.items():
        name = full_name.rpartition("/")[0]
        if name not in running:
            yield f"unexpected {full_name}"
        elif shape not in ((), running[name]):
            yield f"{full_name}: got shape {shape}, expected {running[name]}"


def _slot_problems(running: list[tuple[dict[str, Any], dict[str, Tensor]]], state: OptimizerState) -> Iterator[str]:
    """Yield the tensors that the optimizer's step could not use, for known kinds of optimizers."""
    expected = _SLOTS.get(state.kind)
    if expected is None:
        return
    slots = _slots(state)
    for (_, named), saved in zip(running, state.groups, strict=False):
        for name, parameter in named.items():
            found = slots.pop(name, {})
            if saved["parameters"].get(name, {}).get("scalars") or found.keys() not in (set(), expected):
                yield f"parameter {name!r}: its state is not {', '.join(sorted(expected))}"
            for key, tensor in found.items():
                shape = () if key == "step" else parameter.shape
                narrow = parameter.dtype in (torch.float16, torch.bfloat16) or key == "step"
                if tensor.shape != shape or tensor.dtype not in (parameter.dtype, torch.float32 if narrow else None):
                    yield f"{name}/{key}: got {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(shape)}"
    yield from (f"unexpected state of {name!r}" for name in slots)
