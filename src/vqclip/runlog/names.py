"""Metrics of single codebooks, found by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_OF_CODEBOOK = re.compile(r"(image|text)/([0-9]+(?:/[0-9]+)*)/([^/]+)")


class CodebookUsage(NamedTuple):
    """Use of one codebook."""

    share: float
    """Codes in use, as a fraction of those that the same tokens would use if all codes were equally likely; 0..1."""
    modality: str
    codebook: str
    """Number of the codebook, such as ``3``, or ``0/3`` for codebook 3 of stage 0; empty if there is one only."""

    def __str__(self) -> str:
        return f"{self.modality} codebook {self.codebook}" if self.codebook else self.modality


def by_codebook(figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the metrics of single codebooks: ``image/usage`` → ``{"0": 0.7, "1": 0.8, ...}``.

    A stage that has codebooks of its own is left out: its metrics are their means.
    """
    found: dict[str, dict[str, float]] = {}
    for name, value in figures.items():
        if match := _OF_CODEBOOK.fullmatch(name):
            modality, number, figure = match.groups()
            found.setdefault(f"{modality}/{figure}", {})[number] = value
    for values in found.values():
        above = {number.rpartition("/")[0] for number in values}
        for number in above & values.keys():
            del values[number]
    return found


def least_used(figures: Mapping[str, float]) -> CodebookUsage | None:
    """Return the codebook that uses the smallest share of its codes; None if no model part has codes."""
    parts = by_codebook(figures)
    found = []
    for modality in ("image", "text"):
        possible = parts.get(f"{modality}/usage_if_uniform", {})
        usages = parts.get(f"{modality}/usage") or {"": figures.get(f"{modality}/usage", -1.0)}
        for number, usage in usages.items():
            stage = number.partition("/")[0]
            most = possible.get(number, possible.get(stage, figures.get(f"{modality}/usage_if_uniform", 0.0)))
            if most > 0 and usage >= 0:
                found.append(CodebookUsage(min(usage / most, 1.0), modality, number))
    return min(found) if found else None
