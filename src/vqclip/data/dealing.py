"""The samples of a global batch dealt to the nodes of a job, so that a node reads few chunks of the others.

With M nodes and L lanes of chunks (`vqclip.data.windows`), lane l belongs to node l mod M. If M does not divide L, some
lanes are left over; each node takes as many of them as it needs for its share of the batch, so that a few nodes read
such a lane, always the same. A node that owns more samples of a batch than its share gives some away.

A node with k times as many ranks as another one counts as k nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["NodeLayout", "share_sizes"]


def share_sizes(batch_size: int, world_size: int) -> tuple[int, ...]:
    """Return the number of samples of every rank in a global batch, whatever the nodes and the order are."""
    return tuple(batch_size // world_size + (rank < batch_size % world_size) for rank in range(world_size))


class NodeLayout:
    """Nodes of the ranks of a job.

    Args:
        nodes: node of every rank, in the order of the ranks; any integers.
    """

    def __init__(self, nodes: Sequence[int]):
        self.of_rank = np.unique(np.asarray(nodes), return_inverse=True)[1]
        """``(W,)`` int64, node of each rank, from 0."""
        self.ranks = np.bincount(self.of_rank)
        """``(M,)`` int64, ranks of each node."""
        self._units = np.repeat(np.arange(len(self.ranks)), self.ranks // math.gcd(*self.ranks.tolist()))

    def __len__(self) -> int:
        return len(self.ranks)

    def lanes_of(self, rank: int, lanes: int) -> np.ndarray:
        """Return which lanes the node of a rank owns or shares, ``(lanes,)`` bool; a few samples come from others."""
        node, units = self.of_rank[rank], len(self._units)
        found = self._owner(np.arange(lanes), lanes) == node
        first, end = np.searchsorted(self._units, [node, node + 1])
        left = lanes % units
        found[lanes - left + first * left // units : lanes - left - (-end * left // units)] = True
        return found

    def deal(self, source: np.ndarray, lane: np.ndarray, lanes: Sequence[int]) -> np.ndarray:
        """Return the node of each sample of a global batch, ``(G,)`` int64.

        The ranks of a node together get as many samples as with a stride: rank r gets G // W, and one more if
        r < G mod W. The number of samples that do not go to the owner of their lane is the smallest possible.

        Args:
            source: ``(G,)`` int64, source of each sample.
            lane: ``(G,)`` int64, lane of each sample among those of its source.
            lanes: number of lanes of each source.
        """
        size, world_size = len(source), len(self.of_rank)
        share = size // world_size * self.ranks + np.bincount(self.of_rank[: size % world_size], minlength=len(self))
        owner = np.empty(size, dtype=np.int64)
        for number, count in enumerate(lanes):
            mine = np.flatnonzero(source == number)
            owner[mine] = self._owner(lane[mine], count)
        return _fill(owner, source, lane, share)

    def places_of(self, rank: int, node: np.ndarray) -> np.ndarray:
        """Return the places of a rank's samples, ascending int64: every k-th of its node's, which has k ranks.

        Args:
            rank: r.
            node: ``(G,)`` int64, node of each sample.
        """
        mine = self.of_rank[rank]
        return np.flatnonzero(node == mine)[int((self.of_rank[:rank] == mine).sum()) :: self.ranks[mine]]

    def _owner(self, lane: np.ndarray, lanes: int) -> np.ndarray:
        """Return the node that owns each lane, -1 for those that are left over."""
        units = len(self._units)
        return np.where(lane < lanes - lanes % units, self._units[lane % units], -1)


def _fill(owner: np.ndarray, source: np.ndarray, lane: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Return the node of each sample: its owner, but for samples without one and those beyond the owner's share.

    The latter are those of the owner's last lanes, so that few chunks are read by two nodes.
    """
    owned = np.bincount(owner + 1, minlength=len(share) + 1)
    if np.array_equal(owned[1:], share):
        return owner
    order = np.lexsort((lane, source, owner))
    number = np.arange(len(owner)) - np.repeat(np.cumsum(owned) - owned, owned)
    excess = number >= np.concatenate([[0], share])[owner[order] + 1]
    free = order[excess]
    # Each source's samples, and the excess, are spread over all nodes in the order of their lanes, so that a node gets
    # samples of about the same lanes in every batch.
    group = np.where(owner[free] < 0, source[free], -1)
    free = free[np.lexsort((lane[free], group))]
    group = np.sort(group)
    counts = np.unique(group, return_counts=True)[1]
    spread = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    node = owner.copy()
    missing = np.maximum(share - owned[1:], 0)
    node[free[np.argsort(spread, kind="stable")]] = np.repeat(np.arange(len(share)), missing)
    return node
