"""Labelled images as embeddings with their labels: what zero-shot classification and the probes begin with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from vqclip.data import Source, SourceConfigBase
from vqclip.errors import DataError
from vqclip.evaluation.datasets import LabelledData, TrainingData, open_labelled
from vqclip.evaluation.details import Details
from vqclip.evaluation.encode import MODES, Encoder, Features, Mode
from vqclip.evaluation.examples import class_accuracies, confusion
from vqclip.evaluation.image_details import ImageDetails, make_details
from vqclip.evaluation.images import EncodedImages, ImagesConfig, encode_images
from vqclip.evaluation.intervals import class_intervals
from vqclip.evaluation.partition import RankPartition
from vqclip.evaluation.ranking import CLASS_FIGURES, DEPTHS, Classified, class_figures, rank
from vqclip.evaluation.results import Result, common_modes, fill_modes
from vqclip.model import CLIP
from vqclip.tokenizer import ImageTokenizer


class ProbeConfig(ImagesConfig):
    """A classifier that is fitted to the codes of labelled training images, and tested on others."""

    needs_texts: ClassVar[bool] = False

    data: LabelledData
    """The labelled test images."""
    train: TrainingData
    """The labelled training images, of the same classes."""
    train_limit: int | None = Field(None, ge=1)
    """Number of training images to use, evenly spread over the set; null uses all."""
    features: Features = "embedding"
    """Vector of an image. embedding: the joint embedding. tokens: the mean of the vectors that `decode` returns."""

    @model_validator(mode="after")
    def _has_other_training_images(self) -> ProbeConfig:
        if self.train == self.data:
            raise ValueError(
                "train: got the images of data; expected others, to fit the classifier to: set train.path, or the "
                "splits of both (data.split, train.split)"
            )
        return self

    def open(self, partition: RankPartition) -> Source:
        """Open the data on every rank; raise DataError if they have no classes. Return the test images."""
        open_labelled(self.train, partition, "train")
        return open_labelled(self.data, partition)


class LabelledImages(EncodedImages[int]):
    """Encoded images with their labels; see `EncodedImages`."""

    @functools.cached_property
    def labels(self) -> Tensor:
        """``(n,)`` int64, on the CPU."""
        return torch.tensor(self.annotations, dtype=torch.int64)


def encode_labelled(
    config: ImagesConfig,
    data: SourceConfigBase,
    model: CLIP,
    encoder: Encoder,
    name: str,
    limit: int | None,
    features: Features = "embedding",
    key: str = "data",
) -> LabelledImages:
    """Encode labelled images; every rank encodes its part. Tasks in a row that use the same images share the result.

    Args:
        config: batch size, workers and tolerance.
        data: the images.
        model: in evaluation mode.
        encoder: encoder; every rank of its partition must call this.
        name: names the file of ids.
        limit: number of images; None: all.
        features: see `ProbeConfig.features`.
        key: key of the data in `config`, for messages.

    Raises:
        DataError: the data cannot be used, or has no labels; raised on every rank.
    """

    def encode() -> LabelledImages:
        source = open_labelled(data, encoder.partition, key)
        settings = config.model_copy(update={"limit": limit})
        reader = dataclasses.replace(encoder, features=features)
        images = encode_images(settings, source, model.image, reader, name, lambda batch: batch.labels.tolist())
        return LabelledImages(source, images.encoded, images.annotations, images.indices, images.notes)

    memo = (repr(data), limit, config.batch_size, config.max_bad_fraction, features)
    return encoder.memo.get(memo, encode)


def probe_result(
    config: ProbeConfig,
    model: CLIP,
    encoder: Encoder,
    train: LabelledImages,
    test: LabelledImages,
    found: Mapping[Mode, Classified],
) -> Result:
    """Return the result of a probe that classifies the test images as ``found``, in each mode.

    Chance is what a classifier finds that knows no more than how many training images each class has.
    """
    prefix = config.figures[0].removesuffix(CLASS_FIGURES[0])
    count = len(test.source.classnames)
    sizes = torch.bincount(train.labels, minlength=count).double()[:, None]
    each = torch.arange(count)
    by_class = rank(torch.ones(1, 1, dtype=torch.float64).expand(count, 1), sizes, each, each).hits(DEPTHS)
    chance = class_figures(by_class[:, test.labels], test.labels)
    rates = {mode: class_figures(classified.hits, test.labels) for mode, classified in found.items()}
    _, notes = common_modes(test.encoded)
    return Result(
        name=config.name,
        kind=config.kind,
        figures=fill_modes(
            {mode: {prefix + name: rate for name, rate in each.items()} for mode, each in rates.items()}
        ),
        chance={prefix + name: rate for name, rate in chance.items()},
        samples=len(test.labels),
        classes=count,
        captions=0,
        usage={"image": test.encoded.usage},
        notes=[f"training images: {note}" for note in train.notes] + test.notes + notes,
        details=labelled_details(model.image, encoder, test, test.source.classnames, config.figures, found),
    )


def labelled_details(
    tokenizer: ImageTokenizer,
    encoder: Encoder,
    images: LabelledImages,
    names: Sequence[str],
    figures: Sequence[str],
    found: Mapping[Mode, Classified],
    extend: Callable[[ImageDetails, Details], Details] = lambda maker, details: details,
) -> Details | None:
    """Return the details of a classification on rank 0, if the encoder makes them; every rank must call this.

    Args:
        tokenizer: the tokenizer of the images.
        encoder: encoder of the task.
        images: the images.
        names: of the classes.
        figures: names of the `CLASS_FIGURES`.
        found: mode → classes that were found.
        extend: function that adds further details.
    """

    def make(maker: ImageDetails) -> Details:
        hits = {mode: each.hits for mode, each in found.items()}
        codes = found.get("codes_only")
        details = Details(
            samples=len(images.labels),
            intervals=class_intervals(figures, hits, images.labels),
            classes=class_accuracies(names, images.labels, {mode: hits[mode][0] for mode in MODES if mode in hits}),
            confusion=None if codes is None else confusion(names, images.labels, codes.predicted),
            codes=maker.codes(),
        )
        return extend(maker, details)

    return make_details(tokenizer, encoder, images, lambda: [names[label] for label in images.annotations], make)


def encode_both(config: ProbeConfig, model: CLIP, encoder: Encoder, name: str) -> tuple[LabelledImages, LabelledImages]:
    """Encode the training and the test images of a probe.

    Raises:
        DataError: the data cannot be used, or the classes of the two differ; raised on every rank.
    """
    train = encode_labelled(
        config, config.train, model, encoder, f"{name}-train", config.train_limit, config.features, "train"
    )
    test = encode_labelled(config, config.data, model, encoder, f"{name}-image", config.limit, config.features)
    if train.source.classnames != test.source.classnames:
        few = [name for name in test.source.classnames if name not in train.source.classnames][:5]
        told = f"classes that only the test images have: {', '.join(few)}" if few else "other names or another order"
        raise DataError(
            f"{config.name}: got training images of {len(train.source.classnames)} classes and test images of "
            f"{len(test.source.classnames)}, {told}; expected the same classes in the same order"
        )
    if not len(train.labels) or not len(test.labels):
        raise DataError(f"{config.name}: got {len(train.labels)} training and {len(test.labels)} test images")
    return train, test
