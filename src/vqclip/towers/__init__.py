"""Towers: networks that map pixels or text to a grid or sequence of features ``(B, N, D)``.

After `vqclip.data`, which yields pixels and token numbers; before the quantizers. To add a tower: its config class,
with `build`, and one line in a union below.
"""

from typing import Annotated

from pydantic import Field

from vqclip.towers.image import ConvolutionalTowerConfig, ImageTower, TimmTowerConfig
from vqclip.towers.naflex import NaFlexTowerConfig
from vqclip.towers.open_clip import OpenCLIPImageTowerConfig, OpenCLIPTextTowerConfig
from vqclip.towers.text import TextTower, TransformerTowerConfig
from vqclip.towers.transformers import TransformersImageTowerConfig, TransformersTextTowerConfig
from vqclip.towers.vocabulary import BPE, CaptionLengths, Vocabulary

ImageTowerConfig = Annotated[
    TimmTowerConfig
    | OpenCLIPImageTowerConfig
    | ConvolutionalTowerConfig
    | TransformersImageTowerConfig
    | NaFlexTowerConfig,
    Field(discriminator="kind"),
]
TextTowerConfig = Annotated[
    TransformerTowerConfig | OpenCLIPTextTowerConfig | TransformersTextTowerConfig, Field(discriminator="kind")
]

__all__ = ["BPE", "CaptionLengths", "ImageTower", "ImageTowerConfig", "TextTower", "TextTowerConfig", "Vocabulary"]
