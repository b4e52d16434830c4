"""Usage of single codebooks, read from the metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import Field

MODALITIES = ("image", "text")
_MOST = 2**53
_Number = Annotated[float, Field(ge=0, lt=_MOST)]


class Codebook(NamedTuple):
    """Usage of a codebook over a window of tokens."""

    name: Annotated[str, Field(max_length=200)]
    """Name as in the metrics: ``image``; ``image/3`` of several; ``image/0/3`` of several of a stage."""
    codes: Annotated[int, Field(ge=0)]
    """K; 0 if unknown."""
    tokens: _Number
    usage_if_uniform: _Number
    """Share of the codes that as many tokens would use if all codes were equally likely."""
    usage: _Number
    """Share of the codes in use."""
    perplexity: _Number

    @property
    def modality(self) -> str:
        """``image`` or ``text``."""
        return modality_of(self.name)

    @property
    def number(self) -> str:
        """Number among the codebooks of its modality, such as ``3`` or ``0/3``; empty for the only one."""
        return self.name.partition("/")[2]

    @property
    def used(self) -> float:
        """Number of codes in use."""
        return self.usage * self.codes

    @property
    def possible(self) -> float:
        """Number of codes that evenly used ones would show."""
        return self.usage_if_uniform * self.codes

    @property
    def share(self) -> float:
        """Codes in use, as a fraction of those that evenly used ones would show; 0..1."""
        return min(self.usage / max(self.usage_if_uniform, 1e-12), 1.0)


def modality_of(name: str) -> str:
    """Return the modality of a codebook, or of a metric, from its name."""
    return name.partition("/")[0]


def codebook_names(figures: Mapping[str, float], modality: str) -> list[str]:
    """Return the names of a modality's codebooks in the metrics of a step.

    A stage that has codebooks of its own is left out: its metrics are their means.
    """
    prefix = f"{modality}/"
    names = [name.removesuffix("/usage") for name in figures if name.startswith(prefix) and name.endswith("/usage")]
    stages = {name.rpartition("/")[0] for name in names}
    return [name for name in names if name not in stages]


def read_codebooks(modality: str, figures: Mapping[str, float], codes: int = 0) -> list[Codebook]:
    """Return the codebooks of a modality whose metrics are complete and possible.

    Args:
        modality: ``image`` or ``text``.
        figures: metrics of a step.
        codes: K of each codebook; 0 if unknown.
    """
    found = []
    tokens = figures.get(f"{modality}/tokens", -1.0)
    for name in codebook_names(figures, modality):
        above = name
        while above and f"{above}/usage_if_uniform" not in figures:
            above = above.rpartition("/")[0]
        possible, perplexity = figures.get(f"{above}/usage_if_uniform", -1.0), figures.get(f"{name}/perplexity", -1.0)
        numbers = tokens, possible, figures[f"{name}/usage"], perplexity
        if len(name) <= 200 and all(0 <= number < _MOST for number in numbers):
            found.append(Codebook(name, codes, *numbers))
    return found


def least_used(figures: Mapping[str, float]) -> Codebook | None:
    """Return the codebook that uses the smallest share of the codes it could; None if there is none."""
    every = [each for modality in MODALITIES for each in read_codebooks(modality, figures)]
    return min(every, key=lambda each: each.share, default=None)
