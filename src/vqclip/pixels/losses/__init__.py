"""Losses on pixels: made and real images to terms over the global batch.

Each kind is one file with its config class, and one line in the union `PixelLossConfig`.
"""

from typing import Annotated

from pydantic import Field

from vqclip.pixels.losses.adversarial import AdversarialConfig
from vqclip.pixels.losses.distances import L1Config, L2Config
from vqclip.pixels.losses.lpips import LPIPSConfig
from vqclip.pixels.losses.perceptual import PerceptualConfig
from vqclip.pixels.losses.total import PixelLosses, require_starts

PixelLossConfig = Annotated[
    L1Config | L2Config | PerceptualConfig | LPIPSConfig | AdversarialConfig, Field(discriminator="kind")
]
"""Configuration of any term, chosen by ``kind``."""
PixelLossesConfig = tuple[PixelLossConfig, ...]
"""Configuration of all terms."""

__all__ = ["PixelLossConfig", "PixelLosses", "PixelLossesConfig", "require_starts"]
