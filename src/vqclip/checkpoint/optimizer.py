"""The state of AdamW as named tensors and JSON, and back, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.optim import Optimizer

from vqclip.errors import CheckpointError
from vqclip.io.json_files import Strict, describe_differences, read_plain
from vqclip.io.tensors import (
    first_names,
    nonfinite_names,
    open_tensors,
    read_shapes,
    shape_differences,
    tensor_differences,
)

OPTIMIZER_FILE = "optimizer.safetensors"
"""File of the optimizer's tensors in a checkpoint."""
LAYOUT_FILE = "optimizer.json"
"""File of its parameter groups."""
# How a step is computed, and the rate that the schedule sets before every step: not compared.
_FREE = frozenset({"params", "param_names", "lr", "fused", "foreach", "capturable", "differentiable"})
_SLOTS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter: a number of steps, and two tensors like the parameter."""
_SHOWN = 20

Shapes = Mapping[str, Sequence[int]]
"""Name → shape of a whole parameter, where the optimizer has this rank's rows of it."""
NO_SHAPES: Shapes = MappingProxyType({})


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
    """State of an optimizer as a checkpoint has it.

    A parameter has the name it was given to the optimizer with (``AdamW(model.named_parameters())``), or without
    names its number, counted over all groups.
    """

    kind: str
    """Class name of the optimizer."""
    groups: list[dict[str, Any]]
    """For each parameter group ``options`` and ``parameters``: name to shape and dtype; JSON values."""
    tensors: Mapping[str, Tensor]
    """``<parameter>/<key>`` → tensor."""


def optimizer_layout(optimizer: Optimizer, shapes: Shapes = NO_SHAPES) -> dict[str, Any]:
    """Return ``kind`` and ``groups`` of `OptimizerState`: all of it but the tensors.

    Args:
        optimizer: an AdamW.
        shapes: of parameters in shards.
    """
    groups = [
        {
            "options": {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
            "parameters": {
                name: {
                    "shape": list(shapes.get(name, each.shape)),
                    "dtype": str(each.dtype).removeprefix("torch."),
                    "scalars": {},
                }
                for name, each in named.items()
            },
        }
        for group, named in _named_groups(optimizer)
    ]
    return {"kind": type(optimizer).__name__, "groups": groups}


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor in the state of ``optimizer`` itself, by ``<parameter>/<key>``."""
    return {
        f"{name}/{key}": value
        for _, named in _named_groups(optimizer)
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def read_optimizer(folder: Path, optimizer: Optimizer | None = None, shapes: Shapes = NO_SHAPES) -> OptimizerState:
    """Read the state of an optimizer; its tensors are mapped from the file.

    Args:
        folder: of the checkpoint.
        optimizer: the running optimizer, with which all is compared: sizes before memory is allocated.
        shapes: of its parameters in shards.

    Raises:
        CheckpointError: a file is missing or damaged, or its tensors do not fit or contain NaN or infinity; or it is
            the state of another kind of optimizer, or parameters or options differ. The message names them.
    """
    layout, path = read_plain(folder / LAYOUT_FILE, _Layout), folder / OPTIMIZER_FILE
    groups = [group.model_dump() for group in layout.groups]
    if optimizer is not None:
        _require_same_layout(folder, {"kind": layout.kind, "groups": groups}, optimizer_layout(optimizer, shapes))
    with open_tensors(path) as file:
        stored = read_shapes(file)
        expected = {} if optimizer is None else _expected_tensors(optimizer, stored, shapes)
        if optimizer is not None:
            wanted = {name: tuple(tensor.shape) for name, tensor in expected.items()}
            _require_none(path, shape_differences(wanted, stored))
        tensors = {name: file.get_tensor(name) for name in stored}
    if optimizer is not None:
        _require_none(path, tensor_differences(expected, tensors))
    if bad := nonfinite_names(tensors):
        raise CheckpointError(f"{path}: these tensors contain NaN or infinity: {first_names(bad)}")
    return OptimizerState(layout.kind, groups, tensors)


def restore_optimizer(optimizer: Optimizer, state: OptimizerState) -> None:
    """Load the result of `read_optimizer` into the optimizer that it was compared with, bit for bit.

    Tensors keep their dtype (``Optimizer.load_state_dict`` casts them to the parameter's) and go to the device that
    the running optimizer needs them on, in the memory layout of the parameter. The learning rate is taken from
    ``state``; ``fused``, ``foreach`` and the like stay as they are in ``optimizer``.

    Args:
        optimizer: over the same named parameters, in the same groups.
        state: with this rank's rows of the tensors of parameters in shards.
    """
    optimizer.state.clear()
    for (group, named), saved in zip(_named_groups(optimizer), state.groups, strict=True):
        group["lr"] = saved["options"]["lr"]
        for name, parameter in named.items():
            slots = {key: f"{name}/{key}" for key in _SLOTS if f"{name}/{key}" in state.tensors}
            if slots:
                optimizer.state[parameter] = {
                    key: _place(state.tensors[stored], parameter, group, key) for key, stored in slots.items()
                }


def _place(tensor: Tensor, parameter: Tensor, group: Mapping[str, Any], key: str) -> Tensor:
    """Return a copy of a tensor of AdamW's state, on the device and in the memory layout that the optimizer needs.

    Fused kernels iterate over memory: a moment needs the strides of its parameter, as torch made it. torch keeps the
    number of steps on the CPU, but for a fused kernel.
    """
    device = "cpu" if key == "step" and not group["fused"] else parameter.device
    if tensor.shape != parameter.shape:
        return tensor.to(device, copy=True)
    return torch.empty_like(parameter, dtype=tensor.dtype, device=device, requires_grad=False).copy_(tensor)


def _require_same_layout(folder: Path, saved: dict[str, Any], running: dict[str, Any]) -> None:
    """Compare the kind, the parameters and the options of two optimizers; raise CheckpointError."""
    differences = describe_differences(_comparable(saved, running), _comparable(running, saved), "in the checkpoint")
    _require_none(folder, [line.strip() for line in differences.values()])
    rates = [group["options"].get("lr") for group in saved["groups"]]
    if any(type(rate) not in (int, float) or not abs(rate) < math.inf for rate in rates):
        raise CheckpointError(f"{folder}: the learning rates are {rates!r:.80}; expected numbers")


def _named_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Yield each parameter group with its parameters by name."""
    count = 0
    for group in optimizer.param_groups:
        names = group.get("param_names") or map(str, range(count, count + len(group["params"])))
        count += len(group["params"])
        yield group, dict(zip(names, group["params"], strict=True))


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


def _expected_tensors(optimizer: Optimizer, stored: Collection[str], shapes: Shapes) -> dict[str, Tensor]:
    """Return outlines of the state of those parameters of which a part is stored."""
    updated = {name.rpartition("/")[0] for name in stored}
    found: dict[str, Tensor] = {}
    for _, named in _named_groups(optimizer):
        for name in named.keys() & updated:
            like = torch.empty(shapes.get(name, named[name].shape), dtype=named[name].dtype, device="meta")
            outlines = (torch.empty((), dtype=torch.float32, device="meta"), like, like)
            found |= {f"{name}/{key}": outline for key, outline in zip(_SLOTS, outlines, strict=True)}
    return found


def _require_none(what: Path | str, problems: list[str]) -> None:
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError("\n  ".join([f"{what} does not fit the running optimizer:", *problems[:_SHOWN], *more]))
