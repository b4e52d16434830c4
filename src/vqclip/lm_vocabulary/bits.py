"""Output head that predicts the bits of a token's codes, hidden ones from known ones, in a few steps.

    hidden state (B, T, H) + known bits → MLP over all bits of the token → logits of all bits

A masked-bit head (BAR, Yu et al. 2026, https://arxiv.org/abs/2602.09024) has an output for each bit instead of one for
each code, so it grows with log2 K and takes codebooks of any size. In training a random number of a token's bits is
hidden. A token is drawn in a few steps, each of which draws a group of bits at once, independent given earlier groups.

A digit is one of several values: a bit, or a level of FSQ. Digits are in order of drawing: the least significant ones
of all codebooks, then the next ones, so that those of one code are in different groups.

Shapes: B samples, T steps of the model, C codebooks, K codes of one, H width of the model's hidden states, D width
inside the head, M digits of a token over all its codebooks, L most values of a digit.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.config.bounds import MAX_CODEBOOKS, MAX_LAYERS, MAX_WIDTH
from vqclip.lm_vocabulary.embedding import require_rows
from vqclip.lm_vocabulary.head import IMPOSSIBLE, CodesHead
from vqclip.nn.dropout import hash32
from vqclip.nn.precision import constant


class MaskedBitsHead(CodesHead):
    """Distribution of a token's codes as that of their digits. Built by `MaskedBitsHeadConfig.build`.

    With as many steps as digits it can represent any joint distribution of the codes; with fewer, the digits of a step
    are independent given those before. `nats` is exact for this order and number of steps.

    Attributes:
        steps: S; may be changed after training.
    """

    def __init__(self, config: MaskedBitsHeadConfig):
        super().__init__(config.codebook_sizes, config.width)
        self.config = config
        bases = [config.levels or (2,) * (size.bit_length() - 1) for size in config.codebook_sizes]
        self._rows = [
            (codebook, math.prod(levels[:number]), base)
            for number in range(max(map(len, bases)))
            for codebook, levels in enumerate(bases)
            for base in levels[number : number + 1]
        ]
        """Codebook, stride and base of each digit."""
        self.digits, self.values = len(self._rows), max(map(max, bases))
        require_rows(self.digits * self.values)
        self.steps = min(config.steps, self.digits)
        width = config.inner_width
        self.hidden_in = nn.Linear(config.width, width)
        self.digits_in = nn.Linear(self.digits * self.values, width, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(config.dropout),
                nn.Linear(4 * width, width),
            )
            for _ in range(config.layers)
        )
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, self.digits * self.values))

    def forward(self, hidden: Tensor, ids: Tensor, seed: int) -> Tensor:
        """Return the training loss () in nats a code that is not -1; 0 without any.

        Of each token's digits a random number, from 1 to all, is hidden and predicted from the others. A token's loss
        is the mean of its hidden digits times all of its digits: in the mean over random ``masks`` -log p of digits
        that are drawn one by one in a random order. With ``masks: first`` later digits weigh more.

        Args:
            hidden: as of `nats`.
            ids: as of `nats`.
            seed: key of the draws beside a token's row and column, so that padding changes none; another one for each
                step and rank: ``derive_seed(seed, step, rank)``.

        Raises:
            ShapeError: see `nats`.
        """
        ids = self._require(hidden, ids)
        digits = self._to_digits(ids)
        present = digits >= 0
        count = present.sum(dim=-1, keepdim=True)
        row, column, digit = (torch.arange(size, device=ids.device) for size in digits.shape)
        drawn = hash32(hash32(row ^ seed % 2**32)[:, None] ^ column)[..., None]
        known = (drawn.double() / 2**32 * count).long()
        if self.config.masks == "random":
            order = hash32(drawn ^ hash32(digit + 1)).masked_fill(~present, 2**32)
            is_known = order.argsort(dim=-1).argsort(dim=-1) < known
        else:
            is_known = present.cumsum(dim=-1) <= known
        logits = self._logits(self.hidden_in(hidden), digits.where(is_known, -1))
        nats = _cross_entropy(logits, digits.masked_fill(is_known, -1)).sum(dim=-1, keepdim=True)
        return (nats * count / (count - known).clamp(min=1)).sum() / (ids >= 0).sum().clamp(min=1)

    def nats(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return -log p of every code, drawn in `steps` steps; see `CodesHead.nats`."""
        ids = self._require(hidden, ids)
        digits, condition = self._to_digits(ids), self.hidden_in(hidden)
        known, nats = torch.full_like(digits, -1), []
        for columns in self._columns():
            nats.append(_cross_entropy(self._logits(condition, known)[..., columns, :], digits[..., columns]))
            known[..., columns] = digits[..., columns]
        codebook, _, _ = self._places(ids.device)
        return torch.zeros(ids.shape, device=ids.device).index_add(-1, codebook, torch.cat(nats, dim=-1))

    def _places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return codebook, stride and base of each digit, each ``(M,)`` int64."""
        return constant(self._rows, device).unbind(dim=1)

    def _logits(self, condition: Tensor, digits: Tensor) -> Tensor:
        """Return the logits ``(..., M, L)`` of all digits, from those that are known: ``(..., M)``, -1 for others."""
        seen = F.one_hot(digits.clamp(min=0), self.values) * (digits >= 0).unsqueeze(-1)
        x = condition + self.digits_in(seen.flatten(-2).to(condition.dtype))
        for block in self.blocks:
            x = x + block(x)
        _, _, base = self._places(digits.device)
        possible = torch.arange(self.values, device=digits.device) < base[:, None]
        return self.out(x).unflatten(-1, (self.digits, self.values)).masked_fill(~possible, IMPOSSIBLE)

    def _to_digits(self, ids: Tensor) -> Tensor:
        """Return the digits ``(..., M)`` of ids ``(..., C)``; -1 for -1."""
        codebook, stride, base = self._places(ids.device)
        each = ids[..., codebook]
        return (each // stride % base).masked_fill(each < 0, -1)

    def _to_ids(self, values: Tensor) -> Tensor:
        ids = values.new_zeros(*values.shape[:-1], len(self.codebook_sizes))
        codebook, stride, _ = self._places(ids.device)
        return ids.index_add(-1, codebook, values * stride)

    def _columns(self) -> list[slice]:
        ends = [self.digits * step // self.steps for step in range(self.steps + 1)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def _step_logits(self, hidden: Tensor, values: Tensor, step: int) -> Tensor:
        return self._logits(self.hidden_in(hidden), values)[:, self._columns()[step]]


def _cross_entropy(logits: Tensor, digits: Tensor) -> Tensor:
    """Return -log p ``(..., n)`` float32 of digits ``(..., n)``, 0 at -1, from logits ``(..., n, L)``."""
    nats = F.cross_entropy(logits.flatten(0, -2).float(), digits.flatten(), ignore_index=-1, reduction="none")
    return nats.view(digits.shape)


class MaskedBitsHeadConfig(Config):
    """A head of a language model that predicts the bits, or levels, of a token's C codes from one hidden state."""

    codebook_sizes: Annotated[
        tuple[Annotated[int, Field(ge=2, le=2**63)], ...], Field(min_length=1, max_length=MAX_CODEBOOKS)
    ]
    """K of each codebook: a tokenizer's `codebook_sizes`."""
    width: int = Field(ge=1, le=MAX_WIDTH)
    """H, width of the model's hidden states."""
    levels: Annotated[tuple[Annotated[int, Field(ge=2, le=1000)], ...], Field(min_length=1)] | None = None
    """Values of each digit of an id, the least significant first: FSQ's `levels`. null: bits, as of LFQ and BSQ."""
    steps: int = Field(16, ge=1)
    """Steps in which a token is drawn; at most one a digit."""
    masks: Literal["first", "random"] = "first"
    """Digits that are known in training: the first ones in the order of drawing, or random ones, as published."""
    inner_width: int = Field(128, ge=1, le=MAX_WIDTH)
    """D, width inside the head."""
    layers: int = Field(2, ge=0, le=MAX_LAYERS)
    """Blocks of the head."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout in them."""

    @model_validator(mode="after")
    def _digits_count_codes(self) -> MaskedBitsHeadConfig:
        for size in self.codebook_sizes:
            if self.levels is None and size & (size - 1):
                raise ValueError(f"got levels null, which is bits, for a codebook of {size} codes; expected levels")
            if self.levels is not None and math.prod(self.levels) != size:
                raise ValueError(
                    f"got levels {list(self.levels)}, of {math.prod(self.levels)} codes, for a codebook of {size}; "
                    "expected the levels of its quantizer"
                )
        return self

    def build(self) -> MaskedBitsHead:
        """Make the head with random weights (torch's global generator)."""
        return MaskedBitsHead(self)
