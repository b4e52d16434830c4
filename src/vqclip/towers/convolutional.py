"""A small convolutional image tower that learns fast on CPUs and little data, without batch statistics."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config.bounds import MAX_WIDTH
from vqclip.towers.image import ImageTower
from vqclip.towers.pixels import Normalize
from vqclip.towers.training import TowerConfig, set_training


class _Convolutions(nn.Module):
    """Strided 3×3 convolutions, each with group normalisation and ReLU: ``(B, 3, H, W) → (B, N, D)``.

    Standardised weights (Qiao et al. 2019; BiT, Kolesnikov et al. 2020) let group normalisation train as fast as batch
    normalisation, whose statistics would tie a sample to the others of its rank.
    """

    def __init__(self, channels: list[int], channels_per_group: int):
        super().__init__()
        from timm.layers import StdConv2d

        self.stages = nn.ModuleList(
            nn.Sequential(
                StdConv2d(before, after, 3, stride=2, padding=1),
                nn.GroupNorm(after // channels_per_group, after),
                nn.ReLU(),
            )
            for before, after in zip([3, *channels], channels, strict=False)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels
        for stage in self.stages:
            x = stage(x)
        return x.flatten(2).transpose(1, 2)


class ConvolutionalTowerConfig(TowerConfig):
    """A plain stack of strided convolutions: each stage halves the image, the last one's cells are the tokens."""

    kind: Literal["convolutional"] = "convolutional"
    image_size: int = Field(ge=8, le=4096)
    """Height and width of the input in pixels; a multiple of 2^stages."""
    channels: list[Annotated[int, Field(ge=1, le=MAX_WIDTH)]] = Field([32, 64, 128, 192], min_length=1, max_length=8)
    """Channels of each stage; there are (image_size / 2^stages)² tokens."""
    channels_per_group: int = Field(4, ge=1)
    """Number of channels that are normalised together; must divide every entry of `channels`."""

    @model_validator(mode="after")
    def _groups_divide_channels(self) -> ConvolutionalTowerConfig:
        if any(width % self.channels_per_group for width in self.channels):
            raise ValueError(
                f"got channels {self.channels} and channels_per_group {self.channels_per_group}; expected channels "
                "that are multiples of channels_per_group"
            )
        return self

    @model_validator(mode="after")
    def _stages_halve_the_image(self) -> ConvolutionalTowerConfig:
        cell = 2 ** len(self.channels)
        if self.image_size % cell:
            raise ValueError(
                f"got image_size {self.image_size} and {len(self.channels)} stages in channels; expected an image_size "
                f"that is a multiple of 2^{len(self.channels)}, such as {max(1, round(self.image_size / cell)) * cell}"
            )
        if self.image_size == cell and self.channels_per_group == 1:
            raise ValueError(
                "got channels_per_group 1 with a single token: each group is one number, which is normalised "
                "to 0; expected channels_per_group 2 or more, a larger image_size or fewer stages in channels"
            )
        return self

    @torch.inference_mode(False)
    def build(self) -> ImageTower:
        """Make the tower with random weights (torch's global generator), channels last in memory."""
        network = _Convolutions(self.channels, self.channels_per_group).to(memory_format=torch.channels_last)
        return set_training(ImageTower(network, Normalize(self.image_size)), self.train)
