"""Which losses a `VQ` has, and with what weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.quantizers.checks import resolve_weights
from vqclip.quantizers.vectors import unit

Learning = Literal["ema", "gradient"]
"""How codes follow the vectors: a moving mean of those they stand for, or the codebook loss."""


class VQLossWeights(Config):
    """Weights of VQ's losses in the training loss."""

    commitment: Annotated[float, Field(ge=0)] = 0.25
    """Of the mean squared distance that pulls vectors to their codes."""
    codebook: Annotated[float, Field(ge=0)] | None = None
    """Of the same distance, pulling codes to their vectors: 1 with learning: gradient; there is none with ema."""
    orthogonality: Annotated[float, Field(ge=0)] = 0.0
    """Of the mean squared cosine between different codes; with learning: gradient only."""
    diversity: Annotated[float, Field(ge=0)] = 0.0
    """Of log K less the entropy of the mean soft assignment; takes a number for every token and code."""


def vq_weights(learning: Learning, weights: Mapping[str, float] | None) -> dict[str, float]:
    """Of the losses that there are: commitment (and codebook) always, the others where they weigh something."""
    always = {"commitment": 0.25} | ({"codebook": 1.0} if learning == "gradient" else {})
    optional = {"orthogonality", "diversity"} if learning == "gradient" else {"diversity"}
    given = None if weights is None else {k: v for k, v in weights.items() if k in always or v > 0}
    if learning == "ema" and (wrong := {"codebook", "orthogonality"} & set(given or {})):
        raise ConfigError(
            f"VQ: loss_weights has {sorted(wrong)}, but with learning: ema no gradient moves the codes; "
            "leave it out, or set learning: gradient"
        )
    if learning == "gradient" and given is not None and given.get("codebook", 1.0) == 0:
        raise ConfigError("VQ: loss_weights.codebook is 0, so that nothing would move the codes; set learning: ema")
    if given is not None and learning == "gradient":
        given = {"codebook": 1.0, **given}
    checked = resolve_weights("VQ", always | dict.fromkeys(optional, 0.0), given)
    return {name: weight for name, weight in checked.items() if weight > 0 or name in always}


def check_unsynchronised(learning: Learning, loss_weights: Mapping[str, float]) -> None:
    """Refuse what ranks with codes of their own cannot have.

    Raises:
        ConfigError: codes learned by gradient, or a loss over codes that all ranks share.
    """
    if learning == "gradient":
        raise ConfigError(
            "VQ: sync_codebook is false with learning: gradient, but DDP averages the gradients of codes, which must "
            "then be the same everywhere; expected learning: ema"
        )
    if "diversity" in loss_weights:
        raise ConfigError(
            "VQ: sync_codebook is false with a weight for diversity, a loss over the codes that all ranks share; leave "
            "it out"
        )


def mean_squared_cosine(codes: Tensor) -> Tensor:
    """Between different codes: ``(G, K, D)`` → ``(G,)``; by the Gram matrix of the channels, whose norm is the same."""
    directions, size = unit(codes), codes.shape[1]
    # A code of length 0 has no direction, and its cosine with itself is 0.
    own = directions.square().sum(dim=-1).square().sum(dim=-1)
    return ((directions.mT @ directions).square().sum(dim=(1, 2)) - own) / (size * (size - 1))
