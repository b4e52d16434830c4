"""Checks of a quantizer's inputs, ids and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vqclip.config.bounds import MAX_CODEBOOKS, MAX_STAGES, MAX_WIDTH
from vqclip.errors import ConfigError, ShapeError


def require_vectors(name: str, dim: int, x: Tensor, mask: Tensor | None) -> None:
    """Check the input of `Quantizer.forward`.

    Raises:
        ShapeError: wrong width or dtype, or a mask that does not fit.
    """
    if x.ndim == 0 or x.shape[-1] != dim:
        raise ShapeError(f"{name}: x has shape {tuple(x.shape)}, expected (..., {dim}): one channel per entry")
    if not x.is_floating_point():
        raise ShapeError(f"{name}: x is {x.dtype}, expected floating-point vectors (ids are decoded with `decode`)")
    if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != torch.bool):
        raise ShapeError(
            f"{name}: mask is {mask.dtype} of shape {tuple(mask.shape)}, expected torch.bool of shape "
            f"{tuple(x.shape[:-1])}: one entry per token, True = real token"
        )


def require_ids(name: str, sizes: Sequence[int], ids: Tensor) -> None:
    """Check the input of `Quantizer.decode`.

    Raises:
        ShapeError: wrong width or dtype, or an id out of range.
    """
    width = len(sizes)
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ShapeError(f"{name}: ids are {ids.dtype}, expected integers")
    if ids.ndim == 0 or ids.shape[-1] != width:
        raise ShapeError(f"{name}: ids have shape {tuple(ids.shape)}, expected (..., {width}): one id per codebook")
    if torch.compiler.is_compiling():  # the check below depends on values, which a graph cannot
        return
    largest = torch.tensor([size - 1 for size in sizes], device=ids.device)
    wide = ids.long()  # a narrow dtype could not hold the sizes
    wrong = (wide < -1) | (wide > largest)
    if bool(wrong.any()):
        *_, codebook = (int(index) for index in wrong.nonzero()[0])
        raise ShapeError(
            f"{name}: id {int(wide[wrong][0])} in codebook {codebook}, expected 0 to {int(largest[codebook])}, or "
            "-1 for none"
        )


def check_size(name: str, dim: int, codebooks: int, stages: int = 1) -> None:
    """Check the width and the numbers of codebooks and stages of a quantizer that contains others, before it is made.

    Raises:
        ConfigError: more than `MAX_WIDTH` channels, `MAX_CODEBOOKS` codebooks or `MAX_STAGES` stages.
    """
    if codebooks > MAX_CODEBOOKS or dim > MAX_WIDTH:
        raise ConfigError(
            f"{name}: got {codebooks} codebooks and {dim} channels a token, nested ones counted; expected at most "
            f"{MAX_CODEBOOKS} of each"
        )
    if stages > MAX_STAGES:
        raise ConfigError(f"{name}: got {stages} stages, nested ones counted; expected at most {MAX_STAGES}")


def resolve_weights(name: str, defaults: Mapping[str, float], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of every existing loss: 0 for a missing one, or the defaults if ``weights`` is None.

    Raises:
        ConfigError: a weight for a loss that does not exist.
    """
    if unknown := set(weights or {}) - set(defaults):
        raise ConfigError(f"{name}: no loss is named {sorted(unknown)}, expected some of {sorted(defaults)}")
    return dict(defaults) if weights is None else dict.fromkeys(defaults, 0.0) | dict(weights)


def check_channels(name: str, channels: int, least: int = 2) -> None:
    """Check that vectors have enough channels to be normalised.

    Raises:
        ConfigError: normalising would leave only a sign, without a gradient.
    """
    if channels < least:
        raise ConfigError(
            f"{name}: got {channels} channel{'s' * (channels > 1)}, of which only a sign would be left, without a "
            f"gradient; expected at least {least}, or no normalisation"
        )
