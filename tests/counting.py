"""Counts what a block makes the host wait for: reads of tensors on the device, and collectives."""

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vqclip.dist import _collectives, _control, _weights

SOURCE = str(Path(_collectives.__file__).parents[1])

READS = {
    torch.ops.aten._local_scalar_dense.default,  # item, bool, float, int, tolist of a scalar
    torch.ops.aten.nonzero.default,  # the shape of the result is read from the device
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.bincount.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.lift_fresh.default,  # a tensor of the host, copied from memory that is not page-locked
}
"""Operators that wait for a GPU, whatever their inputs."""


class Counting(TorchDispatchMode):
    """Reads of tensors by the line of the package that causes them, and names of collectives with the number of calls.

    On a CPU, a read of a tensor that would be on the CPU in a training on GPUs counts as well, such as that of a
    batch's texts. `Tensor.tolist` is seen by its own patch: it calls no operator for more than one number. An index by
    a mask calls `nonzero`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func is torch.ops.aten.index.Tensor and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if func in READS or by_mask:
            self.reads[place()] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting() -> Iterator[Counting]:
    """Count in the block, collectives of DDP included only as the backward that contains them."""
    mode, to_list = Counting(), torch.Tensor.tolist

    def tolist(tensor):
        mode.reads[place()] += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return to_list(tensor)

    run = _collectives.run_collective

    def run_collective(name, *args, **kwargs):
        mode.collectives[name] += 1
        run(name, *args, **kwargs)

    with (
        mock.patch.object(torch.Tensor, "tolist", tolist),
        mock.patch.object(_collectives, "run_collective", run_collective),
        mock.patch.object(_control, "run_collective", run_collective),
        mock.patch.object(_weights, "run_collective", run_collective),
        mode,
    ):
        yield mode


def place() -> str:
    """Return file and function of the innermost line of the package that is on the stack."""
    frames = [each for each in traceback.extract_stack() if each.filename.startswith(SOURCE)]
    if not frames:
        return "outside of the package"
    last = frames[-1]
    return f"{Path(last.filename).relative_to(SOURCE)}:{last.name}"
