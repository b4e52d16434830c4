"""Metrics of images beside their originals, one value for each image.

Every figure is made of values of single images, in float64 on the 8-bit pixels that an image file would have. So
figures do not depend on batches or on the number of processes: errors are equal to the bit, similarities up to
the last bits of float64.

SSIM (Wang et al. 2004) and MS-SSIM (Wang, Simoncelli and Bovik 2003) are averaged over the channels red, green and
blue. The window is a Gaussian of 11 x 11 pixels with sigma 1.5; only windows inside of the image count, so no border is
invented. K1 = 0.01, K2 = 0.03, pixels in 0..1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vqclip.errors import NonFiniteError, ShapeError

MAX_PSNR = 100.0
"""PSNR in dB of an image without any error, and the largest value that counts for any other one."""
_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2
_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)

SSIM_SIZE = _WINDOW
"""Least height and width for SSIM, in pixels."""
MS_SSIM_SIZE = (_WINDOW - 1) * 2 ** (len(_WEIGHTS) - 1) + 1
"""Least height and width for MS-SSIM, in pixels."""


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


def ssim(made: Tensor, real: Tensor) -> Tensor:
    """Return the SSIM ``(B,)`` of images ``(B, C, H, W)`` in 0..1, of at least `SSIM_SIZE` pixels; 1 if equal."""
    luminance, contrast = _maps(made, real)
    return (luminance * contrast).mean(dim=(1, 2, 3))


def ms_ssim(made: Tensor, real: Tensor) -> Tensor:
    """Return the MS-SSIM ``(B,)`` of images ``(B, C, H, W)`` in 0..1, of at least `MS_SSIM_SIZE` pixels; 1 if equal.

    Five scales; each is the mean of 2 x 2 pixels of the one before, of an odd row or column at the border what there
    is. A negative contrast of a scale counts as 0.
    """
    product: Tensor | float = 1.0
    for scale, weight in enumerate(_WEIGHTS):
        if scale:
            made, real = (F.avg_pool2d(images, 2, ceil_mode=True) for images in (made, real))
        luminance, contrast = _maps(made, real)
        value = luminance * contrast if scale == len(_WEIGHTS) - 1 else contrast
        product = product * value.mean(dim=(2, 3)).clamp(min=0) ** weight
    assert isinstance(product, Tensor)
    return product.mean(dim=1)


def _maps(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the luminance and the contrast-structure at each window, ``(B, C, H - 10, W - 10)``."""
    rows, columns = _windows(x.shape[2], x), _windows(x.shape[3], x)
    mean_x, mean_y, xx, yy, xy = (rows @ each @ columns.T for each in (x, y, x * x, y * y, x * y))
    var_x, var_y, cov = xx - mean_x**2, yy - mean_y**2, xy - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    return luminance, (2 * cov + _C2) / (var_x + var_y + _C2)


def _windows(size: int, like: Tensor) -> Tensor:
    """Return a matrix ``(size - 10, size)`` that has a Gaussian window in each row.

    For small images it takes a third of the time of a convolution, in float64 on a CPU.
    """
    offset = torch.arange(size, device=like.device) - torch.arange(size - _WINDOW + 1, device=like.device)[:, None]
    centred = offset.to(like.dtype) - _WINDOW // 2
    weights = torch.exp(-(centred**2) / (2 * _SIGMA**2)) * ((offset >= 0) & (offset < _WINDOW))
    return weights / weights.sum(dim=1, keepdim=True)
