"""One sequence of ids a sample, every codebook in a range of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from vqclip.errors import ConfigError, ShapeError
from vqclip.lm_vocabulary.checks import require_all, require_codebooks, require_codes, require_integers, require_room


@dataclass(frozen=True)
class FlatCodes:
    """Ids ``(B, N, C)`` as ``(B, N·C)``: token after token, the C codebooks of a token one after another.

    Code k of codebook c is id ``offset + K_0 + ... + K_(c-1) + k``, so that the position in the sequence and the
    id always belong to the same codebook.

    Args:
        codebook_sizes: K of each codebook.
        offset: id of the first code.
        pad: id in place of -1; any id outside of the codes' range, -1 itself by default.

    Raises:
        ConfigError: no codebook, a range that does not fit int64, or a ``pad`` inside it.
    """

    codebook_sizes: Sequence[int]
    offset: int = 0
    pad: int = -1

    def __post_init__(self) -> None:
        require_codebooks(self.codebook_sizes)
        require_room(self.codebook_sizes, self.offset)
        if self.offset <= self.pad < self.stop:
            raise ConfigError(
                f"pad: got {self.pad}, which is a code; expected none of {self.offset} to {self.stop - 1}"
            )

    @property
    def size(self) -> int:
        """Number of ids of the codes."""
        return sum(self.codebook_sizes)

    @property
    def stop(self) -> int:
        """First id after the codes."""
        return self.offset + self.size

    @property
    def starts(self) -> tuple[int, ...]:
        """Id of the first code of each codebook."""
        return tuple(accumulate(self.codebook_sizes[:-1], initial=self.offset))

    def to_vocabulary(self, ids: Tensor) -> Tensor:
        """Turn ids ``(B, N, C)`` of a tokenizer into ``(B, N·C)`` int64.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        codes = require_codes(ids, self.codebook_sizes)
        starts = torch.tensor(self.starts, device=ids.device)
        return torch.where(codes < 0, self.pad, codes + starts).flatten(1)

    def from_vocabulary(self, flat: Tensor) -> Tensor:
        """Invert `to_vocabulary`: ``(B, N·C)`` integers → ``(B, N, C)`` int64.

        Raises:
            ShapeError: for another shape or dtype, or an id outside the range of the codebook at its position.
        """
        codebooks = len(self.codebook_sizes)
        flat = require_integers("vocabulary ids", flat, 2, f"(B, N·{codebooks})")
        if flat.shape[1] % codebooks:
            raise ShapeError(
                f"vocabulary ids: got shape {tuple(flat.shape)}, expected a multiple of {codebooks} ids a sample: one "
                "for each codebook of a token"
            )
        ids = flat.unflatten(1, (flat.shape[1] // codebooks, codebooks))
        starts = torch.tensor(self.starts, device=flat.device)
        last = torch.tensor([s + size - 1 for s, size in zip(self.starts, self.codebook_sizes, strict=True)]).to(starts)
        absent = ids == self.pad
        spans = zip(starts.tolist(), last.tolist(), strict=True)
        expected = [f"{first} to {final}, or {self.pad} for none" for first, final in spans]
        require_all(absent | ((ids >= starts) & (ids <= last)), ids, "vocabulary ids", expected)
        return torch.where(absent, -1, ids - starts)
