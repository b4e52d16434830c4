"""Vocabularies: captions to rows of token numbers, and which numbers of a row are padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

MAX_CONTEXT = 4096
"""Largest context length."""


class Vocabulary(Protocol):
    """Maps captions to token numbers. Cheap to send to the workers of a data loader.

    Which numbers of a row are padding never depends on the text of a caption: a caption cannot write a mark.

    Attributes:
        context_length: N, token positions per caption; captions are cut or padded to it.
        size: token numbers are below it.
    """

    context_length: int
    size: int

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Map B captions to ``(B, N)`` int64, with padding after the last token.

        Raises:
            ShapeError: not a list or tuple of str.
        """

    def with_lengths(self, captions: Sequence[str]) -> tuple[Tensor, list[int]]:
        """Tokenize captions as `__call__` does, and return the length of each before it was cut.

        Lengths are in tokens, marks included, and at most `MAX_CONTEXT` + 1.
        """

    def pieces(self, caption: str) -> tuple[list[str], int]:
        """Return the text of each token of a caption, and how many of them are read before the cut.

        Marks are left out. A token that ends inside a character has an empty text, and the next one the character.
        """

    def mask(self, tokens: Tensor) -> Tensor:
        """Return bool of the shape ``(B, N)`` of ``tokens``, True at real tokens, which precede all padding."""

    def require_rows(self, tokens: Tensor) -> None:
        """Check the values of rows; raise ShapeError for one that `__call__` does not make."""

    def files(self) -> Mapping[str, bytes]:
        """Return the files, by name, that a tokenizer folder needs to make the vocabulary again."""

    def describe(self) -> str:
        """Return how rows are made, for implementations in other languages."""


class CaptionLengths(Counter[int]):
    """Counts of captions by their length in tokens, see `Vocabulary.with_lengths`."""

    def count_cut(self, context_length: int) -> int:
        """Return the number of captions that are longer than ``context_length``."""
        return sum(count for length, count in self.items() if length > context_length)

    def length_for(self, percent: int) -> int:
        """Return the smallest context length that holds ``percent`` % of captions without a cut."""
        held = 0
        for length in sorted(self):
            held += self[length]
            if 100 * held >= percent * self.total():
                return length
        return 0

    def describe_cuts(self, context_length: int, key: str = "context_length") -> str | None:
        """Describe how many captions are cut and which lengths would hold more of them; None if none is cut."""
        cut, total = self.count_cut(context_length), self.total()
        if not cut:
            return None
        wanted = {self.length_for(percent): f"{percent} %" for percent in (95, 99, 100)}
        better = [f"{length} would hold {share}" for length, share in wanted.items() if length > context_length]
        better = [each.replace(f"{MAX_CONTEXT + 1}", f"more than {MAX_CONTEXT}") for each in better[:2]]
        return (
            f"{100 * cut / total:.1f} % of captions ({cut:,} of {total:,}) are longer than {key} {context_length} "
            f"and were cut; {' and '.join(better)} of them"
        )
