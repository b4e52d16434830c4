"""Towers: networks that map pixels or text to a grid or sequence of features ``(B, N, D)``.

After `vqclip.data`, which yields pixels and token numbers; before the quantizers. To add a tower: one file with its
config class, and one line in a union below.
"""

from typing import Annotated

from pydantic import Field

from vqclip.towers.bpe import BPE
from vqclip.towers.convolutional import ConvolutionalTowerConfig
from vqclip.towers.huggingface import TransformersImageTowerConfig, TransformersTextTowerConfig
from vqclip.towers.image import ImageTower, OpenCLIPImageTowerConfig, TimmTowerConfig
from vqclip.towers.text import OpenCLIPTextTowerConfig, TextTower, TransformerTowerConfig
from vqclip.towers.vocabulary import CaptionLengths, Vocabulary

ImageTowerConfig = Annotated[
    TimmTowerConfig | OpenCLIPImageTowerConfig | ConvolutionalTowerConfig | TransformersImageTowerConfig,
    Field(discriminator="kind"),
]
TextTowerConfig = Annotated[
    TransformerTowerConfig | OpenCLIPTextTowerConfig | TransformersTextTowerConfig, Field(discriminator="kind")
]

__all__ = ["BPE", "CaptionLengths", "ImageTower", "ImageTowerConfig", "TextTower", "TextTowerConfig", "Vocabulary"]
