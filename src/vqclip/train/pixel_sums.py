"""Sums over the images that a step decodes, and their metrics; for every task with a pixel decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from vqclip.pixels import PixelDecoder
from vqclip.pixels.losses import PixelLosses
from vqclip.pixels.metrics import psnr
from vqclip.quantizers import Stats

__all__ = ["error_metrics", "sums_of_decoded"]


def sums_of_decoded(
    decoder: PixelDecoder, losses: PixelLosses, vectors: Tensor, images: Tensor, places: Tensor, step: int
) -> dict[str, Stats]:
    """Decode images as in training and compare them with the real ones. No collective.

    Args:
        decoder: its detail codebooks are keyed.
        losses: terms of the loss.
        vectors: ``(B, N, D)`` of the codes.
        images: ``(B, 3, H, W)`` uint8.
        places: ``(B,)`` int64, positions of the samples in the global batch.
        step: number of the step, from 0.

    Returns:
        Sums of the losses as ``pixels``, of the errors as ``errors``, and of detail codebooks, if any, as ``detail``.
    """
    made, detail = decoder.reconstruct(vectors, images, places, step)
    sums = {"pixels": Stats(losses(made, images, step)), "errors": Stats(_error_sums(made, images))}
    return sums | ({"detail": detail} if detail else {})


def error_metrics(errors: Stats) -> dict[str, Tensor]:
    """Return the mean squared error of all pixels, its PSNR in dB, and the variance of the images.

    The variance is the error of one image of the mean colour.
    """
    mse, colour, power = (errors[name] / errors["count"] for name in ("squares", "colour", "power"))
    return {
        "pixels/mse": mse,
        "pixels/psnr": psnr(mse),
        "pixels/variance": power - colour.square().mean(),
    }


@torch.no_grad()
def _error_sums(made: Tensor, images: Tensor) -> dict[str, Tensor]:
    """Return the sums over images of the squared error, and of what the variance of all pixels is made of."""
    real = images.double() / 255
    return {
        "count": torch.full((), len(images), device=images.device),
        "squares": (made.double().clamp(0, 1) - real).square().mean(dim=(1, 2, 3)).sum(),
        "colour": real.mean(dim=(2, 3)).sum(dim=0),
        "power": real.square().mean(dim=(1, 2, 3)).sum(),
    }
