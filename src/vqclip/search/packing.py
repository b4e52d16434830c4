"""Ids in as few bits as they need.

Shapes: n items, N tokens, C codebooks, K codes a codebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqclip.errors import ShapeError

__all__ = ["Packing"]

_ITEMS = 4096
"""Items packed at a time; meanwhile each bit takes a byte."""


@dataclass(frozen=True)
class Packing:
    """Layout of the ids ``(N, C)`` of an item as bytes: token after token, codebook after codebook, without gaps.

    An id takes ceil(log2 K) bits, highest first; the last byte is padded with zeros. If tokens may be absent (-1), 0
    means absent, id k becomes k + 1, and an id takes the bits of K + 1 values.
    """

    num_tokens: int
    """N."""
    codebook_sizes: tuple[int, ...]
    """K of each of the C codebooks."""
    absent: bool
    """Whether ids may be -1."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of an id of each codebook."""
        return tuple((size - 1 + self.absent).bit_length() for size in self.codebook_sizes)

    @property
    def bits(self) -> int:
        """Bits of an item."""
        return self.num_tokens * sum(self.widths)

    @property
    def bytes(self) -> int:
        """Bytes of an item."""
        return -(-self.bits // 8)

    def pack(self, ids: Tensor) -> Tensor:
        """Pack ids ``(n, N, C)`` of any integer type into ``(n, bytes)`` uint8.

        Raises:
            ShapeError: for another shape, or an id that is out of range.
        """
        self._require(ids)
        parts = [self._pack(part.long().cpu().numpy()) for part in ids.split(_ITEMS)]
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, self.bytes, dtype=torch.uint8)

    def unpack(self, codes: Tensor) -> Tensor:
        """Unpack ``(n, bytes)`` uint8 into ids ``(n, N, C)`` int64.

        Raises:
            ShapeError: for another shape or dtype, or an id out of range.
        """
        if codes.ndim != 2 or codes.shape[1] != self.bytes or codes.dtype != torch.uint8:
            raise ShapeError(f"codes: got {tuple(codes.shape)} {codes.dtype}, expected (n, {self.bytes}) torch.uint8")
        parts = [self._unpack(part.numpy()) for part in codes.split(_ITEMS)]
        shape = (0, self.num_tokens, len(self.codebook_sizes))
        ids = torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(shape, dtype=torch.int64)
        self._require(ids)
        return ids

    def _pack(self, ids: np.ndarray) -> np.ndarray:
        numbers = ids.astype(np.uint64) + np.uint64(self.absent)  # -1 wraps around to 0
        bits = np.empty((*ids.shape[:2], sum(self.widths)), dtype=np.uint8)
        for column, shift, codebook in self._columns():
            bits[..., column] = (numbers[..., codebook] >> np.uint64(shift)) & np.uint64(1)
        return np.packbits(bits.reshape(len(ids), self.bits), axis=1)

    def _unpack(self, codes: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(codes, axis=1, count=self.bits)
        bits = bits.reshape(len(codes), self.num_tokens, sum(self.widths))
        numbers = np.zeros((*bits.shape[:2], len(self.codebook_sizes)), dtype=np.uint64)
        for column, shift, codebook in self._columns():
            numbers[..., codebook] |= bits[..., column].astype(np.uint64) << np.uint64(shift)
        return (numbers - np.uint64(self.absent)).astype(np.int64)

    def _columns(self) -> Sequence[tuple[int, int, int]]:
        """Return ``(column in the packed bits, position in the id, codebook)`` of each bit of a token."""
        places = [(c, shift) for c, width in enumerate(self.widths) for shift in reversed(range(width))]
        return [(column, shift, codebook) for column, (codebook, shift) in enumerate(places)]

    def _require(self, ids: Tensor) -> None:
        expected = (self.num_tokens, len(self.codebook_sizes))
        if ids.ndim != 3 or tuple(ids.shape[1:]) != expected or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ShapeError(
                f"ids: got {tuple(ids.shape)} {ids.dtype}, expected (n, {expected[0]}, {expected[1]}) integers"
            )
        least, largest = -int(self.absent), torch.tensor([size - 1 for size in self.codebook_sizes], device=ids.device)
        wide = ids.long()
        if bool(((wide < least) | (wide > largest)).any()):
            raise ShapeError(
                f"ids: got numbers from {int(wide.min())} to {int(wide.max())}, expected {least} to one less than the "
                f"codebook sizes {self.codebook_sizes}"
            )
