"""K-means finds clusters."""

from __future__ import annotations

import torch

from tests.quantizers.test_vq import clusters
from vqclip.quantizers.new_codes import kmeans


def test_kmeans_finds_clusters() -> None:
    x, corners = clusters(2000)
    centres, members, placed = kmeans(x[None], 32)
    assert placed.all()
    assert members.sum() == 2000
    assert torch.cdist(corners, centres[0]).min(dim=1).values.max() < 0.5
    few, _, placed = kmeans(x[None, :3], 8)
    assert few.shape == (1, 8, 3)
    assert placed[0].tolist() == [True] * 3 + [False] * 5
