"""Zero-shot classification: the class whose prompts are nearest to the image (Radford et al. 2021).

Prompts are templates with the name of a class in them; both are those of the data, or come from files of one's own.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from vqclip.data.sources.class_names import DEFAULT_TEMPLATE, fill_templates, read_names, read_templates, read_text
from vqclip.errors import DataError
from vqclip.evaluation.details import Details, Section
from vqclip.evaluation.encode import MODES, Encoded, Encoder, Mode
from vqclip.evaluation.image_details import ImageDetails, class_accuracies, largest_confusions, make_details
from vqclip.evaluation.images import EncodedImages, ImagesConfig, LabelledData, encode_set
from vqclip.evaluation.intervals import class_intervals
from vqclip.evaluation.ranking import CLASS_FIGURES, DEPTHS, Classified, Ranks, class_figures, rank
from vqclip.evaluation.results import Result, common_modes, fill_modes
from vqclip.io.json_files import Strict, validation_problems
from vqclip.model import CLIP

Names = tuple[str, ...]
"""Names of one class, at least one."""

_NAMES = "one class name a line, or JSON (.json)"
_JSON: TypeAdapter[list[str | list[str]] | dict[str, str | list[str]]] = TypeAdapter(
    list[str | list[str]] | dict[str, str | list[str]], config=Strict.model_config
)


def _has_class(template: str) -> str:
    if "{c}" not in template:
        raise ValueError("expected {c} where the name of the class goes")
    return template


class ZeroShotConfig(ImagesConfig):
    """Top-1, top-5 and mean per class recall of zero-shot classification."""

    figures: ClassVar[tuple[str, ...]] = CLASS_FIGURES
    labelled: ClassVar[bool | None] = True

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

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Classify every image in each of the three modes; a figure uses the same mode for images and prompts."""
        images = encode_set(self, self.data, model, encoder, f"{name}-image", self.limit)
        image, right = images.encoded, images.labels
        with encoder.partition.raise_on_all_ranks():
            templates = self.templates or images.source.templates or (DEFAULT_TEMPLATE,)
            if self.templates_file is not None:
                path = self.templates_file.expanduser()
                templates = read_templates(path)
            classes: Sequence[Names] = [(each,) for each in images.source.classnames]
            if self.classes_file is not None:
                classes = read_classes(self.classes_file.expanduser(), images.source.classnames)
        prompts = [[*itertools.chain(*fill_templates(templates, each))] for each in classes]
        sizes = [len(each) for each in prompts]
        text = encoder.captions(model.text, list(itertools.chain(*prompts)), self.batch_size, f"{name}-text")

        modes, notes = common_modes(image, text)
        targets = {mode: class_embeddings(text.embeddings[mode], sizes) for mode in modes}
        with encoder.partition.raise_on_all_ranks():  # one rank may be asked to stop
            ranks = rank_classes(image, targets, right)
        found = {mode: Classified.of(each) for mode, each in ranks.items()}
        count = len(classes)
        twice = [each for each, times in Counter(itertools.chain(*map(set, classes))).items() if times > 1]
        notes = [*images.notes, *text.notes, *notes]
        if twice:
            told = "class names that occur more than once, which the model cannot tell apart"
            notes.insert(0, f"{told}: {', '.join(sorted(twice))}")
        names = [each[0] for each in classes]

        def details(maker: ImageDetails) -> Details:
            examples: tuple[Section, ...] = ()
            if "codes_only" in ranks:
                rows, candidates = image.embeddings["codes_only"], targets["codes_only"]
                each = torch.arange(count, device=candidates.device)
                labels, found_ranks = right.to(rows.device), ranks["codes_only"]
                examples = maker.examples(rows, candidates, labels, each, found_ranks, "image to class", names)
            return class_details(maker, images, names, found, examples)

        return Result(
            name=self.name,
            kind=self.kind,
            figures=fill_modes({mode: class_figures(each.hits, right) for mode, each in found.items()}),
            chance={f"top{k}": min(k, count) / count for k in DEPTHS} | {"mean_per_class": 1 / count},
            samples=len(right),
            classes=count,
            captions=sum(sizes),
            usage={"image": image.usage, "text": text.usage},
            notes=notes,
            details=make_details(model.image, encoder, images, names, details),
            intervals=class_intervals(CLASS_FIGURES, {mode: each.hits for mode, each in found.items()}, right),
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
        found[mode] = rank(rows, classes, labels.to(rows.device), each)
    return found


def class_details(
    maker: ImageDetails,
    images: EncodedImages,
    names: Sequence[str],
    found: Mapping[Mode, Classified],
    examples: tuple[Section, ...] = (),
) -> Details:
    """Return the details of any classification.

    Args:
        maker: maker of the details of the images.
        images: the images.
        names: of the classes.
        found: mode → classes that were found.
        examples: hits and misses.
    """
    codes = found.get("codes_only")
    tables = [class_accuracies(names, images.labels, {mode: found[mode].hits[0] for mode in MODES if mode in found})]
    if codes is not None:
        tables.append(largest_confusions(names, images.labels, codes.predicted))
    return Details(
        examples=examples,
        tables=tuple(table for table in tables if table.rows),
        codes=maker.codes(),
    )


def read_classes(path: Path, known: Sequence[str]) -> tuple[Names, ...]:
    """Read the names of all classes, in the order of ``known``, the data's own names.

    A ``.json`` contains a list with a name or a list of names for each class, or an object that maps the data's name of
    each class to them. Any other file has one name a line.

    Raises:
        DataError: the file cannot be read, or its classes are not those of the data.
    """
    if path.suffix.lower() != ".json":
        found: list[Names] = [(line,) for line in read_names(path)]
    else:
        try:
            content = _JSON.validate_python(json.loads(read_text(path, _NAMES)))
        except (ValueError, RecursionError) as error:
            problem = validation_problems(error)[0] if isinstance(error, ValidationError) else error
            raise DataError(
                f"{path}: {problem}; expected a list with a name or a list of names for each class, or an object that "
                "maps the data's class names to them"
            ) from error
        found = [_names(path, each) for each in _in_order(path, content, known)]
    if len(found) != len(known):
        raise DataError(f"{path}: got {len(found)} classes; expected {len(known)}, in the order of {_some(known)}")
    return tuple(found)


def _in_order(
    path: Path, content: list[str | list[str]] | dict[str, str | list[str]], known: Sequence[str]
) -> list[str | list[str]]:
    if isinstance(content, list):
        return content
    missing, unknown = sorted({*known} - {*content}), sorted({*content} - {*known})
    if missing or unknown:
        told = [f"{what} {_some(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise DataError(f"{path}: {'; '.join(told)}; expected the data's class names as keys: {_some(known)}")
    return [content[name] for name in known]


def _names(path: Path, names: str | list[str]) -> Names:
    found = (names,) if isinstance(names, str) else tuple(names)
    if not found or not all(name.isprintable() for name in found):
        raise DataError(
            f"{path}: got {list(found)} as names of a class; expected at least one, of characters that can be printed"
        )
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
