"""The matrix products of the tiled losses, which take most of their time.

On a CPU, PyTorch computes fp32 products with MKL, which does not use the 512-bit units of AMD's processors. oneDNN,
which is part of PyTorch, takes half the time there. It is called through the operator that `torch.compile` uses in its
own CPU code; there is no public one. oneDNN caches one program per shape, and training has few shapes
(ONEDNN_PRIMITIVE_CACHE_CAPACITY and PyTorch's LRU_CACHE_CAPACITY set the size of the cache).
"""

from __future__ import annotations

import torch
from torch import Tensor

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""False if PyTorch was built without oneDNN; `torch.backends.mkldnn.enabled` turns it off."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``(M, K) @ (K, N)``."""
    return torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "") if _by_onednn(left) else left @ right


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``(M, K) @ (K, N)`` to ``total``, ``(M, N)``."""
    if _by_onednn(left):
        total.add_(product(left, right))
    else:
        total.addmm_(left, right)


def _by_onednn(x: Tensor) -> bool:
    return HAS_ONEDNN and bool(torch.backends.mkldnn.enabled) and x.device.type == "cpu" and x.dtype == torch.float32
