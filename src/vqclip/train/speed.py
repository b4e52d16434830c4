"""Speed and memory of a run, for every report.

Model FLOPs are counted, not estimated: those of the matrix products and convolutions of a forward of the parts that
train, times three for forward and backward (as in PaLM, https://arxiv.org/abs/2204.02311). Features of frozen towers,
recomputed activations and the second forward of microbatches are not part of them.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vqclip import dist
from vqclip.data import Batch
from vqclip.nn.precision import autocast
from vqclip.train.step import TrainStep

__all__ = ["SpeedMeter"]

_SAMPLES = 64
"""Samples at most whose FLOPs are counted."""


class SpeedMeter:
    """Model FLOPs a second, their share of the device's peak, and memory.

    Args:
        peak_tflops: most TFLOP/s of a process's device; None: no share is computed.
    """

    def __init__(self, peak_tflops: float | None):
        self._peak = peak_tflops
        self._flops: float | None = None
        """Model FLOPs of a sample, forward and backward; None before they are counted."""

    def count(self, step: TrainStep[Any], batch: Batch) -> None:
        """Count the FLOPs of a few samples of the first batch that has any. With weights in shards a collective."""
        if self._flops is not None:
            return
        local = step.task.local(batch)
        part = local.part(slice(0, min(len(local), _SAMPLES)))
        with torch.no_grad(), autocast(step.device, step.precision), _FlopCounter() as counter:
            step.task.run(step.task.student, part, batch.step)
        self._flops = 3 * counter.total / max(len(part), 1)

    def figures(self, images_per_second: float, tokens: float, device: torch.device) -> dict[str, float]:
        """Return the figures of a process.

        They are ``tokens_per_second`` if there are tokens, ``tflops_per_second``, ``mfu`` (0..1) if the peak is known,
        and ``memory_gib``.

        Args:
            images_per_second: of all processes.
            tokens: number of image and text tokens of a sample that the quantizers get, padding left out.
            device: of the step. On a GPU the memory is the largest that PyTorch has allocated there since the start of
                the run, on a CPU the largest resident memory of this process without its data workers.
        """
        assert self._flops is not None
        images = images_per_second / dist.world_size()
        rate = self._flops * images / 1e12
        figures = {"tokens_per_second": tokens * images} if tokens else {}
        figures |= {"tflops_per_second": rate, "memory_gib": _peak_memory(device) / 2**30}
        return figures if self._peak is None else {**figures, "mfu": rate / self._peak}


class _FlopCounter(TorchDispatchMode):
    """Count the FLOPs of a block by PyTorch's formulas. Its own counter fails in modules that switch gradients on."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
