"""The matrix products of the tiled losses.

They are most of the losses' time. On a CPU, PyTorch hands fp32 products to MKL, which on AMD's processors leaves the
512-bit half of the arithmetic units idle; oneDNN, which PyTorch brings too, takes half the time there. It is called by
the operator that `torch.compile` writes into its own CPU code. It keeps a program for every shape, which the batches of
a training have few of (ONEDNN_PRIMITIVE_CACHE_CAPACITY and PyTorch's LRU_CACHE_CAPACITY say how many).
"""

from __future__ import annotations

import torch
from torch import Tensor

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""False where PyTorch was built without it; `torch.backends.mkldnn.enabled` turns it off."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """``(M, K) @ (K, N)`` → ``(M, N)``."""
    return torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "") if _by_onednn(left) else left @ right


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``(M, K) @ (K, N)`` to ``total``, ``(M, N)``."""
    if _by_onednn(left):
        total.add_(product(left, right))
    else:
        total.addmm_(left, right)


def _by_onednn(x: Tensor) -> bool:
    return HAS_ONEDNN and bool(torch.backends.mkldnn.enabled) and x.device.type == "cpu" and x.dtype == torch.float32
