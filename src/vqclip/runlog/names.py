"""Metrics of single codebooks, found by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from vqclip.runlog.signs import read_codebooks

_OF_CODEBOOK = re.compile(r"(image|text)/([0-9]+(?:/[0-9]+)*)/([^/]+)")


class CodebookUsage(NamedTuple):
    """Use of one codebook."""

    share: float
    """Codes in use, as a fraction of those that the same tokens would use if all codes were equally likely; 0..1."""
    modality: str
    codebook: str = ""
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
    """Return the codebook that uses the smallest share of its codes; None if there is none."""
    found = []
    for modality in ("image", "text"):
        for codebook in read_codebooks(modality, figures, [0]):
            share = codebook["usage"] / max(codebook["usage_if_uniform"], 1e-12)
            found.append(CodebookUsage(min(share, 1.0), *codebook["name"].split("/", 1)))
    return min(found) if found else None
