"""Zero-shot classification: the class whose prompts are nearest to the image (Radford et al. 2021)."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import AfterValidator
from torch import Tensor

from vqclip.data import Source
from vqclip.evaluation.datasets import LabelledData
from vqclip.evaluation.encode import Encoder, Mode
from vqclip.evaluation.image_folder import ImageFolder
from vqclip.evaluation.images import ImagesConfig, encode_images
from vqclip.evaluation.ranking import hit_rates
from vqclip.evaluation.results import Result, common_modes, fill_modes
from vqclip.model import CLIP

_DEPTHS = (1, 5)


def _has_class(template: str) -> str:
    if "{c}" not in template:
        raise ValueError("expected {c} where the name of the class goes")
    return template


class ZeroShotConfig(ImagesConfig):
    """Top-1 and top-5 of zero-shot classification."""

    figures: ClassVar[tuple[str, ...]] = tuple(f"top{k}" for k in _DEPTHS)

    kind: Literal["zero_shot"] = "zero_shot"
    name: str = "zero-shot"
    """Title of the results."""
    data: LabelledData
    """The labelled images."""
    templates: tuple[Annotated[str, AfterValidator(_has_class)], ...] = ()
    """Prompts with {c} for the class name; empty: the prompts of the data."""

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Evaluate ``model``, which is in evaluation mode; called by `vqclip.evaluation.evaluate`."""
        return zero_shot(self, model, encoder, name)


def zero_shot(config: ZeroShotConfig, model: CLIP, encoder: Encoder, name: str) -> Result:
    """Classify every image in each of the three modes; a figure uses the same mode for images and prompts.

    Args:
        config: configuration of the task.
        model: in evaluation mode.
        encoder: encoder; every rank of its partition must call this.
        name: prefix of the names of the files of ids.

    Raises:
        DataError: the data cannot be used; raised on every rank, with the file and sample.
    """
    source = encoder.partition.open(config.data)
    templates = config.templates or source.templates
    image, labels, left_out = encode_images(
        config, source, model.image, encoder, f"{name}-image", lambda batch: batch.labels.tolist()
    )
    prompts = [template.replace("{c}", each) for each in source.classnames for template in templates]
    text = encoder.captions(model.text, prompts, config.batch_size, f"{name}-text")

    modes, notes = common_modes(image, text)
    right = torch.tensor(labels, dtype=torch.int64)
    found: dict[Mode, dict[str, float]] = {}
    with encoder.partition.raise_on_all_ranks():  # one rank may be asked to stop
        for mode in modes:
            classes = class_embeddings(text.embeddings[mode], len(templates))
            rows = image.embeddings[mode]
            groups = right.to(rows.device), torch.arange(len(classes), device=rows.device)
            found[mode] = dict(zip(config.figures, hit_rates(rows, classes, *groups, _DEPTHS), strict=True))
    count = len(source.classnames)
    return Result(
        name=config.name,
        kind=config.kind,
        figures=fill_modes(found),
        chance={f"top{k}": min(k, count) / count for k in _DEPTHS},
        samples=len(labels),
        classes=count,
        captions=len(prompts),
        usage={"image": image.usage, "text": text.usage},
        notes=_notes(source) + left_out + text.notes + notes,
    )


def class_embeddings(prompts: Tensor, templates: int) -> Tensor:
    """Average prompt embeddings ``(K · templates, E)``, class by class, to unit-norm ``(K, E)``."""
    return F.normalize(prompts.unflatten(0, (-1, templates)).mean(dim=1), dim=-1)


def _notes(source: Source) -> list[str]:
    """Return remarks on the data for the reader."""
    twice = [name for name, count in Counter(source.classnames).items() if count > 1]
    known = [f"class names that occur more than once, which the model cannot tell apart: {', '.join(twice)}"]
    return (known if twice else []) + (source.notes if isinstance(source, ImageFolder) else [])
