"""Usage of single codebooks, read from the metrics of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from vqclip.io.json_files import Strict

MODALITIES = ("image", "text")
_MOST = 2**53
_Number = Annotated[float, Field(ge=0, lt=_MOST)]


class Codebook(Strict):
    """Usage of a codebook over a window of tokens."""

    name: str
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


def codebook_names(figures: Mapping[str, float]) -> list[str]:
    """Return the names of the codebooks in the metrics of a step.

    A stage that has codebooks of its own is left out: its metrics are their means.
    """
    names = [name.removesuffix("/usage") for name in figures if name.endswith("/usage")]
    names = [name for name in names if modality_of(name) in MODALITIES]
    above = {each for name in names for each in _above(name)}
    return [name for name in names if name not in above]


def read_codebooks(modality: str, figures: Mapping[str, float], codes: int = 0) -> list[Codebook]:
    """Return the codebooks of a modality whose metrics are complete and possible.

    Args:
        modality: ``image`` or ``text``.
        figures: metrics of a step.
        codes: K of each codebook; 0 if unknown.
    """
    found = []
    for name in codebook_names(figures):
        if modality_of(name) != modality or len(name) > 200:
            continue
        places = (f"{each}/usage_if_uniform" for each in (name, *_above(name)))
        values = {
            "tokens": figures.get(f"{modality}/tokens", -1.0),
            "usage_if_uniform": next((figures[place] for place in places if place in figures), -1.0),
            "usage": figures[f"{name}/usage"],
            "perplexity": figures.get(f"{name}/perplexity", -1.0),
        }
        if all(0 <= value < _MOST for value in values.values()):
            found.append(Codebook(name=name, codes=codes, **values))
    return found


def least_used(figures: Mapping[str, float]) -> Codebook | None:
    """Return the codebook that uses the smallest share of the codes it could; None if there is none."""
    every = [each for modality in MODALITIES for each in read_codebooks(modality, figures)]
    return min(every, key=lambda each: each.share, default=None)


def _above(name: str) -> Iterator[str]:
    """Yield ``image/0`` and ``image`` for ``image/0/3``."""
    while name := name.rpartition("/")[0]:
        yield name
