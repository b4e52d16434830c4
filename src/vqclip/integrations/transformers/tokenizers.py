"""Image and text tokenizers as models of transformers.

Shapes: B samples, N tokens, C codebooks, D width of decoded vectors, E width of the joint embedding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils import ModelOutput

import vqclip
from vqclip.errors import ConfigError, ShapeError
from vqclip.integrations.transformers.base import FolderModel
from vqclip.integrations.transformers.config import VqclipImageTokenizerConfig, VqclipTextTokenizerConfig
from vqclip.tokenizer import ImageTokenizer, ImageTokenizerConfig, TextTokenizer, TextTokenizerConfig, Tokenizer
from vqclip.tokenizer.folder import StoredTokenizer


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
        self.tokenizer = build_tokenizer(config, self.modality) if tokenizer is None else tokenizer
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
        config: its configuration; alone it gives random weights.
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
        config: its configuration; alone it gives random weights.
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
        return VqclipTextTokenizerOutput(text_codes=encode_text(self.tokenizer, input_ids, attention_mask))

    def get_text_tokens(self, input_ids: Tensor, attention_mask: Tensor | None = None, offset: int = 0) -> Tensor:
        """Encode captions to ids of a language model ``(B, N·C)``, -1 at padding; arguments as of `encode`.

        Args:
            input_ids: see `encode`.
            attention_mask: see `encode`.
            offset: id of the first code.
        """
        return self.tokenizer.to_vocabulary(encode_text(self.tokenizer, input_ids, attention_mask), offset)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> VqclipTextTokenizerOutput:
        """Encode captions, and embed their codes."""
        codes = encode_text(self.tokenizer, input_ids, attention_mask)
        return VqclipTextTokenizerOutput(text_codes=codes, text_embeds=self.tokenizer.embed(codes))


def require_pixels(pixel_values: Tensor) -> Tensor:
    """Check that images are a tensor, since transformers has the processor for all others; raise ShapeError if not."""
    if not isinstance(pixel_values, Tensor):
        raise ShapeError(
            f"pixel_values: got a {type(pixel_values).__name__}, expected a tensor (B, 3, H, W); VqclipImageProcessor "
            "makes one of PIL images"
        )
    return pixel_values


def encode_text(tokenizer: TextTokenizer, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Encode token numbers ``(B, N)`` to codes; see `VqclipTextTokenizer.encode`."""
    return tokenizer.encode(require_tokens(tokenizer, input_ids, attention_mask))


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


def build_tokenizer(config: Any, modality: str) -> Tokenizer:
    """Build a tokenizer with random weights from a configuration of transformers.

    Raises:
        ConfigError: the configuration lacks its section, or needs files of a folder (a vocabulary).
    """
    section = getattr(config, modality)
    if section is None:
        raise ConfigError(
            f"{type(config).__name__}: got no section {modality!r}; expected that of a tokenizer folder, which "
            "from_pretrained reads"
        )
    schema: Any = ImageTokenizerConfig if modality == "image" else TextTokenizerConfig
    own = set(StoredTokenizer.model_fields) - set(schema.model_fields)
    settings = {name: value for name, value in section.items() if name not in own}
    if settings["tower"].get("kind") == "transformers":
        raise ConfigError(
            f"{type(config).__name__}: towers of transformers need the files of a folder; expected from_pretrained"
        )
    # Through JSON, in which strict schemas take lists for tuples.
    return schema.model_validate_json(json.dumps(settings)).build(section["embed_dim"])
