"""What the tasks have in common: a set of images, how it is read, and what is done about images that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

from pydantic import Field
from torch import Tensor

from vqclip.config import Config
from vqclip.data import EvalBatch, EvalSet, Source
from vqclip.errors import DataError
from vqclip.evaluation.encode import Encoded, Encoder
from vqclip.tokenizer import ImageTokenizer

T = TypeVar("T")


class ImagesConfig(Config):
    """A task on a set of images."""

    figures: ClassVar[tuple[str, ...]]
    """Names of the figures that it finds in each mode."""

    kind: str
    """Kind of the task."""
    name: str
    """How results are titled."""
    data: Any
    """The images."""
    batch_size: int = Field(256, ge=1, le=2**16)
    """Images, or texts, at once on each rank. The figures do not depend on it, up to rounding."""
    workers: int = Field(0, ge=0, le=512)
    """Processes per rank that decode images; 0 does it in the evaluating process."""
    timeout_s: float = Field(240.0, ge=0, le=604_800)
    """Longest wait for a worker, in seconds; 0 waits for ever."""
    limit: int | None = Field(None, ge=1)
    """Use only so many images, evenly spread over the set; null uses all."""
    max_bad_fraction: float = Field(0.01, ge=0, lt=1)
    """Images that cannot be used are left out, named in the log and counted in the results' notes; more than this share
    of them is an error."""


def encode_images(
    config: ImagesConfig,
    source: Source,
    tokenizer: ImageTokenizer,
    encoder: Encoder,
    name: str,
    facts: Callable[[EvalBatch], list[T]],
) -> tuple[Encoded, list[T], list[str]]:
    """Encode the images of a task, every rank its share.

    Args:
        config: which images, and how they are read.
        source: what `config.data` built.
        tokenizer: in evaluation mode.
        encoder: how; every rank of its share must call this.
        name: names the file of ids.
        facts: a batch → one thing for each image that JSON can hold, such as its label.

    Returns:
        The images of all ranks, the facts in the same order, and notes for the reader.

    Raises:
        DataError: too many images cannot be used; on every rank.
    """
    share = encoder.share
    images = EvalSet(
        source,
        tokenizer.transform,
        config.batch_size,
        share.rank,
        share.world_size,
        config.workers,
        config.limit,
        config.max_bad_fraction,
        timeout_s=config.timeout_s,
    )
    found: list[T] = []
    reasons: list[str] = []

    def pixels() -> Iterator[Tensor]:
        for batch in images:
            found.extend(facts(batch))
            reasons.extend(sample.reason for sample in batch.bad)
            if len(batch):
                yield batch.images

    encoded = encoder(tokenizer, pixels(), name)
    found, reasons = share.gather_items(found), share.gather_items(reasons)
    if len(reasons) > images.allowed:  # no rank has too many, but all together have
        shown = "\n".join(f"  {reason}" for reason in reasons[:5])
        raise DataError(f"{len(reasons)} of {images.size} evaluation samples cannot be used:\n{shown}")
    notes = [f"{len(reasons)} of {images.size} images cannot be used and are left out"] if reasons else []
    return encoded, found, notes
