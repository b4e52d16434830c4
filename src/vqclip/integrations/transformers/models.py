"""Image and text tokenizers, and the whole model, as models of transformers.

Shapes: B samples, N tokens, C codebooks, D width of decoded vectors, E width of the joint embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils import ModelOutput

import vqclip
from vqclip.errors import ConfigError, ShapeError
from vqclip.integrations.transformers.folders import (
    FolderModel,
    VqclipConfig,
    VqclipImageTokenizerConfig,
    VqclipTextTokenizerConfig,
)
from vqclip.model import CLIP
from vqclip.nn.precision import full_precision
from vqclip.tokenizer import ImageTokenizer, TextTokenizer, Tokenizer

_EMBEDDINGS = ("codes_only", "continuous")


@dataclass
class VqclipImageTokenizerOutput(ModelOutput):
    """Codes of images, and what was asked for beside them."""

    image_codes: Tensor | None = None
    """``(B, N, C)`` int64."""
    image_embeds: Tensor | None = None
    """``(B, E)`` unit-norm, from the codes alone; only from ``forward``."""


@dataclass
class VqclipTextTokenizerOutput(ModelOutput):
    """Codes of captions, and what was asked for beside them."""

    text_codes: Tensor | None = None
    """``(B, N, C)`` int64, -1 at padding."""
    text_embeds: Tensor | None = None
    """``(B, E)`` unit-norm, from the codes alone; only from ``forward``."""


class _TokenizerModel(FolderModel):
    """Common part: everything that starts from codes."""

    modality: ClassVar[str]
    tokenizer: Tokenizer

    def __init__(self, config: Any, tokenizer: Tokenizer | None = None):
        super().__init__(config)
        self.tokenizer = require_loaded(type(self), tokenizer)
        self.post_init()

    @classmethod
    def _load(cls, folder: Path) -> Tokenizer:
        load: Any = vqclip.load_tokenizer
        return load(folder, cls.modality)

    @property
    def _stored(self) -> Tokenizer:
        return self.tokenizer

    @property
    def num_tokens(self) -> int:
        """N, tokens a sample."""
        return self.tokenizer.num_tokens

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """K of each of the C codebooks."""
        return self.tokenizer.codebook_sizes

    def decode(self, codes: Tensor) -> Tensor:
        """Map codes ``(B, N, C)`` to vectors ``(B, N, D)`` for a downstream model; see `Tokenizer.decode`."""
        return self.tokenizer.decode(codes)

    def embed(self, codes: Tensor) -> Tensor:
        """Map codes ``(B, N, C)`` to the joint embedding ``(B, E)``, unit-norm; see `Tokenizer.embed`."""
        return self.tokenizer.embed(codes)

    def tokens_to_codes(self, tokens: Tensor, offset: int = 0) -> Tensor:
        """Map ids of a language model ``(B, N·C)`` back to codes ``(B, N, C)``; see `Tokenizer.from_vocabulary`.

        Raises:
            ShapeError: for another shape, or an id outside the range of the codebook at its position.
        """
        return self.tokenizer.from_vocabulary(tokens, offset)


class VqclipImageTokenizer(_TokenizerModel):
    """Images → codes → vectors and embeddings: `vqclip.tokenizer.ImageTokenizer` as a model of transformers.

    Args:
        config: its configuration.
        tokenizer: the tokenizer.
    """

    config_class = VqclipImageTokenizerConfig
    main_input_name = "pixel_values"
    modality = "image"
    tokenizer: ImageTokenizer

    def encode(self, pixel_values: Tensor) -> VqclipImageTokenizerOutput:
        """Encode images ``(B, 3, H, W)``, uint8 (0..255, as the processor makes them) or float (0..1).

        Raises:
            ShapeError: for another shape, dtype or range.
        """
        return VqclipImageTokenizerOutput(image_codes=self.tokenizer.encode(require_pixels(pixel_values)))

    def get_image_tokens(self, pixel_values: Tensor, offset: int = 0) -> Tensor:
        """Encode images to ids of a language model ``(B, N·C)``, each codebook in a range of its own from ``offset``.

        Args:
            pixel_values: see `encode`.
            offset: id of the first code, such as the size of the language model's vocabulary.
        """
        return self.tokenizer.to_vocabulary(self.tokenizer.encode(require_pixels(pixel_values)), offset)

    def decode_pixels(
        self, codes: Tensor, stages: int | None = None, codebooks: int | None = None, detail: int | None = None
    ) -> Tensor:
        """Map codes ``(B, N, C)`` to images ``(B, 3, H, W)`` in 0..1; see `TokenizerDecoder.decode_pixels`."""
        return self.tokenizer.decode_pixels(codes, stages, codebooks, detail)

    def forward(self, pixel_values: Tensor) -> VqclipImageTokenizerOutput:
        """Encode images, and embed their codes."""
        codes = self.tokenizer.encode(require_pixels(pixel_values))
        return VqclipImageTokenizerOutput(image_codes=codes, image_embeds=self.tokenizer.embed(codes))


class VqclipTextTokenizer(_TokenizerModel):
    """Captions → codes → vectors and embeddings: `vqclip.tokenizer.TextTokenizer` as a model of transformers.

    Its inputs are those of `VqclipVocabulary`.

    Args:
        config: its configuration.
        tokenizer: the tokenizer.
    """

    config_class = VqclipTextTokenizerConfig
    main_input_name = "input_ids"
    modality = "text"
    tokenizer: TextTokenizer

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> VqclipTextTokenizerOutput:
        """Encode captions.

        Args:
            input_ids: ``(B, N)`` int64 from `VqclipVocabulary`.
            attention_mask: ``(B, N)``; only compared with the padding that the rows have themselves.

        Raises:
            ShapeError: for other rows than the vocabulary makes, or a mask that does not fit.
        """
        return VqclipTextTokenizerOutput(text_codes=self._codes(input_ids, attention_mask))

    def get_text_tokens(self, input_ids: Tensor, attention_mask: Tensor | None = None, offset: int = 0) -> Tensor:
        """Encode captions to ids of a language model ``(B, N·C)``, -1 at padding; arguments as of `encode`.

        Args:
            input_ids: see `encode`.
            attention_mask: see `encode`.
            offset: id of the first code.
        """
        return self.tokenizer.to_vocabulary(self._codes(input_ids, attention_mask), offset)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> VqclipTextTokenizerOutput:
        """Encode captions, and embed their codes."""
        codes = self._codes(input_ids, attention_mask)
        return VqclipTextTokenizerOutput(text_codes=codes, text_embeds=self.tokenizer.embed(codes))

    def _codes(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.tokenizer.encode(require_tokens(self.tokenizer, input_ids, attention_mask))


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
        config: its configuration.
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
        self.clip = require_loaded(type(self), clip)
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


def require_loaded(kind: type, module: Any) -> Any:
    """Return the module around which a model is made; raise ConfigError for a configuration alone."""
    if module is None:
        raise ConfigError(
            f"{kind.__name__}: got a configuration without weights; expected {kind.__name__}.from_pretrained"
        )
    return module


def require_pixels(pixel_values: Tensor) -> Tensor:
    """Check that images are a tensor, since transformers has the processor for all others; raise ShapeError if not."""
    if not isinstance(pixel_values, Tensor):
        raise ShapeError(
            f"pixel_values: got a {type(pixel_values).__name__}, expected a tensor (B, 3, H, W); VqclipImageProcessor "
            "makes one of PIL images"
        )
    return pixel_values


def require_tokens(tokenizer: TextTokenizer, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return token numbers after a comparison with their mask; raise ShapeError if they do not fit."""
    if not isinstance(input_ids, Tensor):
        raise ShapeError(
            f"input_ids: got a {type(input_ids).__name__}, expected a tensor (B, N); VqclipVocabulary makes one of "
            "captions with return_tensors='pt'"
        )
    tokens = tokenizer.batch(input_ids)
    if attention_mask is not None:
        given, real = attention_mask.to(tokens.device, torch.bool), tokenizer.mask(tokens)
        if given.shape != real.shape or not torch.equal(given, real):
            raise ShapeError(
                f"attention_mask: got a mask of shape {tuple(given.shape)} that differs from the padding of input_ids "
                f"{tuple(real.shape)}; expected that of VqclipVocabulary, or none"
            )
    return tokens
