"""All terms of the loss on pixels: sums over images in forward, terms and weights from the reduced sums.

sums  = losses.sums(made, real, step)          this rank's microbatch; no collective
sums  = ... over microbatches and ranks        by addition
terms, weights = losses.terms(sums, step)      over the global batch
total = Σ weight × term                        its gradient is right for any split of the batch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vqclip import dist
from vqclip.errors import ConfigError, ShapeError, name_section
from vqclip.nn.precision import full_precision
from vqclip.pixels.losses.adversarial import AdversarialConfig, Adversary, adaptive_factor
from vqclip.pixels.losses.base import PixelTerm, PixelTermConfig
from vqclip.pixels.losses.gradients import attach_gradient
from vqclip.seeds import derive_seed

__all__ = ["PixelLosses", "require_starts"]

_OTHERS = "squares"
"""Sum of the squared gradient of the weighted terms that are not adversarial, at the pixels."""


class PixelLosses(nn.Module):
    """The terms of the loss on pixels, by name: their kinds, repeated ones with a number.

    Its parameters are those of discriminators. Frozen networks are constants: in no state dict, without gradient, moved
    by ``to``.

    Args:
        configs: the terms.
        terms: the module of each.

    Attributes:
        identity: settings and digests of frozen weights, which define the trajectory.
        starts: steps with which a term begins, 0 left out.
    """

    def __init__(self, configs: Sequence[PixelTermConfig], terms: Sequence[PixelTerm | Adversary]):
        super().__init__()
        named = dict(zip(_names(configs), zip(configs, terms, strict=True), strict=True))
        self.configs = {name: config for name, (config, _) in named.items()}
        self.distances = nn.ModuleDict({name: term for name, (_, term) in named.items() if isinstance(term, PixelTerm)})
        self.adversaries = nn.ModuleDict(
            {name: term for name, (_, term) in named.items() if isinstance(term, Adversary)}
        )
        self.identity = [config.identity(term.digest) for config, term in zip(configs, terms, strict=True)]
        self.starts = {config.start_step for config in configs} - {0}

    @staticmethod
    def build(configs: Sequence[Any], image_size: int, seed: int, key: str = "losses") -> PixelLosses:
        """Make the terms, with their frozen networks, on the CPU in fp32. A collective.

        Args:
            configs: `PixelLossesConfig`.
            image_size: height and width of the images in pixels.
            seed: key of the discriminators' random weights; torch's generators are left unchanged.
            key: key path of ``configs``, for errors.

        Raises:
            ConfigError: on every rank, for weights that cannot be read or do not fit, or differ between ranks.
        """
        if not any(config.start_step == 0 for config in configs if not isinstance(config, AdversarialConfig)):
            raise ConfigError(
                f"{key}: got no term that compares images from step 0 on; expected one, such as {{kind: l1}}"
            )
        terms = []
        with dist.raise_on_all_ranks():
            for number, config in enumerate(configs):
                with name_section(f"{key}[{number}]"), _draw_from(derive_seed(seed, "pixel loss", number)):
                    terms.append(config.build(image_size))
        if others := dist.differing_ranks([str(term.digest) for term in terms]):
            raise ConfigError(f"{key}: rank {', '.join(others)} loaded other weights than rank 0; expected equal files")
        return PixelLosses(configs, terms)

    def move_to_step(self, step: int) -> bool:
        """Freeze or unfreeze the discriminators as in step number ``step`` (from 0); return whether any changed.

        Parameters that require a gradient get one in every step, as DDP needs.
        """
        changed = False
        for name, adversary in self.adversaries.items():
            trains = step >= self.configs[name].start_step
            for parameter in adversary.parameters():
                changed |= parameter.requires_grad != trains
                parameter.requires_grad_(trains)
                parameter.grad = parameter.grad if trains else None
        return changed

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
            Name → () float64. Terms have a graph to ``made``, ``<name>/discriminator`` one to the discriminator's
            weights. Names that end with ``squares`` are sums of squared gradients at the pixels, for the adaptive
            weight; ``count`` is () int64.

        Raises:
            ShapeError: the images do not pair up, or have another dtype.
        """
        _require_pairs(made, real)
        with full_precision(made.device):
            made = made.to(torch.float64 if made.dtype == torch.float64 else torch.float32)
            pixels, real = _without_graph(made), _at_least_one(real).to(made.dtype) / 255
            sums = {"count": torch.full((), len(made), dtype=torch.int64, device=made.device)}
            adversaries = self._active(self.adversaries, step)
            others = torch.zeros_like(made)
            for name in self._active(self.distances, step):
                with torch.enable_grad():
                    total = self.distances[name](pixels, real)[: len(made)].double().sum()
                sums[name] = total.detach()
                if torch.is_grad_enabled() or adversaries:
                    gradient = torch.autograd.grad(total, pixels)[0][: len(made)]
                    sums[name] = attach_gradient(made, total, gradient)
                    others = others + self.configs[name].weight * gradient
            for name in adversaries:
                found = self.adversaries[name](pixels, real, len(made))
                gradient = found.gradient[: len(made)]
                sums[name] = attach_gradient(made, found.generator, gradient)
                kept = found.discriminator if torch.is_grad_enabled() else found.discriminator.detach()
                sums |= {f"{name}/discriminator": kept, f"{name}/{_OTHERS}": _squares(gradient)}
            if adversaries:
                sums[_OTHERS] = _squares(others)
            return sums

    def terms(self, sums: Mapping[str, Tensor], step: int) -> tuple[dict[str, Tensor], dict[str, float | Tensor]]:
        """Return the terms of step number ``step``, each the mean over images, and their weights.

        Args:
            sums: `sums` over the global batch.
            step: from 0.

        Returns:
            Name → () term, and name → weight; an adaptive weight is () float64 without graph.
        """
        terms: dict[str, Tensor] = {}
        weights: dict[str, float | Tensor] = {}
        for name in self._active(self.configs, step):
            config = self.configs[name]
            terms[name], weights[name] = sums[name] / sums["count"], config.weight
            if isinstance(config, AdversarialConfig):
                terms[f"{name}/discriminator"] = sums[f"{name}/discriminator"] / sums["count"]
                weights[f"{name}/discriminator"] = 1.0
                if config.adaptive:
                    weights[name] = config.weight * adaptive_factor(sums[_OTHERS], sums[f"{name}/{_OTHERS}"])
        return terms, weights

    def _active(self, names: Iterable[str], step: int) -> list[str]:
        return [name for name in names if step >= self.configs[name].start_step]


def require_starts(configs: Sequence[PixelTermConfig], steps: int, key: str = "losses") -> None:
    """Check that every term begins within a run.

    Args:
        configs: `PixelLossesConfig`.
        steps: number of steps of the run.
        key: key path of ``configs``.

    Raises:
        ValueError: a term would never begin.
    """
    for number, config in enumerate(configs):
        if config.start_step >= steps:
            raise ValueError(
                f"{key}[{number}].start_step: got {config.start_step}; expected fewer than the {steps} steps of the run"
            )


@contextmanager
def _draw_from(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU within the block."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


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


def _squares(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()


def _require_pairs(made: Tensor, real: Tensor) -> None:
    if made.shape != real.shape or made.ndim != 4 or real.dtype != torch.uint8 or not made.is_floating_point():
        raise ShapeError(
            f"images: got made {tuple(made.shape)} {made.dtype} and real {tuple(real.shape)} {real.dtype}; expected "
            "float and uint8 of one shape (B, 3, H, W)"
        )
