"""Zero-shot classification: the class whose prompts are nearest to the image (Radford et al. 2021)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, model_validator
from torch import Tensor

from vqclip.data import Source
from vqclip.data.sources.class_names import DEFAULT_TEMPLATE, ClassFolder, read_templates
from vqclip.evaluation.datasets import LabelledData, open_labelled
from vqclip.evaluation.details import Details, Interval
from vqclip.evaluation.encode import Encoded, Encoder, Mode
from vqclip.evaluation.image_details import ImageDetails
from vqclip.evaluation.images import ImagesConfig
from vqclip.evaluation.intervals import class_intervals
from vqclip.evaluation.labelled import LabelledImages, encode_labelled, labelled_details
from vqclip.evaluation.partition import RankPartition
from vqclip.evaluation.prompts import Names, fill, read_classes
from vqclip.evaluation.ranking import CLASS_FIGURES, DEPTHS, Classified, Ranks, class_figures, rank
from vqclip.evaluation.results import Result, common_modes, fill_modes
from vqclip.model import CLIP


def _has_class(template: str) -> str:
    if "{c}" not in template:
        raise ValueError("expected {c} where the name of the class goes")
    return template


class ZeroShotConfig(ImagesConfig):
    """Top-1, top-5 and mean per class recall of zero-shot classification."""

    figures: ClassVar[tuple[str, ...]] = CLASS_FIGURES

    kind: Literal["zero_shot"] = "zero_shot"
    name: str = "zero-shot"
    """Title of the results."""
    data: LabelledData
    """The labelled images."""
    templates: tuple[Annotated[str, AfterValidator(_has_class)], ...] = ()
    """Prompts with {c} for the class name; empty: those of `templates_file`, or of the data."""
    templates_file: Path | None = None
    """File with one prompt a line."""
    classes_file: Path | None = None
    """File of the names of the classes, one a line in the order of the data's labels, or JSON with one or several names
    for each; null: the names of the data."""

    @model_validator(mode="after")
    def _one_kind_of_templates(self) -> ZeroShotConfig:
        if self.templates and self.templates_file:
            raise ValueError("got templates and templates_file; expected one of them")
        return self

    def open(self, partition: RankPartition) -> Source:
        """Open the data on every rank; raise DataError if they have no classes."""
        return open_labelled(self.data, partition)

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Classify every image in each of the three modes; a figure uses the same mode for images and prompts."""
        images = encode_labelled(self, self.data, model, encoder, f"{name}-image", self.limit)
        image, right = images.encoded, images.labels
        with encoder.partition.raise_on_all_ranks():
            templates, classes = _prompts(self, images.source)
        prompts = [fill(templates, names) for names in classes]
        sizes = [len(each) for each in prompts]
        text = encoder.captions(model.text, list(itertools.chain(*prompts)), self.batch_size, f"{name}-text")

        modes, notes = common_modes(image, text)
        targets = {mode: class_embeddings(text.embeddings[mode], sizes) for mode in modes}
        with encoder.partition.raise_on_all_ranks():  # one rank may be asked to stop
            ranks = rank_classes(image, targets, right)
        found = {mode: Classified.of(each) for mode, each in ranks.items()}
        count = len(classes)
        return Result(
            name=self.name,
            kind=self.kind,
            figures=fill_modes({mode: class_figures(each.hits, right) for mode, each in found.items()}),
            chance={f"top{k}": min(k, count) / count for k in DEPTHS} | {"mean_per_class": 1 / count},
            samples=len(right),
            classes=count,
            captions=sum(sizes),
            usage={"image": image.usage, "text": text.usage},
            notes=_notes(classes) + images.notes + text.notes + notes,
            details=_details(model, encoder, images, [names[0] for names in classes], found, ranks, targets),
        )


def class_embeddings(prompts: Tensor, sizes: Sequence[int]) -> Tensor:
    """Average prompt embeddings ``(Σ sizes, E)``, class by class, to unit-norm ``(K, E)``."""
    return F.normalize(torch.stack([each.mean(dim=0) for each in prompts.split(list(sizes))]), dim=-1)


def rank_classes(images: Encoded, targets: Mapping[Mode, Tensor], labels: Tensor) -> dict[Mode, Ranks]:
    """Rank the classes for each image, in each mode.

    Args:
        images: n encoded images.
        targets: mode → ``(K, E)`` from `class_embeddings`.
        labels: ``(n,)`` int64.

    Raises:
        StopRequested: this rank has been asked to stop.
    """
    found: dict[Mode, Ranks] = {}
    for mode, classes in targets.items():
        rows, each = images.embeddings[mode], torch.arange(len(classes), device=classes.device)
        found[mode] = rank(rows, classes, labels.to(rows.device), each, with_wrong=True)
    return found


def _prompts(config: ZeroShotConfig, source: Source) -> tuple[Sequence[str], Sequence[Names]]:
    """Return the templates, and the names of each class."""
    templates = config.templates or source.templates or (DEFAULT_TEMPLATE,)
    if config.templates_file is not None:
        path = config.templates_file.expanduser()
        templates = read_templates(ClassFolder(path.parent), path.name)
    if config.classes_file is None:
        return templates, [(name,) for name in source.classnames]
    return templates, read_classes(config.classes_file.expanduser(), source.classnames)


def _notes(classes: Sequence[Names]) -> list[str]:
    """Return remarks on the data for the reader."""
    twice = [name for name, count in Counter(itertools.chain(*map(set, classes))).items() if count > 1]
    known = [f"class names that occur more than once, which the model cannot tell apart: {', '.join(sorted(twice))}"]
    return known if twice else []


def _details(
    model: CLIP,
    encoder: Encoder,
    images: LabelledImages,
    names: Sequence[str],
    found: dict[Mode, Classified],
    ranks: dict[Mode, Ranks],
    targets: dict[Mode, Tensor],
) -> Details | None:
    """Return the details on rank 0, if the encoder makes them; every rank must call this."""

    def extend(maker: ImageDetails, details: Details) -> Details:
        if "codes_only" not in ranks:
            return details
        rows, labels, classes = images.encoded.embeddings["codes_only"], images.labels, targets["codes_only"]
        each = torch.arange(len(classes), device=classes.device)
        examples = maker.examples(
            rows, classes, labels.to(rows.device), each, ranks["codes_only"], "image_to_class",
            image_of_query=range(len(rows)), texts=names,
            text_of_query=lambda row, right: names[right],
        )  # fmt: skip

        def figures(
            some: list[int], embeddings: Mapping[str, Tensor]
        ) -> dict[str, tuple[dict[str, float], dict[str, Interval]]]:
            own = labels[some]
            hits = {
                label: rank(each_image, classes, own.to(rows.device), each).hits(DEPTHS)
                for label, each_image in embeddings.items()
            }
            intervals = class_intervals(CLASS_FIGURES, hits, own)
            return {label: (class_figures(found, own), intervals[label]) for label, found in hits.items()}

        return details.model_copy(update={"examples": (examples,), "bits": maker.bits(figures)})

    return labelled_details(model.image, encoder, images, names, CLASS_FIGURES, found, extend)
