"""Metrics of images beside their originals, one value for each image.

Every figure is made of values of single images, in float64 on the 8-bit pixels that an image file would have. So
figures do not depend on batches or on the number of processes: errors are equal to the bit, similarities up to
the last bits of float64.
"""

from vqclip.pixels.metrics.errors import MAX_PSNR, compare_images, mean_figures, psnr, to_uint8
from vqclip.pixels.metrics.ssim import MS_SSIM_SIZE, SSIM_SIZE, ms_ssim, ssim

__all__ = [
    "MAX_PSNR",
    "MS_SSIM_SIZE",
    "SSIM_SIZE",
    "compare_images",
    "mean_figures",
    "ms_ssim",
    "psnr",
    "ssim",
    "to_uint8",
]
