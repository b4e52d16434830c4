"""All terms of the loss on pixels: sums over samples in forward, terms and weights from the reduced sums.

sums  = losses.sums(made, real, step)          this rank's microbatch; no collective
sums  = ... over microbatches and ranks        by addition
terms, weights = losses.terms(sums, step)      over the global batch
total = Σ weight × term                        its gradient is right for any split of the batch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vqclip import dist
from vqclip.errors import ConfigError, ShapeError, name_section
from vqclip.nn.precision import full_precision
from vqclip.pixels.losses.base import PixelTerm, PixelTermConfig
from vqclip.pixels.losses.gradients import attach_gradient, gradient_of

__all__ = ["PixelLosses"]


class PixelLosses(nn.Module):
    """The terms of the loss on pixels, by name: their kinds, repeated ones with a number.

    Frozen networks are constants of this module: in no state dict, without gradient, moved by ``to``.

    Args:
        configs: the terms.
        terms: the module of each.

    Attributes:
        identity: settings and digests of frozen weights, which define the trajectory.
    """

    def __init__(self, configs: Sequence[PixelTermConfig], terms: Sequence[PixelTerm]):
        super().__init__()
        names = _names(configs)
        self.configs = dict(zip(names, configs, strict=True))
        self.distances = nn.ModuleDict(dict(zip(names, terms, strict=True)))
        self.identity = [config.identity(term.digest) for config, term in zip(configs, terms, strict=True)]

    @staticmethod
    def build(configs: Sequence[Any], image_size: int, key: str = "losses") -> PixelLosses:
        """Make the terms, with their frozen networks, on the CPU in fp32. A collective.

        Args:
            configs: `PixelLossesConfig`.
            image_size: height and width of the images in pixels.
            key: key path of ``configs``, for errors.

        Raises:
            ConfigError: on every rank, for weights that cannot be read or do not fit, or differ between ranks.
        """
        if not any(config.start_step == 0 for config in configs):
            raise ConfigError(f"{key}: got no term that begins at step 0; expected one, such as {{kind: l1}}")
        terms = []
        with dist.raise_on_all_ranks():
            for number, config in enumerate(configs):
                with name_section(f"{key}[{number}]"):
                    terms.append(config.build(image_size))
        if others := dist.differing_ranks([str(term.digest) for term in terms]):
            raise ConfigError(f"{key}: rank {', '.join(others)} loaded other weights than rank 0; expected equal files")
        return PixelLosses(configs, terms)

    def forward(self, made: Tensor, real: Tensor, step: int) -> dict[str, Tensor]:
        """Return `sums`."""
        return self.sums(made, real, step)

    @torch.compiler.disable
    def sums(self, made: Tensor, real: Tensor, step: int) -> dict[str, Tensor]:
        """Return the sums over these images of each term of step number ``step``, and their ``count``.

        Computed in fp32 also under autocast, in fp64 for images in fp64.

        Args:
            made: ``(B, 3, H, W)`` float, about 0..1; B may be 0.
            real: ``(B, 3, H, W)`` uint8.
            step: from 0.

        Returns:
            Name → () float64, with a graph to ``made``; ``count`` is () int64.

        Raises:
            ShapeError: the images do not pair up, or have another dtype.
        """
        _require_pairs(made, real)
        with full_precision(made.device):
            made = made.to(torch.float64 if made.dtype == torch.float64 else torch.float32)
            pixels, real = _without_graph(made), _at_least_one(real).to(made.dtype) / 255
            sums = {"count": torch.full((), len(made), dtype=torch.int64, device=made.device)}
            for name in self._active(step):
                with torch.enable_grad():
                    total = self.distances[name](pixels, real)[: len(made)].double().sum()
                sums[name] = total.detach()
                if torch.is_grad_enabled():
                    sums[name] = attach_gradient(made, total, gradient_of(total, pixels)[: len(made)])
            return sums

    def terms(self, sums: Mapping[str, Tensor], step: int) -> tuple[dict[str, Tensor], dict[str, float | Tensor]]:
        """Return the terms of step number ``step``, each the mean over images, and their weights.

        Args:
            sums: `sums` over the global batch.
            step: from 0.
        """
        names = self._active(step)
        return {name: sums[name] / sums["count"] for name in names}, {name: self.configs[name].weight for name in names}

    def _active(self, step: int) -> list[str]:
        return [name for name, config in self.configs.items() if step >= config.start_step]


def _names(configs: Sequence[PixelTermConfig]) -> list[str]:
    """Name the terms by their kinds, repeated ones with a number."""
    seen: Counter[str] = Counter()
    names = []
    for config in configs:
        seen[config.kind] += 1
        names.append(config.kind if seen[config.kind] == 1 else f"{config.kind}_{seen[config.kind]}")
    return names


def _without_graph(made: Tensor) -> Tensor:
    """Return the images as a leaf of their own graph; one black image for none, which some networks refuse."""
    return _at_least_one(made.detach()).clone().requires_grad_()


def _at_least_one(images: Tensor) -> Tensor:
    return images if len(images) else images.new_zeros(1, *images.shape[1:])


def _require_pairs(made: Tensor, real: Tensor) -> None:
    if made.shape != real.shape or made.ndim != 4 or real.dtype != torch.uint8 or not made.is_floating_point():
        raise ShapeError(
            f"images: got made {tuple(made.shape)} {made.dtype} and real {tuple(real.shape)} {real.dtype}; expected "
            "float and uint8 of one shape (B, 3, H, W)"
        )
