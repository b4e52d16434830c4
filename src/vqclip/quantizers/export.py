"""Codebooks as matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from vqclip.errors import ShapeError
from vqclip.quantizers.base import Quantizer
from vqclip.quantizers.usage import MAX_COUNTED_CODES


@torch.no_grad()
def codebook_matrix(quantizer: Quantizer, codebook: int, limit: int = MAX_COUNTED_CODES) -> Tensor:
    """Return the contribution of each code of one codebook to a quantized vector.

    Args:
        quantizer: any quantizer.
        codebook: index of the codebook, 0 to C - 1.
        limit: largest number of codes.

    Returns:
        ``(K, D)`` in the dtype of the codes, usually float32. Channels of other codebooks (of a `Product`) are 0, and
        codes of a stage (of a `Residual`) are scaled, so that ``quantizer.decode(ids)`` is the sum over c of
        ``codebook_matrix(quantizer, c)[ids[..., c]]``.

    Raises:
        ShapeError: no such codebook, or it has more codes than ``limit``, which implicit codebooks can.
    """
    name, sizes = type(quantizer).__name__, quantizer.codebook_sizes
    if not 0 <= codebook < len(sizes):
        has = f"0 to {len(sizes) - 1}" if sizes else "none: it has no codebook"
        raise ShapeError(f"{name}: got codebook {codebook}, expected {has}")
    if sizes[codebook] > limit:
        raise ShapeError(
            f"{name}: codebook {codebook} has {sizes[codebook]} codes, as a matrix {sizes[codebook]} × {quantizer.dim} "
            f"numbers; expected at most {limit} codes: decode only the ids you need, or train a Product of smaller "
            "codebooks"
        )
    device = next((tensor.device for tensor in (*quantizer.parameters(), *quantizer.buffers())), torch.device("cpu"))
    ids = torch.full((sizes[codebook], len(sizes)), -1, device=device)
    ids[:, codebook] = torch.arange(sizes[codebook], device=device)
    return quantizer.decode(ids)
