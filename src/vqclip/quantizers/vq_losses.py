"""Losses of `VQ` and their weights."""

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
"""Update rule of the codes: moving mean of their vectors, or gradient of the codebook loss."""


class VQLossWeights(Config):
    """Weights of VQ's losses in the training loss."""

    commitment: Annotated[float, Field(ge=0)] = 0.25
    """Weight of the mean squared distance that moves vectors to their codes."""
    codebook: Annotated[float, Field(ge=0)] | None = None
    """Weight of the same distance, moving codes to their vectors: 1 with learning: gradient; not allowed with ema."""
    orthogonality: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean squared cosine between different codes; only with learning: gradient."""
    diversity: Annotated[float, Field(ge=0)] = 0.0
    """Weight of log K minus the entropy of the mean soft assignment; needs tokens × codes numbers of memory."""


def vq_weights(learning: Learning, weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weights of the losses to compute: commitment (and codebook) always, others if above 0.

    Raises:
        ConfigError: a weight that does not fit ``learning``.
    """
    always = {"commitment": 0.25} | ({"codebook": 1.0} if learning == "gradient" else {})
    optional = {"orthogonality", "diversity"} if learning == "gradient" else {"diversity"}
    given = None if weights is None else {k: v for k, v in weights.items() if k in always or v > 0}
    if learning == "ema" and (wrong := {"codebook", "orthogonality"} & set(given or {})):
        raise ConfigError(
            f"VQ: loss_weights has {sorted(wrong)}, but with learning: ema no gradient moves the codes; "
            "leave it out, or set learning: gradient"
        )
    if learning == "gradient" and given is not None and given.get("codebook", 1.0) == 0:
        raise ConfigError("VQ: loss_weights.codebook is 0, so nothing would move the codes; set learning: ema")
    if given is not None and learning == "gradient":
        given = {"codebook": 1.0, **given}
    checked = resolve_weights("VQ", always | dict.fromkeys(optional, 0.0), given)
    return {name: weight for name, weight in checked.items() if weight > 0 or name in always}


def check_unsynchronised(learning: Learning, loss_weights: Mapping[str, float]) -> None:
    """Check the settings of codebooks that differ between ranks.

    Raises:
        ConfigError: codes learned by gradient, or a loss that needs equal codes on all ranks.
    """
    if learning == "gradient":
        raise ConfigError(
            "VQ: sync_codebook is false with learning: gradient, but DDP averages the gradients of codes, which must "
            "then be equal on all ranks; expected learning: ema"
        )
    if "diversity" in loss_weights:
        raise ConfigError(
            "VQ: sync_codebook is false with a weight for diversity, a loss that needs equal codes on all ranks; "
            "set the weight to 0"
        )


def mean_squared_cosine(codes: Tensor) -> Tensor:
    """Return the mean squared cosine between different codes: ``(G, K, D)`` → ``(G,)``.

    Computed from the Gram matrix of the channels, which has the norm of that of the codes.
    """
    directions, size = unit(codes), codes.shape[1]
    # A code of length 0 has no direction, and its cosine with itself is 0.
    own = directions.square().sum(dim=-1).square().sum(dim=-1)
    return ((directions.mT @ directions).square().sum(dim=(1, 2)) - own) / (size * (size - 1))
