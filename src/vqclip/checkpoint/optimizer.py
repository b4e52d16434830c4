"""The state of AdamW as named tensors and JSON, and back, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.optim import Optimizer

from vqclip.checkpoint.background import Staging
from vqclip.errors import CheckpointError, NonFiniteError
from vqclip.io.json_files import Strict, describe_differences, read_plain, write_plain
from vqclip.io.tensors import (
    first_names,
    nonfinite_names,
    open_tensors,
    read_shapes,
    save_tensors,
    shape_differences,
    tensor_differences,
)

OPTIMIZER_FILE = "optimizer.safetensors"
"""File of the optimizer's tensors in a checkpoint."""
_LAYOUT = "optimizer.json"
# How a step is computed, and the rate that the schedule sets before every step: not compared.
_FREE = frozenset({"params", "param_names", "lr", "fused", "foreach", "capturable", "differentiable"})
_SLOTS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter: a number of steps, and two tensors like the parameter."""
_SHOWN = 20


class _Parameter(Strict):
    shape: list[int]
    dtype: str
    scalars: dict[str, JsonValue]
    """Always empty: AdamW's state consists of tensors."""


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
    """For each parameter group ``options`` and ``parameters``: name to shape and dtype; JSON values."""
    tensors: dict[str, Tensor]
    """``<parameter>/<key>`` → contiguous tensor on the CPU."""


def pack_optimizer(optimizer: Optimizer, staging: Staging | None = None) -> OptimizerState:
    """Copy the state of ``optimizer`` to the CPU.

    Args:
        optimizer: an AdamW; its state is copied exactly.
        staging: memory to copy to, which the result uses until the next copy. Default: new memory.
    """
    tensors = (staging or Staging()).copy(optimizer_tensors(optimizer))
    return OptimizerState(type(optimizer).__name__, _layout(optimizer), tensors)


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor in the state of ``optimizer`` itself, by ``<parameter>/<key>``."""
    return {
        f"{name}/{key}": value
        for _, named in _named_groups(optimizer)
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def write_optimizer(state: OptimizerState, folder: Path, has_tensors: bool = True) -> None:
    """Write ``state`` into ``folder`` as ``optimizer.json`` and, if it has the tensors, ``optimizer.safetensors``.

    Raises:
        NonFiniteError: a tensor contains NaN or infinity; nothing is written.
    """
    if bad := nonfinite_names(state.tensors):
        raise NonFiniteError(f"{folder}: optimizer state with NaN or infinity is not written: {first_names(bad)}")
    if has_tensors:
        save_tensors(state.tensors, folder / OPTIMIZER_FILE)
    write_plain(folder / _LAYOUT, {"kind": state.kind, "groups": state.groups})


def read_optimizer(folder: Path, optimizer: Optimizer | None = None) -> OptimizerState:
    """Read the files of ``write_optimizer``.

    Args:
        folder: of the checkpoint.
        optimizer: the running optimizer; its sizes are compared before memory is allocated.

    Raises:
        CheckpointError: a file is missing or damaged, or its tensors do not fit or contain NaN or infinity.
    """
    layout, path = read_plain(folder / _LAYOUT, _Layout), folder / OPTIMIZER_FILE
    with open_tensors(path) as file:
        shapes = read_shapes(file)
        expected = {} if optimizer is None else _expected_tensors(optimizer, shapes)
        if optimizer is not None:
            wanted = {name: tuple(tensor.shape) for name, tensor in expected.items()}
            _require_none(path, shape_differences(wanted, shapes))
        tensors = {name: file.get_tensor(name) for name in shapes}
    if optimizer is not None:
        _require_none(path, tensor_differences(expected, tensors))
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
        state: result of ``pack_optimizer``, whose tensors `read_optimizer` has compared with ``optimizer``.

    Raises:
        CheckpointError: another kind of optimizer, or parameters or options that differ; the message names them.
    """
    rates = checked_rates(optimizer, state)
    optimizer.state.clear()
    for (group, named), rate in zip(_named_groups(optimizer), rates, strict=True):
        group["lr"] = rate
        for name, parameter in named.items():
            found = {key: tensor for key in _SLOTS if (tensor := state.tensors.get(f"{name}/{key}")) is not None}
            if found:  # torch keeps the number of steps on the CPU, but for a fused kernel
                optimizer.state[parameter] = {
                    key: place_state(tensor, parameter, group, key) for key, tensor in found.items()
                }


def checked_rates(optimizer: Optimizer, state: OptimizerState) -> list[float]:
    """Return the learning rate of each group in ``state``, after comparing it with a running optimizer.

    Raises:
        CheckpointError: as for `restore_optimizer`.
    """
    saved = {"kind": state.kind, "groups": state.groups}
    running = {"kind": type(optimizer).__name__, "groups": _layout(optimizer)}
    differences = describe_differences(_comparable(saved, running), _comparable(running, saved), "in the checkpoint")
    _require_none("the checkpoint", [line.strip() for line in differences.values()])
    rates = [group["options"].get("lr") for group in state.groups]
    if any(type(rate) not in (int, float) or not abs(rate) < math.inf for rate in rates):
        raise CheckpointError(f"the learning rates in the checkpoint are {rates!r:.80}; expected numbers")
    return rates


def _named_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Yield each parameter group with its parameters by name."""
    count = 0
    for group in optimizer.param_groups:
        names = group.get("param_names") or map(str, range(count, count + len(group["params"])))
        count += len(group["params"])
        yield group, dict(zip(names, group["params"], strict=True))


def _layout(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the ``groups`` of `OptimizerState`."""
    return [
        {
            "options": {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
            "parameters": {
                name: {"shape": list(each.shape), "dtype": str(each.dtype).removeprefix("torch."), "scalars": {}}
                for name, each in named.items()
            },
        }
        for group, named in _named_groups(optimizer)
    ]


def _comparable(layout: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal in two layouts; versions of torch have further options."""
    known = {key for group in other["groups"] for key in group["options"]} - _FREE
    groups = [
        {
            "options": {key: value for key, value in group["options"].items() if key in known},
            "parameters": {name: f"{each['dtype']} {each['shape']}" for name, each in group["parameters"].items()},
        }
        for group in layout["groups"]
    ]
    return {"class": layout["kind"], "groups": groups}


def _expected_tensors(optimizer: Optimizer, stored: Collection[str]) -> dict[str, Tensor]:
    """Return outlines of the state of those parameters of which a part is stored."""
    updated = {name.rpartition("/")[0] for name in stored}
    found: dict[str, Tensor] = {}
    for _, named in _named_groups(optimizer):
        for name in named.keys() & updated:
            like = torch.empty_like(named[name], device="meta")
            outlines = (torch.empty((), dtype=torch.float32, device="meta"), like, like)
            found |= {f"{name}/{key}": outline for key, outline in zip(_SLOTS, outlines, strict=True)}
    return found


def place_state(tensor: Tensor, parameter: Tensor, group: Mapping[str, Any], key: str) -> Tensor:
    """Return a copy of a tensor of AdamW's state, on the device and in the memory layout that the optimizer needs.

    Fused kernels iterate over memory: a moment needs the strides of its parameter, as torch made it.

    Args:
        tensor: the state, or of weights in shards this rank's rows.
        parameter: of the running optimizer.
        group: its group there.
        key: of the state, such as ``exp_avg``.
    """
    device = "cpu" if key == "step" and not group["fused"] else parameter.device
    if tensor.shape != parameter.shape:
        return tensor.to(device, copy=True)
    return torch.empty_like(parameter, dtype=tensor.dtype, device=device, requires_grad=False).copy_(tensor)


def _require_none(what: Path | str, problems: list[str]) -> None:
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError("\n  ".join([f"{what} does not fit the running optimizer:", *problems[:_SHOWN], *more]))
