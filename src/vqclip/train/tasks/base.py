"""The base class of training tasks, their samples and their outputs.

    local = task.local(batch)                    the samples of this rank, on the device
    out   = task.run(network, local, step)       rows and sums; no collective
    sums  = task.reduce(out, local)              sums over all ranks, from one exchange
    terms = task.losses(out, sums, parts, step)  terms of the loss over the global batch, and their weights
    task.update(sums)                            after the optimizer's step

`vqclip.train.step.TrainStep` calls these and adds the rest: learning rate, microbatches, backward, clipping, guards.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vqclip.config import Modality
from vqclip.data import Batch
from vqclip.data.batch_maker import Tokenize
from vqclip.data.transforms import Size
from vqclip.errors import ConfigError
from vqclip.nn.precision import Precision
from vqclip.quantizers import Order, Quantizer, Stats, sync
from vqclip.tokenizer import Tokenizer
from vqclip.tokenizer.folder import WEIGHTS_FILE
from vqclip.towers import ImageTower, TextTower


@dataclass(frozen=True)
class RankBatch:
    """A rank's part of the global batch, or of a microbatch of it."""

    images: Tensor
    """``(B, 3, H, W)`` uint8."""
    tokens: Tensor
    """``(B, N)`` int64, without columns that no caption needs; not on the device where no network reads captions."""
    order: Order
    """Places of the samples in the global batch."""
    sizes: tuple[int, ...] | None
    """Samples of every rank in the global batch; None if they are not known."""
    keys: Tensor | None
    """See `pair_keys`."""
    features: Mapping[str, Tensor]
    """Name → ``(B, N, D)``: of frozen towers (``image``, ``text``), of teachers from the feature cache, and the vectors
    of the codes (``vectors``) for a pixel decoder."""
    captions: tuple[str, ...]
    """B captions."""

    def part(self, rows: slice) -> RankBatch:
        """Return some of its samples."""
        return dataclasses.replace(
            self,
            images=self.images[rows],
            tokens=self.tokens[rows],
            order=Order(self.order.places[rows], self.order.size),
            keys=None if self.keys is None else self.keys[rows],
            features={name: each[rows] for name, each in self.features.items()},
            captions=self.captions[rows],
        )

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class TaskOutput:
    """Output of a forward: what the losses need of the samples of a rank or of a microbatch.

    `vqclip.train.grad_cache` keeps it between the two passes.
    """

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → ``(B, ...)`` of every sample, such as embeddings that are compared with those of other samples."""
    stats: Mapping[str, Stats] = field(default_factory=dict)
    """Name → sums over the samples."""
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → tensor that does not depend on the samples, such as the temperature."""


class Task(ABC):
    """Model and losses of a run, and the parts of its step.

    Args:
        model: on its device, not wrapped; checkpoints contain its state, and its parameters are trained and averaged.
    """

    precision: Precision = "fp32"
    """Precision of a step; set by `TrainStep`."""

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def student(self) -> nn.Module:
        """Module that is compiled and wrapped: the model, or a module around it without weights of its own."""
        return self.model

    @property
    def discriminators(self) -> nn.Module | None:
        """Module that trains beside the model; in checkpoints, but neither averaged nor exported. None for none."""
        return None

    def require_shardable(self, what: str) -> None:
        """Raise ConfigError, which begins with ``what``, unless the weights of the task can be in shards."""
        raise ConfigError(f"{what} with this task; expected ddp, or task: contrastive")

    def clipped_apart(self) -> list[list[nn.Parameter]]:
        """Return the parameters in groups, each of which has a gradient norm and a limit of its own."""
        return [list(each.parameters()) for each in (self.model, self.discriminators) if each is not None]

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    # What a step computes.

    @abstractmethod
    def local(self, batch: Batch) -> RankBatch:
        """Move this rank's part of a batch to the device, and compute what does not depend on the trained weights."""

    @abstractmethod
    def run(self, network: nn.Module, local: RankBatch, step: int) -> TaskOutput:
        """Run the network, which is `student` as it trains or bare, on samples of this rank. No collective."""

    def shared(self) -> dict[str, Tensor]:
        """Return `TaskOutput.shared` with a graph, for the outputs of joined microbatches."""
        return {}

    def reduce(self, out: TaskOutput, local: RankBatch) -> dict[str, Stats]:
        """Return the sums of `TaskOutput.stats`, and perhaps further ones, over all ranks. One collective.

        `Stats.histograms` stay those of this rank.
        """
        return dict(zip(out.stats, sync([*out.stats.values()], local.order, histograms=False), strict=True))

    @abstractmethod
    def losses(
        self, out: TaskOutput, sums: Mapping[str, Stats], parts: Sequence[RankBatch], step: int
    ) -> tuple[dict[str, Tensor], dict[str, float | Tensor]]:
        """Return the unweighted terms of the loss over the global batch, and their weights, by name.

        Args:
            out: outputs for all samples of this rank.
            sums: result of `reduce`.
            parts: these samples by microbatch.
            step: number of the step, from 0.
        """

    def update(self, sums: Mapping[str, Stats]) -> None:
        """Update what no gradient trains, after the optimizer's step: the tensors of `tensors_to_update`, in place.

        By default, update the quantizers.
        """
        for name, quantizer in self.quantizers().items():
            quantizer.update(sums[name])

    def tensors_to_update(self) -> list[Tensor]:
        """Return the tensors that `update` changes; by default those of the quantizers."""
        return [tensor for each in self.quantizers().values() for tensor in (*each.parameters(), *each.buffers())]

    # What changes from step to step.

    def mark_dynamic(self, local: RankBatch) -> None:  # noqa: B027
        """Mark the axes of the samples whose lengths differ between batches, for `torch.compile`."""

    def move_to_step(self, step: int) -> bool:
        """Change which parts train, as in step number ``step``; return whether this changes anything."""
        return False

    def computes_anew(self, step: int) -> bool:
        """Return whether step number ``step`` computes something else than the one before, though the same parts train.

        Compiled code is then compiled once more.
        """
        return False

    def quantizers(self) -> dict[str, Quantizer]:
        """Return the quantizers that are trained, by name; they have statistics under these names."""
        return {}

    # What is reported.

    def figures(self, out: TaskOutput) -> dict[str, Tensor]:
        """Return () figures of a step's output, named as in ``metrics.jsonl``."""
        return {}

    @abstractmethod
    def metrics(self, sums: Mapping[str, Stats], step: int) -> dict[str, float | Tensor]:
        """Return the metrics of step number ``step``, named as in ``metrics.jsonl``; tensors are (), not read yet.

        Args:
            sums: those of the step, with the counts of codes over a window of steps.
            step: number of the step, from 0.
        """

    @abstractmethod
    def progress(self, batch_size: int) -> tuple[str, float | str, float]:
        """Return the metric by which a run is judged; its value, or the metric of it, untrained; its lowest value."""

    # Around the steps.

    @property
    @abstractmethod
    def tokenizers(self) -> dict[Modality, Tokenizer]:
        """The tokenizers that are trained or used, by modality."""

    @property
    def evaluated(self) -> nn.Module:
        """Model that evaluations get, and that `export` writes; by default the model that is trained."""
        return self.model

    @property
    def trained_parts(self) -> dict[str, nn.Module]:
        """Name → module, for the numbers of trained weights in the summary; by default the tokenizers."""
        return {name: each for name, each in self.tokenizers.items()}

    @property
    def size(self) -> Size:
        """Size of the images, as the image tower takes them."""
        tower = self.tokenizers["image"].tower
        assert isinstance(tower, ImageTower)
        return tower.size

    @property
    @abstractmethod
    def tokenize(self) -> Tokenize:
        """Captions → ``(B, T)`` int64, padded with 0, and their lengths before the cut; data workers get a copy."""

    @property
    def context_length(self) -> int | None:
        """Longest caption in tokens; None for a task that reads no captions."""
        return None

    @property
    def towers(self) -> dict[str, ImageTower | TextTower]:
        """Towers of the model by modality; their frozen tensors are stored once in a run."""
        return {}

    def weights_file(self, name: str) -> str:
        """Return the file of the model's part of a checkpoint that contains a tensor of the model."""
        return WEIGHTS_FILE

    @abstractmethod
    def write_model(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write the files of the model's part of a checkpoint beside its tensors, in a background thread.

        Args:
            folder: of this part, with the tensors.
            extra: of `FrozenWeights.section`.
        """

    def require_own(self, folder: Path) -> None:  # noqa: B027
        """Raise CheckpointError unless a checkpoint's part of the model belongs to this task's other parts."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the tokenizer to a folder, which is empty."""


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies to a GPU."""
    return torch.cuda.Stream(device)


def copy_to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy tensors of the host to a device; on a GPU without waiting for the computation of the step before.

    The copies run on a stream of their own, for which the current stream waits. They overlap if the tensors are in
    page-locked memory.
    """
    if device.type != "cuda":
        return {name: each.to(device) for name, each in tensors.items()}
    current, stream = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(stream):
        copies = {name: each.to(device, non_blocking=True) for name, each in tensors.items()}
    current.wait_stream(stream)
    for each in copies.values():
        each.record_stream(current)  # its memory is not used again before the step is done with it
    return copies
