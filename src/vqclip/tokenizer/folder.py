"""What a tokenizer folder's ``config.json`` holds, and building from it.

The weights lie beside it: nothing here fetches others, and no file is opened that the folder names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import model_validator
from torch import nn

from vqclip.config import Config
from vqclip.config.bounds import EmbedDim, NumTokens, fewest_within_tokens
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.json_files import validate
from vqclip.nn.temperature import TemperatureConfig
from vqclip.tokenizer import (
    ImageTokenizer,
    ImageTokenizerConfig,
    TextTokenizer,
    TextTokenizerConfig,
    Tokenizer,
    tower_errors_in,
)
from vqclip.tokenizer.pretrained import CONFIG_FILE, load_weights, read_config, require_header

ModuleT = TypeVar("ModuleT", bound=nn.Module)
TokenizerConfigT = TypeVar("TokenizerConfigT", ImageTokenizerConfig, TextTokenizerConfig)


class _Stored(Config):
    embed_dim: EmbedDim
    """E, width of the joint embedding."""
    num_tokens: NumTokens | None = None
    """N, which the tower knows as well; null in folders of format 2."""
    fewest_tokens: NumTokens | None = None
    """How few of them a batch may come with; null in folders of format 2."""

    _fewest_within_tokens = model_validator(mode="after")(fewest_within_tokens)

    def _built_from(self, schema: type[TokenizerConfigT]) -> TokenizerConfigT:
        return schema.model_validate(self.model_dump(exclude=set(_Stored.model_fields))).architecture()

    def check(self, built: Tokenizer, section: str) -> None:
        """Compare the numbers of tokens with those of the tower.

        Raises:
            ConfigError: they differ.
        """
        for key, stored in (("num_tokens", self.num_tokens), ("fewest_tokens", self.fewest_tokens)):
            if stored not in (None, getattr(built, key)):
                raise ConfigError(f"{section}.{key}: got {stored}; this tower has {getattr(built, key)}")


class StoredImageTokenizer(_Stored, ImageTokenizerConfig):
    """An image tokenizer as it is stored."""

    def tokenizer(self) -> ImageTokenizerConfig:
        """What it is built from."""
        return self._built_from(ImageTokenizerConfig)

    def build_stored(self) -> ImageTokenizer:
        """Make the tokenizer; raises ConfigError where its tower gives another number of tokens than is stored."""
        built = self.tokenizer().build(self.embed_dim)
        self.check(built, "image")
        return built


class StoredTextTokenizer(_Stored, TextTokenizerConfig):
    """A text tokenizer as it is stored."""

    def tokenizer(self) -> TextTokenizerConfig:
        """What it is built from."""
        return self._built_from(TextTokenizerConfig)

    def build_stored(self) -> TextTokenizer:
        """Make the tokenizer; raises ConfigError where its tower gives another number of tokens than is stored."""
        built = self.tokenizer().build(self.embed_dim)
        self.check(built, "text")
        return built


class FolderConfig(Config):
    """``config.json`` without its format and versions: one tokenizer, or both and their temperature."""

    image: StoredImageTokenizer | None = None
    """The image tokenizer."""
    text: StoredTextTokenizer | None = None
    """The text tokenizer."""
    temperature: TemperatureConfig | None = None
    """The logits' scale and bias, where both tokenizers are."""

    @model_validator(mode="after")
    def _whole(self) -> FolderConfig:
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

    def parts(self) -> list[str]:
        """The keys that are here."""
        return [name for name in FolderConfig.model_fields if getattr(self, name) is not None]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights that show the sizes given here; see `ReadingConfig.shapes`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, part in (("image", self.image), ("text", self.text)):
            if part is not None:
                shapes |= part.shapes(f"{name}.", part.num_tokens, part.embed_dim)
        return shapes

    def held(self) -> str:
        """The modalities that are here, in words."""
        return ", ".join(name for name in ("image", "text") if getattr(self, name) is not None) or "no"


def read_folder(path: Path) -> FolderConfig:
    """Read ``config.json`` strictly, and compare the weights' header with it.

    Raises:
        CheckpointError: when it is missing, not ours, of another version, or not what it should be.
    """
    config = validate(path / CONFIG_FILE, FolderConfig, read_config(path))
    require_header(path, config.parts(), config.shapes())
    return config


@torch.inference_mode(False)  # so that what is loaded in inference mode can be used outside of it
def build_filled(path: Path, build: Callable[[], ModuleT], prefix: str = "") -> ModuleT:
    """Build a module, give it the folder's weights under ``prefix``, in their type, and put it into evaluation mode.

    Raises:
        CheckpointError: for a configuration that cannot be built, or weights that do not fit it.
    """
    try:
        with tower_errors_in(f"{prefix}tower"):
            module = build()
    except ConfigError as error:
        raise CheckpointError(f"{path / CONFIG_FILE}: {error}") from error
    load_weights(path, module, prefix, adopt_dtype=True)
    return module.eval()
