"""Shared part of the tasks: configuration and encoding of a set of images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.data import EvalBatch, EvalSet, Source
from vqclip.errors import ConfigError, DataError
from vqclip.evaluation.encode import Encoded, Encoder
from vqclip.evaluation.partition import RankPartition
from vqclip.evaluation.results import Result
from vqclip.model import CLIP
from vqclip.tokenizer import ImageTokenizer

T = TypeVar("T")


class ImagesConfig(Config):
    """A task on a set of images."""

    figures: ClassVar[tuple[str, ...]]
    """Names of the figures in each mode."""
    codes_figures: ClassVar[tuple[str, ...]] = ()
    """Names of further figures, which the mode codes only has alone."""
    needs_texts: ClassVar[bool] = True
    """Whether the task encodes texts; False: a model of images alone can be evaluated."""

    kind: str
    """Kind of the task."""
    name: str
    """Title of the results."""
    data: Any
    """The images."""
    batch_size: int = Field(256, ge=1, le=2**16)
    """Images or texts in a batch on each rank. The figures do not depend on it, up to rounding."""
    workers: int = Field(0, ge=0, le=512)
    """Worker processes per rank that decode images; 0 decodes in the evaluating process."""
    timeout_s: float = Field(240.0, ge=0, le=604_800)
    """Longest wait for a worker, in seconds; 0: no limit."""
    limit: int | None = Field(None, ge=1)
    """Number of images to use, evenly spread over the set; null uses all."""
    max_bad_fraction: float = Field(0.01, ge=0, lt=1)
    """Largest share of unusable images; they are left out, named in the log and counted in the results' notes. A larger
    share is an error."""

    def open(self, partition: RankPartition) -> Source:
        """Open the data on every rank; raise DataError if they cannot be used."""
        return partition.open(self.data)

    def require(self, model: nn.Module) -> None:
        """Raise ConfigError if a model has no part that this task needs."""
        self.require_texts(model)

    def require_texts(self, model: nn.Module) -> None:
        """Raise ConfigError if this task encodes texts, and a model has no text tokenizer."""
        if self.needs_texts and not hasattr(model, "text"):
            raise ConfigError(
                f"got kind {self.kind} for a tokenizer of images alone; expected a model with a text tokenizer, or "
                "kind pixels, knn or linear_probe"
            )

    def read(self, source: Source, transform: Callable[[Tensor], Tensor], partition: RankPartition) -> EvalSet:
        """Return this rank's images of an opened source, in batches."""
        return EvalSet(
            source,
            transform,
            self.batch_size,
            partition.rank,
            partition.world_size,
            self.workers,
            self.limit,
            self.max_bad_fraction,
            timeout_s=self.timeout_s,
        )

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Evaluate a model in each of the three modes; called by `vqclip.evaluation.evaluate`.

        Args:
            model: in evaluation mode.
            encoder: encoder; every rank of its partition must call this.
            name: prefix of the names of the files of ids.

        Raises:
            DataError: the data cannot be used; raised on every rank, with the file and sample.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class EncodedImages(Generic[T]):
    """Encoded images of a set, the same on every rank and in the order of the set."""

    source: Source
    """The opened data."""
    encoded: Encoded
    """Embeddings of the n images that can be used."""
    annotations: list[T]
    """Annotation of each."""
    indices: Tensor
    """``(n,)`` int64, on the CPU: number of each in the source."""
    notes: list[str]
    """Remarks for the reader."""


def encode_images(
    config: ImagesConfig,
    source: Source,
    tokenizer: ImageTokenizer,
    encoder: Encoder,
    name: str,
    annotations: Callable[[EvalBatch], list[T]],
    transform: Callable[[Tensor], Tensor] | None = None,
    inputs: Callable[[EvalBatch], Tensor] = lambda batch: batch.images,
) -> EncodedImages[T]:
    """Encode the images of a task; every rank encodes its part.

    Args:
        config: configuration of the task.
        source: the opened `config.data`.
        tokenizer: in evaluation mode.
        encoder: encoder; every rank of its partition must call this.
        name: names the file of ids.
        annotations: function of a batch that returns a JSON-able value for each image, such as its label.
        transform: transform of the images; None: that of the tokenizer.
        inputs: function of a batch, called after ``annotations``, that returns the images to encode.

    Raises:
        DataError: too many images cannot be used; on every rank.
    """
    partition = encoder.partition
    images = config.read(source, tokenizer.transform if transform is None else transform, partition)
    mine: list[tuple[int, T]] = []
    reasons: list[str] = []

    def pixels() -> Iterator[Tensor]:
        for batch in images:
            mine.extend(zip(batch.sample_ids.tolist(), annotations(batch), strict=True))
            reasons.extend(sample.reason for sample in batch.bad)
            if len(batch):
                yield inputs(batch)

    encoded = encoder(tokenizer, pixels(), name)
    found, reasons = partition.gather_items(mine), partition.gather_items(reasons)
    if len(reasons) > images.allowed:  # no single rank has too many
        shown = "\n".join(f"  {reason}" for reason in reasons[:5])
        raise DataError(f"{len(reasons)} of {images.size} evaluation samples cannot be used:\n{shown}")
    notes = [*getattr(source, "notes", ())]
    notes += [f"{len(reasons)} of {images.size} images cannot be used and are left out"] if reasons else []
    # Where images are left out, the ranks' rows are not in the order of the set.
    order = sorted(range(len(found)), key=lambda row: found[row][0])
    indices = torch.tensor([found[row][0] for row in order], dtype=torch.int64)
    own = torch.tensor([index for index, _ in mine], dtype=torch.int64)
    ordered = encoded.reorder(order, torch.searchsorted(indices, own))
    return EncodedImages(source, ordered, [found[row][1] for row in order], indices, notes)
