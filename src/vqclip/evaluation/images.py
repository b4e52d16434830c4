"""Sets of images, as configured, opened, and encoded: what every task begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.data import (
    EvalBatch,
    EvalSet,
    ScenesSourceConfig,
    Source,
    SourceConfig,
    SourceConfigBase,
    mask_credentials,
    open_source,
    open_sources,
)
from vqclip.data.held_out import HeldOutShare, PartOfSource
from vqclip.errors import ConfigError, DataError, printable
from vqclip.evaluation.encode import Encoded, Encoder, Features, RankPartition
from vqclip.evaluation.results import Result
from vqclip.model import CLIP
from vqclip.tokenizer import ImageTokenizer


def _prepare(data: SourceConfigBase, labelled: bool | None = None, split: str = "test") -> SourceConfigBase:
    """Return the data with the split of evaluation where none is named; raise ValueError if they cannot be used."""
    data.require_no_weight("evaluation")
    if getattr(data, "split", "") is None:
        split = "val" if isinstance(data, ScenesSourceConfig) and labelled is False else split
        data = data.model_copy(update={"split": split})
    if labelled is not None and (
        data.has_classes is (not labelled) or (getattr(data, "split", "") == "train" and data.kind == "scenes")
    ):
        raise ValueError(printable(_problem(data, labelled)))  # pydantic refuses bytes that are not UTF-8
    return data


def _problem(data: SourceConfigBase, labelled: bool) -> str:
    split = getattr(data, "split", None)
    where = f"{mask_credentials(str(path))}: " if (path := getattr(data, "path", None)) is not None else ""
    what = f"{where}kind {data.kind}" + (f" with split {split}" if split else "")
    if labelled:
        return f"{what} has captions, not classes; expected labelled images (or the task retrieval)"
    return f"{what} has classes, not captions of its own; expected captioned images (or the task zero-shot)"


AnyData: TypeAlias = Annotated[SourceConfig, AfterValidator(_prepare)]
"""Any kind of images, labelled or captioned: the split test where none is named."""
LabelledData: TypeAlias = Annotated[SourceConfig, AfterValidator(partial(_prepare, labelled=True))]
"""Any kind of labelled images."""
TrainingData: TypeAlias = Annotated[SourceConfig, AfterValidator(partial(_prepare, labelled=True, split="train"))]
"""Any kind of labelled images to fit a probe to: the split train where none is named."""
CaptionedData: TypeAlias = Annotated[SourceConfig, AfterValidator(partial(_prepare, labelled=False))]
"""Any kind of captioned images."""


def open_data(
    data: SourceConfigBase,
    partition: RankPartition,
    labelled: bool | None,
    key: str = "data",
    held_out: float | None = None,
) -> Source:
    """Open images on every rank of a partition.

    Args:
        data: the images.
        partition: ranks that open them.
        labelled: True: they must have classes; False: captions; None: either.
        key: key of the data in the configuration of a task; for any other than ``data``, `held_out` means the rest.
        held_out: see `ImagesConfig.held_out`.

    Raises:
        DataError: the data cannot be used, or have no classes, or captions that are prompts with class names.
    """
    source = open_source(data, key) if partition.world_size == 1 else open_sources([data], [key])[0]
    if (labelled is True and not source.classnames) or (labelled is False and source.templates):
        raise DataError(f"{key}: {_problem(data, labelled)}")
    if held_out is not None:
        with partition.raise_on_all_ranks():
            source = PartOfSource(source, held_out, held_out=key == "data")
    return source


class ImagesConfig(Config):
    """A task on a set of images."""

    figures: ClassVar[tuple[str, ...]]
    """Names of the figures in each mode."""
    codes_figures: ClassVar[tuple[str, ...]] = ()
    """Names of further figures, which the mode codes only has alone."""
    needs_texts: ClassVar[bool] = True
    """Whether the task encodes texts; False: a model of images alone can be evaluated."""
    labelled: ClassVar[bool | None] = None
    """Whether the images must have classes; False: captions; None: either."""

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
    held_out: HeldOutShare | None = None
    """Share of the images to use: those that training with the same `data.held_out` leaves out (probes are fitted to
    the others); null uses all."""
    max_bad_fraction: float = Field(0.01, ge=0, lt=1)
    """Largest share of unusable images; they are left out, named in the log and counted in the results' notes. A larger
    share is an error. Of fewer than 1,000 images as many as of 1,000 may be unusable, but at most a tenth, or one of
    fewer than ten."""

    def open(self, partition: RankPartition) -> Source:
        """Open the data on every rank; raise DataError if they cannot be used."""
        return open_data(self.data, partition, self.labelled, held_out=self.held_out)

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
class EncodedImages:
    """Encoded images of a set, the same on every rank and in the order of the set."""

    source: Source
    """The opened data."""
    encoded: Encoded
    """Embeddings of the n images that can be used."""
    annotations: list[Any]
    """Annotation of each."""
    indices: Tensor
    """``(n,)`` int64, on the CPU: number of each in the source."""
    notes: list[str]
    """Remarks for the reader."""

    @property
    def labels(self) -> Tensor:
        """``(n,)`` int64, on the CPU: the annotations of labelled images."""
        return torch.tensor(self.annotations, dtype=torch.int64)


def encode_images(
    config: ImagesConfig,
    source: Source,
    tokenizer: ImageTokenizer,
    encoder: Encoder,
    name: str,
    annotations: Callable[[EvalBatch], list[Any]],
    transform: Callable[[Tensor], Tensor] | None = None,
    inputs: Callable[[EvalBatch], Tensor] = lambda batch: batch.images,
) -> EncodedImages:
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
    mine: list[tuple[int, Any]] = []
    reasons: list[str] = []

    def pixels() -> Iterator[Tensor]:
        for batch in images:
            mine.extend(zip(batch.sample_ids.tolist(), annotations(batch), strict=True))
            reasons.extend(sample.reason for sample in batch.bad)
            if len(batch):
                yield inputs(batch)

    encoded = encoder(tokenizer, pixels(), name)
    found, reasons = partition.gather_items(mine), partition.gather_items(reasons)
    images.require_few_bad(reasons)  # no single rank has too many
    notes = [*getattr(source, "notes", ())]
    notes += [f"{len(reasons)} of {images.size} images cannot be used and are left out"] if reasons else []
    # Where images are left out, the ranks' rows are not in the order of the set.
    order = sorted(range(len(found)), key=lambda row: found[row][0])
    embeddings = encoded.embeddings
    if order != list(range(len(order))):
        places = torch.tensor(order, dtype=torch.int64)
        embeddings = {mode: each[places.to(each.device)] for mode, each in embeddings.items()}
    indices = torch.tensor([found[row][0] for row in order], dtype=torch.int64)
    own = torch.tensor([index for index, _ in mine], dtype=torch.int64)
    encoded = dataclasses.replace(encoded, embeddings=embeddings, rows=torch.searchsorted(indices, own))
    return EncodedImages(source, encoded, [found[row][1] for row in order], indices, notes)


def encode_set(
    config: ImagesConfig,
    data: SourceConfigBase,
    model: CLIP,
    encoder: Encoder,
    name: str,
    limit: int | None,
    features: Features = "embedding",
    key: str = "data",
) -> EncodedImages:
    """Encode images with their labels, or their captions; every rank encodes its part.

    Tasks in a row that use the same images share the result.

    Args:
        config: configuration of the task; of images with classes it gets the labels, unless it wants captions.
        data: the images.
        model: in evaluation mode.
        encoder: encoder; every rank of its partition must call this.
        name: names the file of ids.
        limit: number of images; None: all.
        features: see `vqclip.evaluation.probes.ProbeConfig.features`.
        key: key of the data in `config`, for messages.

    Raises:
        DataError: the data cannot be used; raised on every rank.
    """
    settings = (limit, config.batch_size, config.max_bad_fraction, features, config.held_out)
    memo, which = encoder.memo, (repr(data), key, config.labelled is False, *settings)
    found: EncodedImages | None = memo.pop(which, None)
    if found is None or (config.labelled and not found.source.classnames):  # which is refused
        source = open_data(data, encoder.partition, config.labelled, key, config.held_out)
        has_labels = bool(source.classnames) and config.labelled is not False

        def annotate(batch: EvalBatch) -> list[Any]:
            return batch.labels.tolist() if has_labels else [[*each] for each in batch.captions]

        limited = config.model_copy(update={"limit": limit})
        reader = dataclasses.replace(encoder, features=features)
        found = encode_images(limited, source, model.image, reader, name, annotate)
    memo[which] = found
    for former in [*memo][:-2]:  # a probe has two sets
        del memo[former]
    return found
