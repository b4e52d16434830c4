"""The state of an optimizer as named tensors, and back, bit for bit.

A parameter has the name it was given to the optimizer with (``AdamW(model.named_parameters())``), or without names its
number, counted over all groups. The learning rate is a function of the step, and is not stored.

Kinds differ in what they keep: tensors and numbers of each parameter, and some, such as LAMB, a count of steps in each
group. One step on zeros shows it (`first_state`), and a checkpoint must contain just that. Kind and
options are part of the identity of a run (`vqclip.train.resume`).
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vqclip.checkpoint import OPTIMIZER_FILE
from vqclip.errors import CheckpointError
from vqclip.io.tensors import first_names, map_tensors, nonfinite_names, tensor_differences

_COUNT = "step of the group"
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
_SHOWN = 20

Shapes = Mapping[str, Sequence[int]]
"""Name → shape of a whole parameter, where the optimizer has this rank's rows of it."""
NO_SHAPES: Shapes = MappingProxyType({})


def first_state(
    optimizer: Optimizer, group: Mapping[str, Any], like: Tensor, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return what an optimizer keeps of a parameter after a first step, with the ``step`` of its group if it has one.

    An optimizer like it, over one parameter of zeros, makes the step.

    Args:
        optimizer: of any kind; it stays as it is.
        group: one of its parameter groups.
        like: tensor with the shape, the strides and the dtype of the parameter.
        device: of the parameter.
    """
    parameter = nn.Parameter(torch.zeros_like(like, device=device))
    probe: Optimizer = object.__new__(type(optimizer))
    own = {name: copy.deepcopy(value) for name, value in group.items() if name not in ("step", "params")}
    own |= {"params": [parameter], "param_names": [""]}
    vars(probe).update(vars(optimizer) | {"state": defaultdict(dict), "param_groups": [own]})
    parameter.grad = torch.zeros_like(parameter)
    probe.step()
    return dict(probe.state[parameter]) | ({_COUNT: own["step"]} if "step" in own else {})


def state_bytes(optimizer: Optimizer, shapes: Shapes = NO_SHAPES) -> int:
    """Estimate the bytes of the whole state from a small matrix in each group; ``shapes`` as of `read_optimizer`."""
    total, probe = 0, torch.zeros(64, 64)
    for group, named in _named_groups(optimizer):
        state = first_state(optimizer, group, probe)
        held = sum(each.nbytes for each in state.values() if isinstance(each, Tensor) and each.ndim)
        sizes = (math.prod(shapes.get(name, each.shape)) * each.element_size() for name, each in named.items())
        total += sum(sizes) * held // probe.nbytes
    return total


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state of ``optimizer``, by ``<parameter>/<key>`` and ``groups/<number>/step``; numbers as tensors."""
    found = dict[str, Tensor]()
    for number, (group, named) in enumerate(_named_groups(optimizer)):
        if "step" in group:
            found[f"groups/{number}/step"] = _as_tensor(group["step"])
        for name, parameter in named.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = _as_tensor(value)
    return found


def read_optimizer(folder: Path, optimizer: Optimizer, shapes: Shapes = NO_SHAPES) -> dict[str, Tensor]:
    """Return the tensors of an optimizer, named as by `optimizer_tensors`, mapped from the file.

    Args:
        folder: of the checkpoint.
        optimizer: the running optimizer, with which all is compared.
        shapes: of its parameters in shards.

    Raises:
        CheckpointError: the file is missing or damaged, or its tensors do not fit, such as those of another kind of
            optimizer, or contain NaN or infinity. The message names them.
    """
    path = folder / OPTIMIZER_FILE
    tensors = map_tensors(path)
    stored = {name.rpartition("/")[0] for name in tensors}  # a parameter that no step has changed has no state
    for number, (_, named) in enumerate(_named_groups(optimizer)):
        if stored & named.keys():
            stored.add(f"groups/{number}")
    values = ((name, value) for name, _, _, value in _first_values(optimizer, shapes))
    expected = {name: _as_tensor(each).to("meta") for name, each in values if name.rpartition("/")[0] in stored}
    if problems := tensor_differences(expected, tensors):
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError("\n  ".join([f"{path} does not fit the running optimizer:", *problems[:_SHOWN], *more]))
    if bad := nonfinite_names(tensors):
        raise CheckpointError(f"{path}: these tensors contain NaN or infinity: {first_names(bad)}")
    return tensors


def restore_optimizer(optimizer: Optimizer, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load the result of `read_optimizer` into the optimizer that it was compared with, bit for bit.

    Tensors keep their dtype (``Optimizer.load_state_dict`` casts them to the parameter's) and go to the device that
    the running optimizer needs them on, in the memory layout that it gives them.

    Args:
        optimizer: over the same named parameters, in the same groups.
        tensors: by name; of parameters in shards this rank's rows.
    """
    found = dict(tensors)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.pop("step", None)
    for name, of, key, value in _first_values(optimizer):
        if name in found:
            stored = found.pop(name)
            holder = optimizer.state[of] if isinstance(of, Tensor) else of
            # Kernels iterate over memory: a moment keeps the strides that the optimizer gives it.
            holder[key] = value.copy_(stored) if isinstance(value, Tensor) else type(value)(stored.item())


def _first_values(
    optimizer: Optimizer, shapes: Shapes = NO_SHAPES
) -> Iterator[tuple[str, Tensor | dict[str, Any], str, Any]]:
    """Yield all values that the state can contain, as they are after a first step.

    Yields:
        Name in a checkpoint; parameter or group that the value belongs to; its key there; value.
    """
    for number, (group, named) in enumerate(_named_groups(optimizer)):
        for name, parameter in named.items():
            whole = torch.empty(shapes[name], dtype=parameter.dtype, device="meta") if name in shapes else parameter
            for key, value in first_state(optimizer, group, whole, parameter.device).items():
                if key == _COUNT:
                    yield f"groups/{number}/step", group, "step", value
                else:
                    yield f"{name}/{key}", parameter, key, value


def _as_tensor(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=_DTYPES[type(value)])


def _named_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Yield each parameter group with its parameters by name."""
    count = 0
    for group in optimizer.param_groups:
        names = group.get("param_names") or map(str, range(count, count + len(group["params"])))
        count += len(group["params"])
        yield group, dict(zip(names, group["params"], strict=True))
