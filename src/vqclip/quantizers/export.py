"""A codebook as a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from vqclip.errors import ShapeError
from vqclip.quantizers.base import Quantizer
from vqclip.quantizers.usage import MAX_COUNTED_CODES


@torch.no_grad()
def codebook_matrix(quantizer: Quantizer, codebook: int, limit: int = MAX_COUNTED_CODES) -> Tensor:
    """What each code of one codebook adds to a quantized vector.

    Args:
        quantizer: of any family.
        codebook: which one, 0 to C - 1.
        limit: most codes that are made into a matrix.

    Returns:
        ``(K, D)`` of the codes' type, float32 as a rule. Channels that belong to other codebooks (of a `Product`) are
        0, and codes of a stage (of a `Residual`) have the size that they are added with, so that
        ``quantizer.decode(ids)`` is the sum of ``codebook_matrix(quantizer, c)[ids[..., c]]`` over c.

    Raises:
        ShapeError: there is no such codebook, or it has more codes than ``limit``, as those that nobody stores can.
    """
    name, sizes = type(quantizer).__name__, quantizer.codebook_sizes
    if not 0 <= codebook < len(sizes):
        has = f"0 to {len(sizes) - 1}" if sizes else "none: it has no codebook"
        raise ShapeError(f"{name}: got codebook {codebook}, expected {has}")
    if sizes[codebook] > limit:
        raise ShapeError(
            f"{name}: codebook {codebook} has {sizes[codebook]} codes, as a matrix {sizes[codebook]} × {quantizer.dim} "
            f"numbers; expected at most {limit} codes: decode the ids that are needed, or train a Product of smaller "
            "codebooks"
        )
    device = next((tensor.device for tensor in (*quantizer.parameters(), *quantizer.buffers())), torch.device("cpu"))
    ids = torch.full((sizes[codebook], len(sizes)), -1, device=device)
    ids[:, codebook] = torch.arange(sizes[codebook], device=device)
    return quantizer.decode(ids)
