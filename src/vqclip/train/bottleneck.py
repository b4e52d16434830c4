"""Schedule of the bottleneck: the embedding begins with continuous vectors and ends with codes.

    share(step) = 0                                  the first open_steps steps: the quantizer is bypassed
                  rises linearly                     the next close_steps steps
                  1                                  afterwards: the codes alone, bit for bit as without the setting

The embedding sees ``continuous + share · (quantized - continuous)``. The share is a function of the step alone, so a
checkpoint contains nothing of it. The quantizers run in every step: their losses and their updates are those of a run
without the setting, so that codebooks follow the features before the embedding depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
from pydantic import Field, model_validator

from vqclip.config import Config, Modality
from vqclip.model import CLIP
from vqclip.tokenizer import Tokenizer


class BottleneckConfig(Config):
    """Steps in which the embedding sees continuous vectors before it sees codes; evaluations always use the codes."""

    open_steps: Annotated[int, Field(ge=0)]
    """Steps at the beginning in which the embedding sees continuous vectors."""
    close_steps: Annotated[int, Field(ge=0)]
    """Steps after them in which it sees a mix of continuous and quantized vectors, with a linearly rising share of the
    latter; 0: the codes at once."""
    modalities: Annotated[tuple[Modality, ...], Field(min_length=1)] = ("image", "text")
    """Tokenizers that begin with continuous vectors."""

    @model_validator(mode="after")
    def _names_each_modality_once(self) -> BottleneckConfig:
        if len(set(self.modalities)) != len(self.modalities):
            raise ValueError(f"got modalities {', '.join(self.modalities)}; expected each one once")
        return self

    @property
    def steps(self) -> int:
        """Number of steps before the first one that sees codes alone."""
        return self.open_steps + self.close_steps

    def share(self, step: int) -> float:
        """Return the share of the quantized vectors in step number ``step`` (from 0), from 0 to 1."""
        return min(1.0, max(0.0, (step + 1 - self.open_steps) / (self.close_steps + 1)))

    @contextmanager
    def at(self, step: int, model: CLIP) -> Iterator[None]:
        """Mix the vectors of ``model`` in training mode as in step number ``step`` (from 0) within the block."""
        share = self.share(step)
        if share == 1:  # the modules of a run without the setting, and the same bits
            yield
            return
        tokenizers: list[Tokenizer] = [getattr(model, name) for name in self.modalities]
        try:
            for tokenizer in tokenizers:  # a tensor, so that a compiled model is compiled once for all shares
                tokenizer.code_share = torch.full((), share, device=tokenizer.device)
            yield
        finally:
            for tokenizer in tokenizers:
                tokenizer.code_share = None
