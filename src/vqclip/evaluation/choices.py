"""Compositional sets: choose the caption of an image, and the image of a caption, among near misses.

Shapes: n choices of I images and C captions each; the i-th image belongs to the i-th caption.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor

from vqclip.data import RawSample, SourceConfigBase
from vqclip.data.sources.captions import collect_captions
from vqclip.data.sources.reader import read_image
from vqclip.errors import DataError, printable
from vqclip.evaluation.details import Details, Interval
from vqclip.evaluation.encode import Encoder
from vqclip.evaluation.images import ImagesConfig, encode_images
from vqclip.evaluation.ranking import SAME
from vqclip.evaluation.results import Result, common_modes, fill_modes
from vqclip.model import CLIP


class Choice(NamedTuple):
    """One question of a compositional set."""

    images: tuple[int, ...]
    """Numbers of its images in the source."""
    captions: tuple[str, ...]
    """Its captions; those after the last image's are wrong for every image."""
    category: str = ""
    """Category that it belongs to."""


class Choices(ABC):
    """A `vqclip.data.Source` of images, with the choices between them."""

    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    choices: Sequence[Choice]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an image, for messages."""

    @abstractmethod
    def image(self, index: int) -> bytes:
        """Read an image file; raises DataError."""

    def read(self, index: int) -> RawSample:
        """Read an image; see `Source.read`. Captions belong to the choices."""
        return RawSample(self.image(index), ("",))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Checksum of all choices and of the images' names."""
        text = repr((list(self.choices), [self.name(index) for index in range(len(self))]))
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        return {"kind": "choices", "samples": len(self), "sha256": digest}


class FileChoices(Choices):
    """Choices between images in files.

    Args:
        folder: contains the images.
        names: their paths in it.
        choices: the choices.
        where: file that contains the names, for messages.
        endings: of a file whose name lacks its ending.

    Raises:
        DataError: no such folder, or a path that leads out of it.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        choices: Sequence[Choice],
        where: Path,
        endings: Sequence[str] = (),
    ):
        if not folder.is_dir():
            raise DataError(f"{folder.absolute()}: no such folder; expected the images that {where} names")
        for name in names:
            parts = PurePosixPath(name)
            if parts.is_absolute() or ".." in parts.parts or not name.isprintable():
                raise DataError(f"{where}: got the image {name!r}; expected a path below {folder.absolute()}")
        self.choices = choices
        self._folder = folder
        self._names = [_with_ending(folder, name, endings) for name in names]

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """See `Choices.name`."""
        return printable(str(self._folder / self._names[index]), one_line=True)

    def image(self, index: int) -> bytes:
        """See `Choices.image`."""
        return read_image(self._folder / self._names[index], self.name(index))


def clean_caption(text: object, name: str) -> str:
    """Return a caption without surrounding blanks; raise DataError for a text that no tower can read."""
    if isinstance(text, list):
        raise DataError(f"{name}: got a list, expected one caption")
    return collect_captions({"caption": text}, ("caption",), name, "key", "damaged JSON")[0]


def _with_ending(folder: Path, name: str, endings: Sequence[str]) -> str:
    found = [name + ending for ending in ("", *endings) if (folder / (name + ending)).is_file()]
    return found[0] if found else name


class ChoicesData(SourceConfigBase):
    """Data of a compositional set; for evaluation only, since its captions are made to confuse."""

    @model_validator(mode="after")
    def _has_no_weight(self) -> ChoicesData:
        self.require_no_weight("evaluation")
        return self

    def build(self, cache: Path | None = None) -> Choices:
        """Open the data; see `SourceConfigBase.build`."""
        raise NotImplementedError


class ChoicesConfig(ImagesConfig):
    """A task on a compositional set."""

    data: ChoicesData
    """The set."""

    @model_validator(mode="after")
    def _uses_all(self) -> ChoicesConfig:
        if self.limit is not None:
            raise ValueError(f"got limit {self.limit}; expected null: this kind uses the whole set")
        return self

    def rates(self, scores: Tensor, choices: Sequence[Choice]) -> dict[str, tuple[float, Interval]]:
        """Return the figures of one mode with their 95 % confidence intervals.

        Args:
            scores: ``(n, I, C)`` similarities of the images and captions of each choice, on the CPU.
            choices: the n choices.
        """
        raise NotImplementedError

    def chance(self, categories: Sequence[str]) -> dict[str, float]:
        """Return the expectation of `rates` for random embeddings."""
        raise NotImplementedError

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Compare the images and captions of each choice in each of the three modes; see `ImagesConfig.run`."""
        source = self.open(encoder.partition)
        assert isinstance(source, Choices)
        images = encode_images(self, source, model.image, encoder, f"{name}-image", lambda batch: [None] * len(batch))
        image, notes = images.encoded, images.notes
        rows = {number: row for row, number in enumerate(images.indices.tolist())}
        choices = [choice for choice in source.choices if all(number in rows for number in choice.images)]
        if len(choices) < len(source.choices):
            left_out = len(source.choices) - len(choices)
            notes.append(f"{left_out} of {len(source.choices)} choices lack an image: left out")
        if not choices:
            raise DataError(f"{self.name}: no choice has all of its images")
        captions = list(dict.fromkeys(caption for choice in choices for caption in choice.captions))
        text = encoder.captions(model.text, captions, self.batch_size, f"{name}-text")
        number_of = {caption: number for number, caption in enumerate(captions)}
        left = torch.tensor([[rows[number] for number in choice.images] for choice in choices])
        right = torch.tensor([[number_of[caption] for caption in choice.captions] for choice in choices])
        modes, more = common_modes(image, text)
        categories = [choice.category for choice in choices]
        scores = {mode: image.embeddings[mode].cpu()[left] @ text.embeddings[mode].cpu()[right].mT for mode in modes}
        rates = {mode: self.rates(each, choices) for mode, each in scores.items()}
        intervals = {mode: {name: interval for name, (_, interval) in each.items()} for mode, each in rates.items()}
        asked = encoder.details is not None and encoder.partition.rank == 0
        return Result(
            name=self.name,
            kind=self.kind,
            figures=fill_modes(
                {mode: {name: rate for name, (rate, _) in each.items()} for mode, each in rates.items()}
            ),
            chance=self.chance(categories),
            samples=len(rows),
            classes=None,
            captions=len(captions),
            usage={"image": image.usage, "text": text.usage},
            notes=notes + text.notes + more,
            details=Details(samples=len(rows), intervals=intervals) if asked else None,
        )


def all_before(right: Tensor, wrong: Tensor) -> Tensor:
    """Return the probability that every right score is above every wrong one, if ties are in random order.

    Args:
        right: ``(n, a)``.
        wrong: ``(n, b)``.

    Returns:
        ``(n,)`` float64: 1 or 0 without a tie between the lowest right score and the highest wrong one, and
        1 / C(r + w, r) for a tie of r right and w wrong scores.
    """
    low, high = right.amin(1, keepdim=True), wrong.amax(1, keepdim=True)
    r = ((right - low).abs() <= SAME).sum(1).double()
    w = ((wrong - high).abs() <= SAME).sum(1).double()
    orders = torch.exp(torch.lgamma(r + w + 1) - torch.lgamma(r + 1) - torch.lgamma(w + 1)).round()
    gap = (low - high)[:, 0]
    return torch.where(gap.abs() <= SAME, 1 / orders, (gap > 0).double())
