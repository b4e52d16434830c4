"""Compute what the page shows of a visitor's image, caption and classes.

Every function depends on its arguments alone, so that visitors never see each other's input.

Shapes: N tokens, C codebooks, E width of the embedding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vqclip.data.decode import decode_image
from vqclip.data.prepare import ImageSource
from vqclip.errors import DataError
from vqclip.evaluation.image_details import codebook_names, token_grid
from vqclip.search.hits import Hit, find_hits
from vqclip.search.scan import CodeSearch
from vqclip.tokenizer import ImageTokenizer, TextTokenizer, Tokenizer

__all__ = ["Answers", "CaptionAnswer", "ClassScore", "Coded", "ImageAnswer", "cosine", "split_classes"]

MAX_CLASSES = 1000
"""Largest number of classes in a request."""
MAX_CHARACTERS = 2000
"""Longest caption, prompt or name of a class; towers read far less."""
MAX_FILE_BYTES = 20 << 20
"""Largest uploaded file."""
_REMEMBERED = 4
"""Inputs whose codes are kept, by their content."""
_BATCH = 64


class Coded(NamedTuple):
    """One sample through its tokenizer."""

    ids: Tensor
    """``(N, C)`` int64 on the CPU: the tokens that are there."""
    continuous: Tensor
    """``(E,)`` unit-norm, the quantizer bypassed."""
    codes_only: Tensor
    """``(E,)`` unit-norm, from the ids."""

    def to_json(self) -> str:
        """Return the ids as JSON, a line a token; ``tokenizer.embed(torch.tensor([ids]))`` takes them."""
        return "[" + ",\n ".join(json.dumps(row) for row in self.ids.tolist()) + "]"


class ImageAnswer(NamedTuple):
    """An image's codes."""

    coded: Coded
    pixels: Tensor
    """``(3, H, W)`` uint8, resized and cropped: what the model sees."""
    size: tuple[int, int]
    """Width and height of the image as it was given."""
    file_bytes: int
    """Bytes of its file."""
    bits: float
    """Bits of the ids."""
    grid: tuple[int, int] | None
    """Rows and columns of the tokens; None if they have no place in the image."""
    codebooks: list[str]
    """Names of the codebooks."""


class CaptionAnswer(NamedTuple):
    """A caption's codes."""

    coded: Coded
    pieces: tuple[str, ...]
    """Text of each token, marks as ``<start>`` and ``<end>``; empty where tokens and ids do not correspond."""
    bytes: int
    """Bytes of the caption in UTF-8."""
    bits: float
    """Bits of the ids."""
    left_out: int
    """Tokens at the end that the tower does not read."""


class ClassScore(NamedTuple):
    """Probability of one class."""

    name: str
    continuous: float
    codes_only: float


@dataclass(eq=False)
class Answers:
    """A model and an index, and what they answer."""

    image: ImageTokenizer | None
    """None if the folder contains no image tokenizer."""
    text: TextTokenizer | None
    """None if the folder contains no text tokenizer."""
    scale: float | None
    """Factor of the logits, the inverse temperature; None without both tokenizers."""
    search: CodeSearch | None = None
    """The index; None if none is given."""
    source: ImageSource | None = None
    """Images that the index was built from; None if they are not shown."""

    def __post_init__(self) -> None:
        self._image_of = lru_cache(_REMEMBERED)(self._read_image)
        self._prompts_of = lru_cache(_REMEMBERED)(self._embed_prompts)

    def read_image(self, data: bytes) -> ImageAnswer:
        """Encode an image file.

        Raises:
            DataError: it is too large, damaged, or of a format that is not read; there is no image tokenizer.
        """
        if len(data) > MAX_FILE_BYTES:
            raise DataError(f"got a file of {len(data):,} bytes; expected at most {MAX_FILE_BYTES:,}")
        return self._image_of(data)

    def _read_image(self, data: bytes) -> ImageAnswer:
        if self.image is None:
            raise DataError("this folder contains no image tokenizer")
        image = decode_image(data)
        pixels = self.image.transform(image)
        coded = _encode(self.image, pixels[None])[0]
        size = image.shape[2], image.shape[1]
        bits, names = len(coded.ids) * self.image.quantizer.bits, codebook_names(self.image.quantizer)
        return ImageAnswer(coded, pixels, size, len(data), bits, token_grid(self.image), names)

    def read_caption(self, caption: str) -> CaptionAnswer:
        """Encode a caption.

        Raises:
            DataError: it is empty or too long; there is no text tokenizer.
        """
        if self.text is None:
            raise DataError("this folder contains no text tokenizer")
        caption = _check_text("caption", caption)
        tokens, lengths = self.text.preprocess.with_lengths([caption])
        coded = _encode(self.text, tokens)[0]
        return CaptionAnswer(
            coded,
            self._pieces(caption, len(coded.ids)),
            len(caption.encode("utf-8", "replace")),
            len(coded.ids) * self.text.quantizer.bits,
            max(0, lengths[0] - self.text.preprocess.context_length),
        )

    def _pieces(self, caption: str, tokens: int) -> tuple[str, ...]:
        if self.text is None or self.text.reduce is not None:
            return ()
        pieces, most = self.text.preprocess.pieces(caption)
        marked = ("<start>", *pieces[:most], "<end>")
        return marked if len(marked) == tokens else ()

    def classify(self, coded: Coded, classes: Sequence[str], template: str) -> list[ClassScore]:
        """Return the probability of each class, the most likely one by the codes first.

        It is the softmax over the given classes of the cosines, times the model's scale.

        Args:
            coded: an image.
            classes: from `split_classes`.
            template: prompt with ``{c}`` for the name of the class.

        Raises:
            DataError: the template has no ``{c}``, a prompt is too long, or there are not both tokenizers.
        """
        if self.text is None or self.image is None or self.scale is None:
            raise DataError("classes need an image and a text tokenizer; this folder contains one of them")
        template = _check_text("template", template)
        if "{c}" not in template:
            raise DataError(f"template: got {template!r}; expected {{c}} in it, where the name of the class goes")
        prompts = tuple(_check_text("prompt", template.replace("{c}", name)) for name in classes)
        continuous, codes_only = self._prompts_of(prompts)
        columns = [
            torch.softmax(self.scale * (rows @ query).double(), dim=0).tolist()
            for rows, query in ((continuous, coded.continuous), (codes_only, coded.codes_only))
        ]
        scores = [ClassScore(*row) for row in zip(classes, *columns, strict=True)]
        return sorted(scores, key=lambda score: -score.codes_only)

    def _embed_prompts(self, prompts: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        assert self.text is not None
        found: list[Coded] = []
        for start in range(0, len(prompts), _BATCH):
            found += _encode(self.text, self.text.preprocess(list(prompts[start : start + _BATCH])))
        return torch.stack([each.continuous for each in found]), torch.stack([each.codes_only for each in found])

    def nearest(self, coded: Coded, count: int) -> list[Hit]:
        """Return the nearest items of the index to a sample's codes; none without an index."""
        if self.search is None:
            return []
        found = self.search.search(coded.codes_only[None], count)
        return find_hits(self.search.index, found, self.source, lambda error: None)


def split_classes(text: str) -> list[str]:
    """Return the names of classes: one a line, or, of a single line, between commas.

    Raises:
        DataError: too many, one is too long, or one is there twice.
    """
    text = text.strip()
    names = [name.strip() for name in (text.splitlines() if "\n" in text else text.split(","))]
    names = [name for name in names if name]
    if len(names) > MAX_CLASSES:
        raise DataError(f"classes: got {len(names):,}; expected at most {MAX_CLASSES:,}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"classes: got {twice[0]!r} more than once; expected different names")
    return [_check_text("class", name) for name in names]


def cosine(one: Coded, other: Coded) -> tuple[float, float]:
    """Return the cosines of two samples: continuous, and from the codes."""
    return float(one.continuous @ other.continuous), float(one.codes_only @ other.codes_only)


def _check_text(what: str, text: str) -> str:
    text = text.strip()
    if not text:
        raise DataError(f"{what}: empty; expected some words")
    if len(text) > MAX_CHARACTERS:
        raise DataError(f"{what}: got {len(text):,} characters; expected at most {MAX_CHARACTERS:,}")
    return text


@torch.no_grad()
def _encode(tokenizer: Tokenizer, inputs: Tensor) -> list[Coded]:
    """Encode a batch as `Tokenizer.batch` takes it."""
    out, continuous = tokenizer.with_continuous(inputs.to(tokenizer.device))
    codes_only = tokenizer.embed(out.ids)
    rows = zip(out.ids.cpu(), continuous.float().cpu(), codes_only.float().cpu(), strict=True)
    return [Coded(ids[(ids >= 0).any(dim=-1)], *embeddings) for ids, *embeddings in rows]
