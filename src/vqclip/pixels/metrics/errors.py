"""Errors of the pixels of images, and all metrics of a batch together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vqclip.errors import NonFiniteError, ShapeError
from vqclip.pixels.metrics.ssim import MS_SSIM_SIZE, SSIM_SIZE, ms_ssim, ssim

MAX_PSNR = 100.0
"""PSNR in dB of an image without any error, and the largest value that counts for any other one."""


def to_uint8(pixels: Tensor) -> Tensor:
    """Round pixels as an image file does: float, 0 black and 1 white, clamped → uint8 of the same shape.

    Raises:
        NonFiniteError: a pixel is NaN or infinite.
    """
    if pixels.dtype == torch.uint8:
        return pixels
    bad = int((~pixels.isfinite()).flatten(1).any(dim=1).sum())
    if bad:
        raise NonFiniteError(
            f"pixels: {bad} of {len(pixels)} images have NaN or infinite pixels; expected finite ones: check the "
            "weights of the pixel decoder, or use a higher precision"
        )
    return (pixels.float().clamp(0, 1) * 255).round().to(torch.uint8)


def compare_images(made: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Compare images with their originals.

    Args:
        made: ``(B, 3, H, W)`` uint8, or float in 0..1, which is rounded to 8 bits (`to_uint8`).
        real: ``(B, 3, H, W)`` uint8 or float, the originals.

    Returns:
        Metric → ``(B,)`` float64 on the CPU: ``mse`` and ``mae``, mean squared and mean absolute error of pixels in
        0..1; ``psnr`` in dB; ``ssim`` from 11 pixels of height and width on, ``ms_ssim`` from 161.

    Raises:
        ShapeError: the shapes differ, or are not those of images.
        NonFiniteError: a pixel is NaN or infinite.
    """
    if made.shape != real.shape or made.ndim != 4 or made.shape[1] != 3:
        raise ShapeError(
            f"images: got {tuple(made.shape)} beside originals of {tuple(real.shape)}; expected (B, 3, H, W) twice"
        )
    made, real = (to_uint8(images).cpu() for images in (made, real))
    difference = (made.short() - real.short()).flatten(1).long()  # sums of integers are exact
    mse = difference.square().sum(dim=1).double() / (255**2 * difference.shape[1])
    mae = difference.abs().sum(dim=1).double() / (255 * difference.shape[1])
    found = {"mse": mse, "mae": mae, "psnr": psnr(mse)}
    x, y = made.double() / 255, real.double() / 255
    if min(x.shape[2:]) >= SSIM_SIZE:
        found["ssim"] = ssim(x, y)
    if min(x.shape[2:]) >= MS_SSIM_SIZE:
        found["ms_ssim"] = ms_ssim(x, y)
    return found


def psnr(mse: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of mean squared errors of pixels in 0..1; at most `MAX_PSNR`."""
    return (-10 * mse.log10()).clamp(max=MAX_PSNR)


def mean_figures(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the figures of a set from the values of its images.

    Args:
        values: metric → ``(n,)`` float64, as `compare_images` returns; n at least 1.

    Returns:
        Metric → mean; ``psnr`` is the mean of the images' own PSNR, ``psnr_of_mse`` the PSNR of the mean of their
        squared errors, which is lower and depends on the worst images most.
    """
    means = {name: float(each.mean()) for name, each in values.items()}
    return means | {"psnr_of_mse": float(psnr(values["mse"].mean()))}
