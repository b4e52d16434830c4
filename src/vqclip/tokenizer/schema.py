"""Schema of the ``config.json`` of a tokenizer folder."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from vqclip.config import Config, Modality
from vqclip.config.bounds import EmbedDim, NumTokens
from vqclip.io.atomic import FileDigest
from vqclip.nn.temperature import TemperatureConfig
from vqclip.pixels.decoder import PixelsConfig
from vqclip.tokenizer.decoder import DecoderConfig

__all__ = ["EXTRA_FILES", "MODALITIES", "MODEL_TYPES", "FolderConfig", "Modality", "StoredPixels", "StoredTokenizer"]

EXTRA_FILES = ("tokenizer.json",)
"""Files that some towers need: the vocabulary of a text tower of transformers."""
MODALITIES: tuple[Modality, ...] = ("image", "text")
MODEL_TYPES = {("image",): "vqclip_image_tokenizer", ("text",): "vqclip_text_tokenizer", ("image", "text"): "vqclip"}
"""Modalities of a folder → name by which transformers finds the class; see `vqclip.integrations.transformers`."""
_MAX_FILE_BYTES = 64 << 20
"""Larger further files are not read; the largest `tokenizer.json` in use have 35 MB."""


class StoredTokenizer(DecoderConfig):
    """A tokenizer's section of ``config.json``.

    The keys that only encoding needs are checked by `TokenizerFolder.tokenizer_config`, for their schemas import the
    towers.
    """

    embed_dim: EmbedDim
    """E, width of the joint embedding."""
    num_tokens: NumTokens
    """N, tokens a sample."""
    fewest_tokens: NumTokens
    """Smallest number of tokens in a batch."""
    tower: dict[str, Any]
    """From pixels or captions to features."""
    reduce: dict[str, Any] | None = None
    """From the tower's features to fewer ones; absent if all are kept."""
    project_in: dict[str, Any]
    """From features to the quantizer's channels."""
    normalize: str
    """Normalisation of those channels."""
    preprocess: dict[str, Any] | None = None
    """Preparation of images; absent for text."""

    @model_validator(mode="after")
    def _fewest_within_tokens(self) -> StoredTokenizer:
        if self.fewest_tokens > self.num_tokens:
            raise ValueError(
                f"got num_tokens {self.num_tokens} and fewest_tokens {self.fewest_tokens}; expected fewest_tokens <= "
                "num_tokens"
            )
        return self

    def expected_shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of weights that show these sizes, by their names in the folder, each after ``prefix``.

        Raises:
            ConfigError: the quantizer cannot be built.
        """
        width = self.width
        with torch.device("meta"):
            quantizer = self.quantizer.build().state_dict()
        pool = {
            "position": (self.num_tokens, width),
            **{f"blocks.{number}.mlp.0.weight": (4 * width, width) for number in range(self.depth)},
            "attention.query.weight": (width, width),
            "head.weight": (self.embed_dim, width),
        }
        shapes = {f"{prefix}pool.{name}": shape for name, shape in pool.items()}
        return shapes | {f"{prefix}quantizer.{name}": tuple(weight.shape) for name, weight in quantizer.items()}


class StoredPixels(PixelsConfig):
    """The pixel decoder's section of ``config.json``."""

    weights: FileDigest
    """Digest of ``pixels.safetensors``."""


class FolderConfig(Config):
    """Schema of ``config.json`` without its versions and checksum: one tokenizer, or both and their temperature."""

    model_type: Literal["vqclip", "vqclip_image_tokenizer", "vqclip_text_tokenizer"] | None = None
    """Name for transformers, see `MODEL_TYPES`; absent in older folders."""
    weights: FileDigest
    """Digest of ``model.safetensors``."""
    files: dict[Literal["tokenizer.json"], FileDigest] = {}
    """Digests of the files that a tower needs, by name; absent if none."""
    image: StoredTokenizer | None = None
    """The image tokenizer."""
    text: StoredTokenizer | None = None
    """The text tokenizer."""
    temperature: TemperatureConfig | None = None
    """Scale and bias of the logits, if both tokenizers are present."""
    pixels: StoredPixels | None = None
    """The pixel decoder of the image tokenizer; absent if it has none."""
    frozen: FileDigest | None = None
    """Digest of the run's file of frozen tensors, which are not in ``model.safetensors``; only in checkpoints."""
    adapters: dict[Modality, Annotated[float, Field(gt=0)]] = {}
    """Factors on the adapters of towers, which are merged when the tokenizer is loaded; only in checkpoints."""

    @model_validator(mode="after")
    def _complete(self) -> FolderConfig:
        if self.text is not None and self.text.preprocess is not None:
            raise ValueError("text.preprocess: got a section; expected none, which only images have")
        if self.pixels is not None and self.image is None:
            raise ValueError("pixels: got a section without an image tokenizer; expected both or neither")
        needed = set() if self.text is None or self.text.tower.get("kind") != "transformers" else set(EXTRA_FILES)
        if set(self.files) != needed:
            raise ValueError(f"files: got {sorted(self.files)}; expected {sorted(needed)} for these towers")
        for name, digest in self.files.items():
            if digest.size > _MAX_FILE_BYTES:
                raise ValueError(f"files.{name}: got {digest.size} bytes; expected at most {_MAX_FILE_BYTES}")
        if self.image is not None and self.text is not None:
            if self.temperature is None:
                raise ValueError("both tokenizers are here; expected a temperature too")
            if self.image.embed_dim != self.text.embed_dim:
                raise ValueError(
                    f"got embed_dim {self.image.embed_dim} for image and {self.text.embed_dim} for text; "
                    "expected one joint embedding"
                )
        elif self.temperature is not None:
            raise ValueError("got a temperature with fewer than two tokenizers; expected none")
        return self

    @property
    def modalities(self) -> list[Modality]:
        """Modalities that the folder contains."""
        return [name for name in MODALITIES if getattr(self, name) is not None]
