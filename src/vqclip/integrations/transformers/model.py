"""The whole model, as a CLIP model of transformers: similarities of images and texts, from codes or without them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.integrations.transformers.base import FolderModel
from vqclip.integrations.transformers.config import VqclipConfig
from vqclip.integrations.transformers.tokenizers import (
    build_tokenizer,
    require_pixels,
    require_tokens,
)
from vqclip.model import CLIP, ModelConfig
from vqclip.nn.precision import full_precision
from vqclip.tokenizer import Tokenizer

_EMBEDDINGS = ("codes_only", "continuous")


@dataclass
class VqclipOutput(ModelOutput):
    """Similarities of images and texts, and their embeddings."""

    logits_per_image: Tensor | None = None
    """``(images, texts)``: scale times cosine, plus the bias if there is one."""
    logits_per_text: Tensor | None = None
    """``(texts, images)``, its transpose."""
    image_embeds: Tensor | None = None
    """``(images, E)`` unit-norm."""
    text_embeds: Tensor | None = None
    """``(texts, E)`` unit-norm."""


class VqclipModel(FolderModel):
    """`vqclip.CLIP` as a model of transformers, for pipelines of zero-shot image classification.

    Args:
        config: its configuration; alone it gives random weights.
        clip: the model.

    Raises:
        ConfigError: unknown ``config.embeddings``, or ``codes_only`` of a tokenizer without codes.
    """

    config_class = VqclipConfig
    main_input_name = "pixel_values"

    def __init__(self, config: VqclipConfig, clip: CLIP | None = None):
        super().__init__(config)
        if config.embeddings not in _EMBEDDINGS:
            raise ConfigError(f"embeddings: got {config.embeddings!r}, expected one of {', '.join(_EMBEDDINGS)}")
        self.clip = _build(config) if clip is None else clip
        for tokenizer in (self.clip.image, self.clip.text):
            if config.embeddings == "codes_only" and not tokenizer.codebook_sizes:
                raise ConfigError(
                    f"embeddings: got 'codes_only', but the {tokenizer.modality} quantizer has no codes; expected "
                    "'continuous'"
                )
        self.post_init()

    @classmethod
    def _load(cls, folder: Path) -> CLIP:
        return CLIP.from_pretrained(folder)

    @property
    def _stored(self) -> CLIP:
        return self.clip

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Embed images ``(B, 3, H, W)``, uint8 or float in 0..1, as ``(B, E)`` unit-norm."""
        return self._embed(self.clip.image, self.clip.image.batch(require_pixels(pixel_values)))

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed captions, token numbers ``(B, N)`` from `VqclipVocabulary`, as ``(B, E)`` unit-norm."""
        return self._embed(self.clip.text, require_tokens(self.clip.text, input_ids, attention_mask))

    def _embed(self, tokenizer: Tokenizer, inputs: Tensor) -> Tensor:
        if self.config.embeddings == "continuous":
            with full_precision(inputs.device):
                return tokenizer.continuous(inputs)
        return tokenizer.embed(tokenizer.encode(inputs))

    @torch.no_grad()
    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None) -> VqclipOutput:
        """Compare every image with every caption, without gradients; `vqclip.CLIP` is what is trained.

        Args:
            input_ids: ``(texts, N)`` from `VqclipVocabulary`.
            pixel_values: ``(images, 3, H, W)`` from `VqclipImageProcessor`.
            attention_mask: ``(texts, N)``; see `VqclipTextTokenizer.encode`.
        """
        images, texts = self.get_image_features(pixel_values), self.get_text_features(input_ids, attention_mask)
        scale, bias = self.clip.temperature()
        with full_precision(images.device):
            logits = scale * images @ texts.T
        logits = logits if bias is None else logits + bias
        return VqclipOutput(logits, logits.T, images, texts)


def _build(config: VqclipConfig) -> CLIP:
    """Build a model with random weights from its sections."""
    image, text = (build_tokenizer(config, modality) for modality in ("image", "text"))
    sections: dict[str, Config | Any] = {"image": image.config, "text": text.config, "embed_dim": image.embed_dim}
    if config.temperature is not None:
        sections["temperature"] = config.temperature
    return ModelConfig.model_validate(sections).build()
