"""Prefixes of a quantizer's ids: the first stages and the first codebooks, which need fewer bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Prefix(NamedTuple):
    """The first stages of every `Residual` and the first codebooks of every `Product`.

    Stages of nested `Residual` and codebooks of nested `Product` are counted through, outermost first.
    """

    stages: int
    """Number of stages, at least 1; 0 without codes."""
    codebooks: int
    """Number of codebooks of a stage, at least 1; 0 without codes."""

    def __str__(self) -> str:
        words = (("stage", self.stages), ("codebook", self.codebooks))
        return ", ".join(f"{number} {word}{'s' * (number > 1)}" for word, number in words)

    def shorter(self) -> list[Prefix]:
        """Return the prefixes to evaluate: by stages with all codebooks, by codebooks with all stages, and this one.

        Numbers of stages and of codebooks are 1, 2, 3, ... up to 8, or 1, 2, 4, ... of more. Without codes there is no
        prefix.
        """
        found = {Prefix(number, self.codebooks) for number in _numbers(self.stages)}
        found |= {Prefix(self.stages, number) for number in _numbers(self.codebooks)}
        # By stages, then by codebooks.
        return sorted(
            (each for each in found if min(each)),
            key=lambda each: (each == self, each.codebooks < self.codebooks, each),
        )

    def share(self, of: Prefix, to: Prefix) -> Prefix:
        """Return the prefix that is the same share of ``to`` as this one is of ``of``, rounded up."""
        stages, codebooks = (-(-part * new // old) for part, old, new in zip(self, of, to, strict=True))
        return Prefix(stages, codebooks)


def _numbers(most: int) -> Iterator[int]:
    yield from (number for number in range(1, most) if most <= 8 or number.bit_count() == 1)
    yield most
