"""C streams side by side, each one step later than the previous one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vqclip.errors import ConfigError, ShapeError
from vqclip.lm_vocabulary.checks import INT64_IDS, require_all, require_codebooks, require_codes, require_integers


@dataclass(frozen=True)
class DelayedCodes:
    """Ids ``(B, N, C)`` as C streams of N + C - 1 steps (the delay pattern: MusicGen, Copet et al. 2023).

    At step t stream c contains the code of token t - c, so that a model that predicts all streams of a step at once
    still sees codebooks 0 to c - 1 of a token when it predicts codebook c:

        step       0    1    2    3
        stream 0   a0   b0   c0   pad
        stream 1   pad  a1   b1   c1

    A sample takes N + C - 1 steps instead of N·C. The ids of each stream are those of its codebook; `pad` fills the
    steps before and after a stream, and replaces -1.

    Args:
        codebook_sizes: K of each codebook.

    Raises:
        ConfigError: no codebook, or one that leaves int64 no id for `pad`.
    """

    codebook_sizes: Sequence[int]

    def __post_init__(self) -> None:
        require_codebooks(self.codebook_sizes)
        if max(self.codebook_sizes) >= INT64_IDS:
            raise ConfigError(
                f"vocabulary: a codebook of {max(self.codebook_sizes)} codes leaves no int64 id for padding; expected "
                f"fewer than {INT64_IDS}: train a Product of smaller codebooks"
            )

    @property
    def pad(self) -> int:
        """Padding id: one more than the largest id of any codebook; the same in all streams."""
        return max(self.codebook_sizes)

    @property
    def size(self) -> int:
        """Ids of a stream, including `pad`: rows that each stream's embedding table needs."""
        return self.pad + 1

    def to_vocabulary(self, ids: Tensor) -> Tensor:
        """Turn ids ``(B, N, C)`` of a tokenizer into ``(B, N + C - 1, C)`` int64.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        codes = require_codes(ids, self.codebook_sizes)
        samples, tokens, codebooks = codes.shape
        streams = codes.new_full((samples, tokens + codebooks - 1, codebooks), self.pad)
        for c in range(codebooks):
            streams[:, c : c + tokens, c] = torch.where(codes[..., c] < 0, self.pad, codes[..., c])
        return streams

    def from_vocabulary(self, streams: Tensor) -> Tensor:
        """Invert `to_vocabulary`: ``(B, N + C - 1, C)`` integers → ``(B, N, C)`` int64.

        Raises:
            ShapeError: for another shape or dtype, an id outside its codebook, or one where a stream must be padded.
        """
        codebooks = len(self.codebook_sizes)
        streams = require_integers("vocabulary ids", streams, 3, f"(B, N + {codebooks - 1}, {codebooks})")
        tokens = streams.shape[1] - codebooks + 1
        if streams.shape[2] != codebooks or tokens < 0:
            raise ShapeError(
                f"vocabulary ids: got shape {tuple(streams.shape)}, expected (B, N + {codebooks - 1}, {codebooks})"
            )
        sizes = torch.tensor(self.codebook_sizes, device=streams.device)
        steps = torch.arange(streams.shape[1], device=streams.device)[:, None]
        delay = torch.arange(codebooks, device=streams.device)
        inside = (steps >= delay) & (steps < delay + tokens)
        absent = streams == self.pad
        expected = [f"0 to {size - 1}, or {self.pad} for none and beside its tokens" for size in self.codebook_sizes]
        require_all(absent | (inside & (streams >= 0) & (streams < sizes)), streams, "vocabulary ids", expected)
        codes = torch.stack([streams[:, c : c + tokens, c] for c in range(codebooks)], dim=-1)
        return torch.where(codes == self.pad, -1, codes)
