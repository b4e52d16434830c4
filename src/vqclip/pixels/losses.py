"""The loss on pixels: sums over images in forward, terms and weights from the reduced sums.

    sums  = losses(made, real, step)               this rank's microbatch; no collective
    sums  = ... over microbatches and ranks        by addition
    terms, weights = losses.terms(sums, step)      over the global batch
    total = Σ weight × term                        its gradient is right for any split of the batch

The gradient at the pixels is computed together with the value: a term's network is run forward and backward at once,
and only this gradient stays in memory. It is also what the adaptive weight of an adversarial term needs, which so costs
no second backward pass.

Each kind of term is a config class beside its module, in `terms` or `adversarial`, and an entry of `PixelLossConfig`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import Config
from vqclip.errors import ConfigError, ShapeError, name_section
from vqclip.nn.precision import first_derivative_only, full_precision
from vqclip.pixels.adversarial import AdversarialConfig
from vqclip.pixels.decoder import PixelDecoder, PixelDecoderConfig, PixelsConfig
from vqclip.pixels.terms import LPIPSConfig, PerceptualConfig, PixelErrorConfig, PixelTerm, PixelTermConfig
from vqclip.seeds import derive_seed

PixelLossConfig = Annotated[
    PixelErrorConfig | PerceptualConfig | LPIPSConfig | AdversarialConfig, Field(discriminator="kind")
]
"""Configuration of any term, chosen by ``kind``."""
PixelLossesConfig = tuple[PixelLossConfig, ...]
"""Configuration of all terms."""

_OTHERS = "squares"
"""Sum of the squared gradient of the weighted terms that are not adversarial, at the pixels."""
_LARGEST_FACTOR = 1e4
"""Largest factor of an adaptive weight, as in VQGAN."""


class PixelLosses(nn.Module):
    """The terms of the loss on pixels, by name: their kinds, repeated ones with a number.

    Its parameters are those of discriminators. Frozen networks are constants: in no state dict, without gradient, moved
    by ``to``.

    The constructor loads the frozen networks, on the CPU in fp32. It is a collective.

    Args:
        configs: `PixelLossesConfig`.
        image_size: height and width of the images in pixels.
        seed: key of the discriminators' random weights; torch's generators are left unchanged.
        key: key path of ``configs``, for errors.

    Attributes:
        identity: settings and digests of frozen weights, which define the trajectory.

    Raises:
        ConfigError: on every rank, for weights that cannot be read or do not fit, or differ between ranks.
    """

    def __init__(self, configs: Sequence[Any], image_size: int, seed: int, key: str = "losses"):
        super().__init__()
        if not any(config.start_step == 0 for config in configs if not isinstance(config, AdversarialConfig)):
            raise ConfigError(
                f"{key}: got no term that compares images from step 0 on; expected one, such as {{kind: l1}}"
            )
        self.configs: dict[str, PixelTermConfig] = {}
        self.distances, self.adversaries = nn.ModuleDict(), nn.ModuleDict()
        self.identity: list[dict[str, Any]] = []
        kinds = [config.kind for config in configs]
        with dist.raise_on_all_ranks():
            for number, config in enumerate(configs):
                turn = kinds[: number + 1].count(config.kind)
                name = config.kind if turn == 1 else f"{config.kind}_{turn}"
                with name_section(f"{key}[{number}]"), _draw_from(derive_seed(seed, "pixel loss", number)):
                    term = config.build(image_size)
                (self.distances if isinstance(term, PixelTerm) else self.adversaries)[name] = term
                self.configs[name] = config
                self.identity.append(config.identity(term.digest))
        if others := dist.differing_ranks([str(settings.get("digest")) for settings in self.identity]):
            raise ConfigError(f"{key}: rank {', '.join(others)} loaded other weights than rank 0; expected equal files")

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

    @torch.compiler.disable
    def forward(self, made: Tensor, real: Tensor, step: int) -> dict[str, Tensor]:
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
        if made.shape != real.shape or made.ndim != 4 or real.dtype != torch.uint8 or not made.is_floating_point():
            raise ShapeError(
                f"images: got made {tuple(made.shape)} {made.dtype} and real {tuple(real.shape)} {real.dtype}; "
                "expected float and uint8 of one shape (B, 3, H, W)"
            )
        with full_precision(made.device):
            made = made.to(torch.float64 if made.dtype == torch.float64 else torch.float32)
            pixels, others = made.detach().clone(), torch.zeros_like(made)
            if not len(made):  # one black image, because some networks refuse none
                pixels, real = (each.new_zeros(1, *each.shape[1:]) for each in (pixels, real))
            pixels, real = pixels.requires_grad_(), real.to(made.dtype) / 255
            sums = {"count": torch.full((), len(made), dtype=torch.int64, device=made.device)}
            adversaries = self._active(self.adversaries, step)
            for name in self._active(self.distances, step):
                with torch.enable_grad():
                    total = self.distances[name](pixels, real)[: len(made)].double().sum()
                sums[name] = total.detach()
                if torch.is_grad_enabled() or adversaries:
                    gradient = torch.autograd.grad(total, pixels)[0][: len(made)]
                    sums[name] = _Attached.apply(made, sums[name], gradient)
                    others = others + self.configs[name].weight * gradient
            for name in adversaries:
                generator, gradient, discriminator = self.adversaries[name](pixels, real, len(made))
                gradient = gradient[: len(made)]
                sums[name] = _Attached.apply(made, generator, gradient)
                sums[f"{name}/discriminator"] = discriminator if torch.is_grad_enabled() else discriminator.detach()
                sums[f"{name}/{_OTHERS}"] = _squares(gradient)
            if adversaries:
                sums[_OTHERS] = _squares(others)
            return sums

    def terms(self, sums: Mapping[str, Tensor], step: int) -> tuple[dict[str, Tensor], dict[str, float | Tensor]]:
        """Return the terms of step number ``step``, each the mean over images, and their weights.

        Args:
            sums: those of `forward` over the global batch.
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
                    # The ratio of the norms of the two gradients. VQGAN (Esser et al. 2021) takes them at the decoder's
                    # last layer; squared norms at the pixels add up over images, so are equal for any split of a batch.
                    smallest = torch.finfo(torch.float64).tiny
                    ratio = sums[_OTHERS] / sums[f"{name}/{_OTHERS}"].clamp_min(smallest)
                    weights[name] = config.weight * ratio.sqrt().clamp_max(_LARGEST_FACTOR)
        return terms, weights

    def _active(self, names: Iterable[str], step: int) -> list[str]:
        return [name for name in names if step >= self.configs[name].start_step]


class _Attached(torch.autograd.Function):
    """A () number as a function of pixels, with its gradient; nothing else gets one."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return total.clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return incoming * gradient, None, None


def _squares(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()


@contextmanager
def _draw_from(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU within the block."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


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


class PixelTrainingConfig(Config):
    """A pixel decoder that trains together with the tokenizer."""

    decoder: PixelDecoderConfig
    """From the vectors of the codes to pixels."""
    losses: PixelLossesConfig = (PixelErrorConfig(),)
    """Differences between decoded and real images."""
    weight: float = Field(1.0, ge=0, le=1e6)
    """Factor on the gradient that the losses have for the tokenizer; the decoder trains with the whole gradient. 0: the
    tokenizer trains as without a decoder."""
    start_step: int = Field(0, ge=0)
    """First step in which the decoder trains, counted from 0; before it the run is one without a decoder."""
    one_in: int = Field(1, ge=1)
    """Decode one image in this many, other ones in every step. More make a step cheaper."""

    def build(self, dim: int, num_tokens: int, image_size: int) -> PixelDecoder:
        """Make the decoder with random weights; leaves torch's global generator, from which it is seeded, as it was.

        Raises:
            ConfigError: the decoder does not fit the tokens.
        """
        with _draw_from(derive_seed(torch.initial_seed(), "pixel decoder")):
            return PixelsConfig(decoder=self.decoder, image_size=image_size).build(dim, num_tokens)
