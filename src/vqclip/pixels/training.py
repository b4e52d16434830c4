"""The section `model.image.pixels`: a pixel decoder that trains together with the tokenizer."""

from __future__ import annotations

import torch
from pydantic import Field

from vqclip.config import Config
from vqclip.pixels.decoder import PixelDecoder, PixelDecoderConfig, PixelsConfig
from vqclip.pixels.losses import PixelLossesConfig
from vqclip.pixels.losses.distances import L1Config
from vqclip.seeds import derive_seed

__all__ = ["PixelTrainingConfig"]


class PixelTrainingConfig(Config):
    """A pixel decoder that trains together with the tokenizer."""

    decoder: PixelDecoderConfig
    """From the vectors of the codes to pixels."""
    losses: PixelLossesConfig = (L1Config(),)
    """Differences between decoded and real images."""
    weight: float = Field(1.0, ge=0, le=1e6)
    """Factor on the gradient that the losses have for the tokenizer; the decoder trains with the whole gradient. 0: the
    tokenizer trains as without a decoder."""
    start_step: int = Field(0, ge=0)
    """First step in which the decoder trains, counted from 0; before it the run is one without a decoder."""
    one_in: int = Field(1, ge=1)
    """Decode one image in this many, other ones in every step. More make a step cheaper."""

    def build(self, dim: int, num_tokens: int, image_size: int) -> PixelDecoder:
        """Make the decoder with random weights; leaves torch's global generator, from which it is seeded, as it was.

        Raises:
            ConfigError: the decoder does not fit the tokens.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(torch.initial_seed(), "pixel decoder"))
            return PixelsConfig(decoder=self.decoder, image_size=image_size).build(dim, num_tokens)
