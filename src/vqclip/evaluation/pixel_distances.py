"""Distances of reconstructions from originals in the features of frozen networks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from vqclip.errors import name_section
from vqclip.evaluation.partition import RankPartition
from vqclip.pixels.losses.base import PixelTerm
from vqclip.pixels.losses.lpips import LPIPSConfig
from vqclip.pixels.losses.perceptual import PerceptualConfig
from vqclip.pixels.metrics.frechet import FrechetConfig, FrechetFeatures, Moments, frechet_distance

DistanceConfig = Annotated[LPIPSConfig | PerceptualConfig | FrechetConfig, Field(discriminator="kind")]
"""A distance of each image, or a Fréchet distance of all images, chosen by ``kind``."""


def _check(configs: tuple[DistanceConfig, ...]) -> tuple[DistanceConfig, ...]:
    terms = [config for config in configs if not isinstance(config, FrechetConfig)]
    for config, key in itertools.product(terms, ("weight", "start_step")):
        if (got := getattr(config, key)) != (default := type(config).model_fields[key].default):
            raise ValueError(
                f"distances: got {key} {got} of kind {config.kind}, which has no effect here; expected {default}"
            )
    kinds = [config.kind for config in terms]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"got kinds {', '.join(kinds)}; expected each of lpips and perceptual at most once")
    return configs


DistanceConfigs = Annotated[tuple[DistanceConfig, ...], AfterValidator(_check)]
"""Several distances."""


class Distances:
    """Distances of a set, batch after batch.

    Args:
        configs: the distances.
        image_size: height and width of the images.
        device: device of the networks.

    Raises:
        ConfigError: a network cannot be loaded.
    """

    def __init__(self, configs: Sequence[DistanceConfig], image_size: int, device: torch.device):
        self._device = device
        self._terms: dict[str, PixelTerm] = {}
        self._features: list[FrechetFeatures] = []
        for number, config in enumerate(configs):
            with name_section(f"distances[{number}]"):
                if isinstance(config, FrechetConfig):
                    self._features.append(config.build())
                    self._features[-1].network.to(device)
                else:
                    self._terms[config.kind] = config.build(image_size).to(device)
        self.notes: list[str] = []
        """Remarks for the reader, after `finish`."""
        self._moments: list[tuple[Moments, Moments]] = []

    def of_images(self, made: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Return kind → ``(B,)`` float64 on the CPU, of images ``(B, 3, S, S)`` uint8."""
        if not self._terms:
            return {}
        x, y = (images.to(self._device).float() / 255 for images in (made, real))
        with torch.autocast(self._device.type, enabled=False):
            return {kind: term(x, y).double().cpu() for kind, term in self._terms.items()}

    def add(self, made: Tensor, real: Tensor) -> None:
        """Add the features of a batch ``(B, 3, S, S)`` uint8 to the moments."""
        with torch.autocast(self._device.type, enabled=False):
            new = [
                tuple(Moments.of(each.features(images.to(self._device))) for images in (made, real))
                for each in self._features
            ]
        before = self._moments
        self._moments = [
            (a, b) if not before else (before[number][0].add(a), before[number][1].add(b))
            for number, (a, b) in enumerate(new)
        ]

    def finish(self, partition: RankPartition) -> dict[str, float]:
        """Return name → Fréchet distance of all images of all ranks; of fewer than two images, none. A collective."""
        found = {}
        for number, each in enumerate(self._features):
            pair = self._moments[number] if self._moments else self._none(each.features)
            made, real = (Moments(*(partition.gather(part[None]).sum(dim=0) for part in one)) for one in pair)
            if made.images >= 2:
                found[each.name] = frechet_distance(made, real)
            else:
                self.notes.append(f"no {each.name}: it needs two images")
        return found

    def _none(self, features: object) -> tuple[Moments, Moments]:
        """Return the moments of no image."""
        size = torch.zeros(1, 3, 32, 32, dtype=torch.uint8, device=self._device)
        empty = Moments.of(features(size)[:0])  # type: ignore[operator]
        return empty, empty
