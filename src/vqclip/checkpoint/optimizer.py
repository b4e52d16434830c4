"""The state of AdamW as named tensors, and back, bit for bit.

A parameter has the name it was given to the optimizer with (``AdamW(model.named_parameters())``), or without names its
number, counted over all groups. The learning rate is a function of the step, and is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.optim import Optimizer

from vqclip.errors import CheckpointError
from vqclip.io.json_files import Strict, describe_differences, read_plain, write_plain
from vqclip.io.tensors import first_names, map_tensors, nonfinite_names, tensor_differences

OPTIMIZER_FILE = "optimizer.safetensors"
"""File of the optimizer's tensors in a checkpoint."""
_LAYOUT_FILE = "optimizer.json"
_OPTIONS = ("betas", "eps", "weight_decay", "lr_ratio")
"""Options of a group that must be equal; the others say how a step is computed."""
_SLOTS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter: a number of steps, and two tensors like the parameter."""
_SHOWN = 20

Shapes = Mapping[str, Sequence[int]]
"""Name → shape of a whole parameter, where the optimizer has this rank's rows of it."""
NO_SHAPES: Shapes = MappingProxyType({})


class _Group(Strict):
    options: dict[str, JsonValue]
    parameters: dict[str, str]


class _Layout(Strict):
    kind: str
    groups: list[_Group]


def write_layout(folder: Path, optimizer: Optimizer, shapes: Shapes = NO_SHAPES) -> None:
    """Write the class of an optimizer and its parameter groups, which `read_optimizer` compares.

    Args:
        folder: of the checkpoint.
        optimizer: an AdamW.
        shapes: of parameters in shards.
    """
    write_plain(folder / _LAYOUT_FILE, _describe(optimizer, shapes))


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor in the state of ``optimizer`` itself, by ``<parameter>/<key>``."""
    return {
        f"{name}/{key}": value
        for _, named in _named_groups(optimizer)
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def read_optimizer(folder: Path, optimizer: Optimizer, shapes: Shapes = NO_SHAPES) -> dict[str, Tensor]:
    """Return the tensors of an optimizer by ``<parameter>/<key>``, mapped from the file.

    Args:
        folder: of the checkpoint.
        optimizer: the running optimizer, with which all is compared.
        shapes: of its parameters in shards.

    Raises:
        CheckpointError: a file is missing or damaged, or its tensors do not fit or contain NaN or infinity; or it is
            the state of another kind of optimizer, or parameters or options differ. The message names them.
    """
    saved, path = read_plain(folder / _LAYOUT_FILE, _Layout).model_dump(), folder / OPTIMIZER_FILE
    differences = describe_differences(saved, _describe(optimizer, shapes), "in the checkpoint")
    _require_none(folder, [line.strip() for line in differences.values()])
    tensors = map_tensors(path)
    stored, expected = {name.rpartition("/")[0] for name in tensors}, dict[str, Tensor]()
    for _, named in _named_groups(optimizer):
        for name in named.keys() & stored:  # a parameter that no step has changed has no state
            like = torch.empty(shapes.get(name, named[name].shape), dtype=named[name].dtype, device="meta")
            outlines = (torch.empty((), dtype=torch.float32, device="meta"), like, like)
            expected |= {f"{name}/{key}": outline for key, outline in zip(_SLOTS, outlines, strict=True)}
    _require_none(path, tensor_differences(expected, tensors))
    if bad := nonfinite_names(tensors):
        raise CheckpointError(f"{path}: these tensors contain NaN or infinity: {first_names(bad)}")
    return tensors


def restore_optimizer(optimizer: Optimizer, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load the result of `read_optimizer` into the optimizer that it was compared with, bit for bit.

    Tensors keep their dtype (``Optimizer.load_state_dict`` casts them to the parameter's) and go to the device that
    the running optimizer needs them on, in the memory layout of the parameter.

    Args:
        optimizer: over the same named parameters, in the same groups.
        tensors: by name; of parameters in shards this rank's rows.
    """
    groups, found = _named_groups(optimizer), dict[str, Tensor]()
    places = {name: (parameter, group["fused"]) for group, named in groups for name, parameter in named.items()}
    for name, tensor in tensors:
        of, _, key = name.rpartition("/")
        parameter, fused = places[of]
        # torch keeps the number of steps on the CPU, but for a fused kernel. These iterate over memory: a moment needs
        # the strides of its parameter, as torch made it.
        device = "cpu" if key == "step" and not fused else parameter.device
        if tensor.shape == parameter.shape:
            like = torch.empty_like(parameter, dtype=tensor.dtype, device=device, requires_grad=False)
            found[name] = like.copy_(tensor)
        else:
            found[name] = tensor.to(device, copy=True)
    optimizer.state.clear()
    for name, (parameter, _) in places.items():
        if f"{name}/step" in found:
            optimizer.state[parameter] = {key: found[f"{name}/{key}"] for key in _SLOTS}


def _describe(optimizer: Optimizer, shapes: Shapes) -> dict[str, Any]:
    """Return JSON values that fit `_Layout`."""
    groups = [
        {
            "options": {key: group[key] for key in _OPTIONS if key in group},
            "parameters": {
                name: f"{str(each.dtype).removeprefix('torch.')} {list(shapes.get(name, each.shape))}"
                for name, each in named.items()
            },
        }
        for group, named in _named_groups(optimizer)
    ]
    return {"kind": type(optimizer).__name__, "groups": groups}


def _named_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Yield each parameter group with its parameters by name."""
    count = 0
    for group in optimizer.param_groups:
        names = group.get("param_names") or map(str, range(count, count + len(group["params"])))
        count += len(group["params"])
        yield group, dict(zip(names, group["params"], strict=True))


def _require_none(what: Path, problems: list[str]) -> None:
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError("\n  ".join([f"{what} does not fit the running optimizer:", *problems[:_SHOWN], *more]))
