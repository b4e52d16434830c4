"""Table of an evaluation of pixels: reconstructions beside other ways to store an image."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PixelRow:
    """One way to store an image, and what comes back; figures over all images of the set."""

    method: str
    """Name, such as ``codes`` or ``WebP``."""
    bits_per_image: float | None
    """Mean size of a stored image; None where no code is stored."""
    within: float | None
    """Share of the files that are not larger than the codes; None for what is not a file."""
    figures: dict[str, float]
    """``psnr`` and ``psnr_of_mse`` in dB, ``ssim``, ``ms_ssim``, ``mae``; see `vqclip.pixels.metrics`."""
    intervals: dict[str, tuple[float, float]]
    """Figure → 95 % interval, a bootstrap over images."""


@dataclass(frozen=True)
class PixelResult:
    """Everything that pixel figures depend on beside the model, and the rows."""

    reference: str
    """The set of originals."""
    image_size: int
    """Height and width of originals and reconstructions, in pixels."""
    preprocessing: str
    """Crop and resampling of the originals."""
    rows: list[PixelRow]
    """All ids, fewer of them, none, and other methods at as many bytes."""
    distances: dict[str, float] = field(default_factory=dict)
    """Distances of the set of reconstructions from that of originals; the name of each says in which features."""
