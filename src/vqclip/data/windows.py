"""Windows of chunks: a pass through a source that reads each part of it once, and shuffles well.

    samples   0 1 2 3 | 4 5 6 7 | 8 9 ...      chunks of consecutive samples, the same in every pass
    chunks    7 2 5 | 0 4 1 | 3 6              permuted; a number of them in a row are a window
    window    the samples of its chunks, permuted

Only the chunks of one window, or of two, have to be at hand. One window with all chunks is a random order of
all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from vqclip.data.draws import hash_integers
from vqclip.data.permutation import permute

__all__ = ["Windows", "apportion"]

_CHUNKS, _WITHIN = 1, 2


class Windows:
    """The windows of one pass through the samples of a source.

    All windows have the same number of chunks, up to one. The last chunk of the source may be shorter than the others,
    and is then in the last window.

    Args:
        size: samples of the source, at least 1.
        chunk: samples of a chunk.
        window: chunks of a window, up to rounding: the pass has round(chunks / window) windows, at least one.
        key: selects the order, from source and pass.
    """

    def __init__(self, size: int, chunk: int, window: int, key: int):
        self.size, self.chunk = size, min(chunk, size)
        self.chunks = -(-size // self.chunk)
        """Chunks of the pass."""
        self.windows = max(1, round(self.chunks / window))
        """Windows of the pass."""
        self._key = key
        self._whole = size // self.chunk

    def samples(self, places: np.ndarray) -> np.ndarray:
        """Return the sample at each place of the pass; int64 in 0 ... size - 1."""
        number = self.window_of(places)
        inner = np.empty_like(places)
        for window in np.unique(number).tolist():
            mine = np.flatnonzero(number == window)
            first = self.first_chunk(window) * self.chunk
            size = min(self.first_chunk(window + 1) * self.chunk, self.size) - first
            inner[mine] = first + permute(places[mine] - first, size, hash_integers(self._key, _WITHIN, window))
        rank, within = np.divmod(inner, self.chunk)
        return self._chunk_at(rank) * self.chunk + within

    def window_of(self, places: np.ndarray) -> np.ndarray:
        """Return the window of each place of the pass."""
        return ((places // self.chunk + 1) * self.windows - 1) // self.chunks

    def first_chunk(self, window: int) -> int:
        """Return how many chunks come before a window."""
        return window * self.chunks // self.windows

    def chunks_of(self, window: int) -> np.ndarray:
        """Return the chunks of a window, int64 in ascending order; chunk j begins with sample ``j * chunk``."""
        return np.sort(self._chunk_at(np.arange(self.first_chunk(window), self.first_chunk(window + 1))))

    def _chunk_at(self, rank: np.ndarray) -> np.ndarray:
        """Return the chunk at each rank of the permuted chunks."""
        whole = permute(np.minimum(rank, self._whole - 1), self._whole, hash_integers(self._key, _CHUNKS))
        return np.where(rank < self._whole, whole, rank)


def apportion(slots: Sequence[int], count: int) -> np.ndarray:
    """Divide the first ``count`` slots of an epoch among the sources, in proportion to their slots.

    Webster's method (Sainte-Laguë), in integers: a source's share never falls when ``count`` grows, differs little from
    the proportion, and is ``slots`` at the end of the epoch.

    Args:
        slots: slots of each source in an epoch, each at least 1.
        count: at most their sum.

    Returns:
        int64, the slots of each source; their sum is ``count``.
    """
    total = sum(slots)
    shares = [(2 * count * each + total) // (2 * total) for each in slots]
    everyone = range(len(slots))
    while sum(shares) < count:
        shares[min(everyone, key=lambda n: (Fraction(2 * shares[n] + 1, slots[n]), n))] += 1
    while sum(shares) > count:
        shares[max(everyone, key=lambda n: (Fraction(2 * shares[n] - 1, slots[n]), n))] -= 1
    return np.array(shares, dtype=np.int64)
