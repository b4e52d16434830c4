"""Captions → ids → vectors and embeddings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from vqclip.tokenizer.base import Tokenizer, TokenizerConfig
from vqclip.towers import TextTower, TextTowerConfig


class TextTokenizer(Tokenizer):
    """Captions → ids → vectors and embeddings. Built by `TextTokenizerConfig.build`.

    Attributes:
        config: what it was built from.
        preprocess: captions → token numbers ``(B, N)`` int64 of the byte-pair vocabulary, 0-padded; longer captions are
            cut. `preprocess.with_lengths` also gives their lengths before.
    """

    modality = "text"
    tower: TextTower

    def __init__(self, config: TextTokenizerConfig, embed_dim: int):
        tower = config.tower.build()
        super().__init__(config, tower, embed_dim, fewest_tokens=tower.num_tokens if tower.sees_padding else 1)
        self.preprocess = config.tower.vocabulary()

    def mask(self, inputs: Tensor) -> Tensor:
        """``(B, N)`` bool, True at real tokens."""
        return self.tower.mask(inputs)

    def needed_tokens(self, tokens: Tensor) -> int:
        """How many columns of ``(B, N)`` token numbers hold a caption's; the others change nothing but the time.

        In steps of 8, so that kernels and compiled graphs meet few shapes; N where the tower sees the padding. Looks at
        values: ask where they are, before they go to another device.
        """
        longest = int(self.mask(tokens).any(dim=0).sum())
        return max(self.fewest_tokens, min(self.num_tokens, 8 * max(1, math.ceil(longest / 8))))

    def encode(self, captions: Sequence[str] | Tensor) -> Tensor:
        """Captions (``list[str]``, or token numbers ``(B, N)``) → ids ``(B, N, C)`` int64, -1 at padding.

        Raises:
            ShapeError: for anything else; for token numbers outside the vocabulary and rows without an end mark, which
                `preprocess` never makes (the last two are not checked under `torch.compile`).
        """
        return self._encode(self.batch(captions))

    def batch(self, captions: Sequence[str] | Tensor) -> Tensor:
        """What `encode` takes → what `features` takes: token numbers, checked, on the tokenizer's device.

        Raises:
            ShapeError: as in `encode`.
        """
        if isinstance(captions, Tensor):
            tokens = captions
            if not torch.compiler.is_compiling():
                self.tower.require_captions(tokens)
        else:
            tokens, lengths = self.preprocess.with_lengths(captions)
            if max(lengths, default=0) > self.num_tokens:  # the same words each time, so that Python says it once
                warnings.warn(
                    f"captions longer than {self.num_tokens} tokens, the text tower's context_length, are cut; "
                    "tokenizer.preprocess.with_lengths(captions) gives their lengths",
                    stacklevel=3,
                )
        return tokens.to(self.device)


class TextTokenizerConfig(TokenizerConfig):
    """A text tokenizer."""

    tower: TextTowerConfig
    """What turns captions into per-token features."""

    @torch.inference_mode(False)  # so that one made in inference mode can be used outside of it
    def build(self, embed_dim: int) -> TextTokenizer:
        """Make the tokenizer with a joint embedding of ``embed_dim``."""
        return TextTokenizer(self, embed_dim)
