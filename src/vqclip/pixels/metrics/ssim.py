"""Structural similarity: SSIM (Wang et al. 2004) and MS-SSIM (Wang, Simoncelli and Bovik 2003).

Both on each of the channels red, green and blue, averaged over them. The window is a Gaussian of 11 x 11 pixels with
sigma 1.5; only windows inside of the image count, so no border is invented. K1 = 0.01, K2 = 0.03, pixels in 0..1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2
_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)

SSIM_SIZE = _WINDOW
"""Least height and width for SSIM, in pixels."""
MS_SSIM_SIZE = (_WINDOW - 1) * 2 ** (len(_WEIGHTS) - 1) + 1
"""Least height and width for MS-SSIM, in pixels."""


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
