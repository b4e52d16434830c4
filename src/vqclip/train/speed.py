"""Speed and memory of a run, for every report: images per second, time spent waiting, FLOPs.

Model FLOPs are counted, not estimated: those of the matrix products and convolutions of a forward of the parts that
train, times three for forward and backward (as in PaLM, https://arxiv.org/abs/2204.02311). Features of frozen towers,
recomputed activations and the second forward of microbatches are not part of them.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vqclip import dist
from vqclip.data import Batch
from vqclip.nn.precision import autocast
from vqclip.train.step import TrainStep

Item = TypeVar("Item")

_SAMPLES = 64
"""Samples at most whose FLOPs are counted."""


@dataclass
class Clock:
    """Stopwatch for a loop: time between two reports, and the part of it spent waiting for the next item.

    The first item is not counted: it includes the start of workers and the warm-up.
    """

    samples: int = 0
    measured_s: float = 0.0
    waited_s: float = 0.0
    total_samples: int = 0
    total_s: float = 0.0
    total_waited_s: float = 0.0
    _since: float | None = field(default=None, repr=False)

    def time_waits(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``, and add up the time that the loop waits for them."""
        asked = time.perf_counter()
        for item in items:
            if self._since is not None:
                self.waited_s += time.perf_counter() - asked
            yield item
            asked = time.perf_counter()

    def count(self, samples: int) -> None:
        """Add the samples of one finished step."""
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self.samples += samples

    @property
    def runs(self) -> bool:
        """True if the time of the next step counts."""
        return self._since is not None

    def lap(self, exchanged_s: float) -> dict[str, float]:
        """Return figures since the last lap; empty without a step.

        Args:
            exchanged_s: seconds that the steps spent in collectives.

        Returns:
            ``images_per_second``, and the parts (0..1) of the time that are ``data_wait`` and ``exchange_wait``.
        """
        self._measure()
        if self.samples == 0:
            return {}
        elapsed = max(self.measured_s, 1e-9)
        figures = {"images_per_second": self.samples / elapsed, "data_wait": self.waited_s / elapsed}
        figures["exchange_wait"] = exchanged_s / elapsed
        self.total_samples += self.samples
        self.total_s += elapsed
        self.total_waited_s += self.waited_s
        self.samples, self.measured_s, self.waited_s = 0, 0.0, 0.0
        return figures

    def pause(self) -> None:
        """Stop the time until the end of the next step; call it before saving and evaluation."""
        self._measure()
        self._since = None

    def _measure(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self.measured_s += now - self._since
            self._since = now

    @property
    def overall(self) -> dict[str, float]:
        """Results of `lap` over all laps so far."""
        if self.total_s == 0:
            return {}
        return {
            "images_per_second": self.total_samples / self.total_s,
            "data_wait": self.total_waited_s / self.total_s,
        }


class SpeedMeter:
    """Model FLOPs a second, their share of the device's peak, and memory.

    Args:
        peak_tflops: most TFLOP/s of a process's device; None: no share is computed.
    """

    def __init__(self, peak_tflops: float | None):
        self._peak = peak_tflops
        self._flops: float | None = None
        """Model FLOPs of a sample, forward and backward; None before they are counted."""

    def count(self, step: TrainStep, batch: Batch) -> None:
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
