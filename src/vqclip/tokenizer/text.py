"""The text tokenizer: captions → ids → vectors and embeddings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from vqclip.nn.precision import Precision
from vqclip.tokenizer.base import Tokenizer, TokenizerConfig
from vqclip.towers import TextTower, TextTowerConfig


class TextTokenizer(Tokenizer):
    """Captions → ids → vectors and embeddings. Built by `TextTokenizerConfig.build`.

    Attributes:
        config: its configuration.
        preprocess: captions → token numbers ``(B, N)`` int64 of the tower's `Vocabulary`, padded; longer captions are
            cut. `preprocess.with_lengths` also returns their lengths before the cut.
    """

    modality = "text"
    tower: TextTower

    def __init__(self, config: TextTokenizerConfig, embed_dim: int):
        config = config.resolve()
        tower = config.tower.build()
        super().__init__(config, tower, embed_dim, fewest_tokens=tower.num_tokens if tower.sees_padding else 1)
        self.preprocess = tower.vocabulary

    def files(self) -> dict[str, bytes]:
        """Return the vocabulary's files by their names, for the tokenizer folder."""
        return dict(self.preprocess.files())

    def mask(self, inputs: Tensor) -> Tensor:
        """Return ``(B, N)`` bool, True at real tokens."""
        return self.tower.mask(inputs)

    def needed_tokens(self, tokens: Tensor) -> int:
        """Return how many columns of ``(B, N)`` token numbers contain tokens of a caption; the others only cost time.

        A multiple of 8, so that kernels and compiled graphs see few shapes; N if the tower sees the padding. Reads the
        values: call it before they are moved to another device.
        """
        if self.tower.sees_padding:
            return self.tower.num_tokens
        longest = int(self.mask(tokens).any(dim=0).sum())
        return min(self.tower.num_tokens, 8 * max(1, math.ceil(longest / 8)))

    def encode(self, captions: Sequence[str] | Tensor, precision: Precision = "fp32") -> Tensor:
        """Encode captions (``list[str]``, or token numbers ``(B, N)``) to ids ``(B, N, C)`` int64, -1 at padding.

        ``precision`` is that of the tower; see `embed`.

        Raises:
            ShapeError: for anything else; for token numbers outside the vocabulary and rows without an end mark, which
                `preprocess` never makes (the last two are not checked under `torch.compile`).
        """
        return self._encode(self.batch(captions), precision)

    def batch(self, captions: Sequence[str] | Tensor) -> Tensor:
        """Turn the input of `encode` into that of `features`: token numbers, checked, on the tokenizer's device.

        Raises:
            ShapeError: see `encode`.
        """
        if isinstance(captions, Tensor):
            tokens = captions
            if not torch.compiler.is_compiling():
                self.tower.require_captions(tokens)
        else:
            tokens, lengths = self.preprocess.with_lengths(captions)
            if max(lengths, default=0) > self.tower.num_tokens:  # always the same text, so that Python warns once
                warnings.warn(
                    f"captions longer than {self.tower.num_tokens} tokens, the text tower's context_length, are cut; "
                    "tokenizer.preprocess.with_lengths(captions) returns their lengths",
                    stacklevel=3,
                )
        return tokens.to(self.device)


class TextTokenizerConfig(TokenizerConfig):
    """A text tokenizer."""

    tower: TextTowerConfig
    """From captions to features of each token."""

    @torch.inference_mode(False)  # so that it can be used outside of inference mode
    def build(self, embed_dim: int) -> TextTokenizer:
        """Make the tokenizer with a joint embedding of ``embed_dim``."""
        return TextTokenizer(self, embed_dim)
