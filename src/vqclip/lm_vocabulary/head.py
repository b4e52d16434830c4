"""Input embedding and output head of a language model that reads and writes all codes of a token in one step.

    ids (B, T, C) → CodesEmbedding → (B, T, H) → any causal model → hidden states (B, T, H) → CodesHead → codes

The model takes N steps an image instead of the N·C of `FlatCodes`. Plain modules, for hidden states of any model.

Shapes: B samples, T steps, C codebooks, K codes of one, H width of the model's hidden states, D width inside the head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.config.bounds import MAX_CODEBOOKS, MAX_LAYERS, MAX_WIDTH
from vqclip.errors import ConfigError, ShapeError
from vqclip.lm_vocabulary.embedding import require_rows
from vqclip.nn.inputs import require_codes
from vqclip.nn.precision import constant
from vqclip.seeds import derive_seed

IMPOSSIBLE = -1e4
"""Logit of a value that cannot be: exp gives 0, and float16 can hold it."""


class CodesEmbedding(nn.Module):
    """Sums the embeddings of a token's C codes, one table a codebook; an id of -1 adds nothing.

    The decoded vectors of a tokenizer are another input: ``nn.Linear(D, H)(tokenizer.decode(ids))``.

    Args:
        codebook_sizes: K of each codebook.
        width: H.

    Raises:
        ShapeError: more than 2^22 codes in all.
    """

    def __init__(self, codebook_sizes: tuple[int, ...], width: int):
        super().__init__()
        require_rows(sum(codebook_sizes))
        self.codebook_sizes, self.width = tuple(codebook_sizes), width
        self.table = nn.Embedding(sum(codebook_sizes), width)
        nn.init.normal_(self.table.weight, std=len(codebook_sizes) ** -0.5)  # 1 of the sum

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids ``(B, T, C)`` to ``(B, T, H)``.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook (not checked under `torch.compile`).
        """
        return self.each(ids).sum(dim=-2)

    def each(self, ids: Tensor) -> Tensor:
        """Map ids ``(B, T, C)`` to the embedding of each code ``(B, T, C, H)``."""
        ids = require_codes(ids, self.codebook_sizes, samples=True)
        starts = constant(list(accumulate(self.codebook_sizes[:-1], initial=0)), ids.device)
        return self.table(ids.clamp(min=0) + starts) * (ids >= 0).unsqueeze(-1)


class CodesHead(nn.Module, ABC):
    """Distribution of a token's C codes given a hidden state, from which codes are drawn in steps.

    Built by `CodesHeadConfig.build` or `MaskedBitsHeadConfig.build`. Ids of -1 (padding, dropped stages) are not
    predicted.

    Args:
        codebook_sizes: K of each codebook.
        width: H.
    """

    def __init__(self, codebook_sizes: tuple[int, ...], width: int):
        super().__init__()
        self.codebook_sizes, self.width = codebook_sizes, width

    @abstractmethod
    def nats(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return -log p of every code, ``(B, T, C)`` float32 in nats, 0 at ids of -1.

        p is the probability that `sample` draws it after the earlier ones, at temperature 1. The sum over a sample is
        its loss, to be compared with that of any other model of the same ids.

        Args:
            hidden: ``(B, T, H)``, the model's output where the token is to be predicted.
            ids: ``(B, T, C)``, the token's codes.

        Raises:
            ShapeError: shapes that do not fit, or an id outside its codebook.
        """

    @abstractmethod
    def _columns(self) -> list[slice]:
        """Return the columns of a token's values that each step draws."""

    @abstractmethod
    def _step_logits(self, hidden: Tensor, values: Tensor, step: int) -> Tensor:
        """Return the logits ``(B, n, L)`` of a step's n values from ``(B, H)`` and values ``(B, M)``, -1 if unknown."""

    @abstractmethod
    def _to_ids(self, values: Tensor) -> Tensor:
        """Return the ids ``(B, C)`` of values ``(B, M)``."""

    @torch.no_grad()
    def sample(
        self, hidden: Tensor, seed: int, token: int = 0, temperature: float = 1.0, guidance: float = 1.0
    ) -> Tensor:
        """Draw the codes ``(B, C)`` of one token, step by step.

        The draws are keyed by (seed, token, step): equal for equal keys, on every device.

        Args:
            hidden: ``(B, H)``; with ``guidance`` ``(2B, H)``: the hidden states of B samples, then those of the same
                samples without their condition.
            seed: seed of a generation.
            token: position of the token in its image.
            temperature: divides the logits; 0 takes the likeliest value.
            guidance: factor of the difference that the condition makes to the logits (classifier-free guidance, Ho and
                Salimans 2022); 1: none.

        Raises:
            ConfigError: a negative temperature.
            ShapeError: hidden states of another shape.
        """
        if not temperature >= 0:
            raise ConfigError(f"temperature: got {temperature}, expected 0 (the likeliest code) or more")
        guided = guidance != 1
        if hidden.ndim != 2 or hidden.shape[1] != self.width or len(hidden) % (1 + guided):
            expected = f"(2B, {self.width}), as there is guidance" if guided else f"(B, {self.width})"
            raise ShapeError(f"hidden: got shape {tuple(hidden.shape)}, expected {expected}")
        steps = self._columns()
        values = torch.full((len(hidden) // (1 + guided), steps[-1].stop), -1, device=hidden.device)
        for step, columns in enumerate(steps):
            logits = self._step_logits(hidden, torch.cat([values, values]) if guided else values, step)
            if guided:
                given, free = logits.chunk(2)
                logits = free + guidance * (given - free)
            logits = logits.masked_fill(logits < IMPOSSIBLE / 2, -torch.inf)  # at any temperature
            key = derive_seed(seed, "codes", token, step)
            values[:, columns] = _draw(logits.flatten(0, 1), temperature, key).view(logits.shape[:2])
        return self._to_ids(values)

    def generate(
        self,
        hidden_after: Callable[[Tensor], Tensor],
        samples: int,
        tokens: int,
        seed: int,
        temperature: float = 1.0,
        guidance: float = 1.0,
    ) -> Tensor:
        """Draw whole samples ``(B, N, C)``, one token after another.

        Args:
            hidden_after: maps the ids so far, ``(B, t, C)`` with t from 0, to the hidden state ``(B, H)`` that predicts
                token t; with ``guidance`` to ``(2B, H)``.
            samples: B.
            tokens: N.
            seed: see `sample`.
            temperature: see `sample`.
            guidance: see `sample`.
        """
        device = next(self.parameters()).device
        ids = torch.empty(samples, 0, len(self.codebook_sizes), dtype=torch.int64, device=device)
        for token in range(tokens):
            codes = self.sample(hidden_after(ids), seed, token, temperature, guidance)
            ids = torch.cat([ids, codes[:, None]], dim=1)
        return ids

    def _require(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Check hidden states and ids, and return the ids as int64."""
        ids = require_codes(ids, self.codebook_sizes, samples=True)
        if hidden.shape != (*ids.shape[:2], self.width):
            raise ShapeError(
                f"hidden: got shape {tuple(hidden.shape)}, expected {(*ids.shape[:2], self.width)}: "
                "one hidden state for each token of ids"
            )
        return ids


class SoftmaxHead(CodesHead):
    """A softmax over the K codes of each codebook. Built by `CodesHeadConfig.build`.

    ``parallel`` predicts every code from the hidden state alone, as if the codes of a token were independent.
    ``depth`` predicts code c from the hidden state and codes 0 to c - 1 by a small causal transformer over codebooks,
    so that it can represent any joint distribution (RQ-Transformer, Lee et al. 2022; Moshi, Défossez et al. 2024;
    UniTok, Ma et al. 2025).
    """

    def __init__(self, config: CodesHeadConfig):
        super().__init__(config.codebook_sizes, config.width)
        require_rows(sum(config.codebook_sizes))
        self.config = config
        self.depth = _DepthTransformer(config) if config.kind == "depth" else None
        width = config.width if self.depth is None else config.depth_width
        self.outputs = nn.ModuleList(nn.Linear(width, size) for size in config.codebook_sizes)

    def logits(self, hidden: Tensor, ids: Tensor) -> list[Tensor]:
        """Return the logits ``(B, T, K)`` of each of the C codebooks; those of codebook c see ids 0 to c - 1 alone.

        For arguments and errors see `nats`.
        """
        return [output(x) for output, x in zip(self.outputs, self._features(hidden, ids), strict=True)]

    def nats(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return -log p of every code; see `CodesHead.nats`."""
        each = [
            F.cross_entropy(
                logits.flatten(0, 1).float(), ids[..., c].flatten().long(), ignore_index=-1, reduction="none"
            )
            for c, logits in enumerate(self.logits(hidden, ids))
        ]
        return torch.stack(each, dim=-1).view(ids.shape)

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the loss (), the mean of `nats` over codes that are not -1; 0 without any."""
        return self.nats(hidden, ids).sum() / (ids >= 0).sum().clamp(min=1)

    def _columns(self) -> list[slice]:
        return [slice(c, c + 1) for c in range(len(self.codebook_sizes))]

    def _step_logits(self, hidden: Tensor, values: Tensor, step: int) -> Tensor:
        return self.outputs[step](self._features(hidden[:, None], values[:, None])[step])

    def _features(self, hidden: Tensor, ids: Tensor) -> Sequence[Tensor]:
        """Return the inputs of the C output layers."""
        ids = self._require(hidden, ids)
        return [hidden] * len(self.outputs) if self.depth is None else self.depth(hidden, ids).unbind(dim=2)

    def _to_ids(self, values: Tensor) -> Tensor:
        return values


class _DepthTransformer(nn.Module):
    """A causal transformer over the C codes of one token: hidden states and ids to features ``(B, T, C, D)``.

    Its input at codebook c is a projection of the hidden state (one for each codebook, as in Moshi) plus the embedding
    of code c - 1.
    """

    def __init__(self, config: CodesHeadConfig):
        super().__init__()
        codebooks, width = len(config.codebook_sizes), config.depth_width
        self.hidden_in = nn.Linear(config.width, codebooks * width)  # its bias tells the codebooks apart
        # The last code is never an input.
        self.codes = CodesEmbedding(config.codebook_sizes[:-1], width) if codebooks > 1 else None
        block = nn.TransformerEncoderLayer(
            width, config.depth_heads, 4 * width, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, config.depth_layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        x = self.hidden_in(hidden).unflatten(-1, (ids.shape[-1], -1))
        if self.codes is not None:
            x = x + F.pad(self.codes.each(ids[..., :-1]), (0, 0, 1, 0))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[-1], x.device, x.dtype)
        return self.blocks(x.flatten(0, 1), mask=mask, is_causal=True).view(*ids.shape, -1)


class CodesHeadConfig(Config):
    """A head of a language model that predicts the C codes of a token from one hidden state."""

    kind: Literal["parallel", "depth"] = "depth"
    """parallel: all codes at once, independent given the hidden state; depth: one after another."""
    codebook_sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=MAX_CODEBOOKS)]
    """K of each codebook: a tokenizer's `codebook_sizes`."""
    width: int = Field(ge=1, le=MAX_WIDTH)
    """H, width of the model's hidden states."""
    depth_width: int = Field(128, ge=1, le=MAX_WIDTH)
    """D, width of the transformer over codebooks (depth only)."""
    depth_layers: int = Field(2, ge=1, le=MAX_LAYERS)
    """Its blocks."""
    depth_heads: int = Field(4, ge=1)
    """Its attention heads; must divide `depth_width`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout in it."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> CodesHeadConfig:
        if self.depth_width % self.depth_heads:
            raise ValueError(
                f"got depth_width {self.depth_width} and depth_heads {self.depth_heads}; expected heads that divide it"
            )
        return self

    def build(self) -> SoftmaxHead:
        """Make the head with random weights (torch's global generator).

        Raises:
            ShapeError: more than 2^22 codes in all.
        """
        return SoftmaxHead(self)


def _draw(logits: Tensor, temperature: float, seed: int) -> Tensor:
    """Draw from ``(B, K)`` logits by one uniform number a row, through the cumulative distribution."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    total = (logits.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    uniform = torch.rand(len(logits), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    drawn = torch.searchsorted(total, uniform.to(total.device) * total[:, -1:], right=True)
    return drawn.squeeze(-1).clamp(max=logits.shape[-1] - 1)
