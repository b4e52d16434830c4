"""Files of ids, and statistics of the codes that an evaluation set uses.

Shapes: B samples, N tokens, C codebooks, K codes a codebook.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vqclip.errors import CheckpointError, ShapeError
from vqclip.io.tensors import open_tensors, save_tensors

_NAME, _SIZES = "ids", "codebook_sizes"


def id_dtype(codebook_sizes: Sequence[int]) -> torch.dtype:
    """Return the smallest signed integer type that holds every id and -1."""
    largest = max(codebook_sizes, default=1) - 1
    for dtype in (torch.int8, torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


def save_ids(path: Path, ids: Tensor, codebook_sizes: Sequence[int]) -> None:
    """Write ids ``(B, N, C)``, -1 for absent tokens, in the smallest integer type that holds them (safetensors)."""
    if ids.ndim != 3 or ids.shape[2] != len(codebook_sizes):
        raise ShapeError(f"ids: got shape {tuple(ids.shape)}, expected (B, N, {len(codebook_sizes)})")
    small = ids.to("cpu", id_dtype(codebook_sizes)).contiguous()
    save_tensors({_NAME: small}, path, metadata={_SIZES: json.dumps(list(codebook_sizes))})


def load_ids(path: Path, codebook_sizes: Sequence[int]) -> Tensor:
    """Read what `save_ids` wrote: ``(B, N, C)`` in the stored integer type.

    Raises:
        CheckpointError: the file is missing or damaged, or was written for other codebooks.
    """
    try:
        with open_tensors(path) as file:
            stored = json.loads((file.metadata() or {}).get(_SIZES, "null"))
            ids = file.get_tensor(_NAME)
    except (CheckpointError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: ids cannot be read: {error}") from error
    if stored != list(codebook_sizes):
        raise CheckpointError(f"{path}: got ids of codebooks of sizes {stored}, expected {list(codebook_sizes)}")
    return ids


@dataclass(frozen=True)
class CodeUsage:
    """Use of one tokenizer's codebooks over a stated number of tokens. JSON-able by `dataclasses.asdict`."""

    samples: int
    """Samples counted."""
    tokens: int
    """Tokens counted, without padding; every other figure is for this number of tokens."""
    codebook_sizes: list[int]
    """K of each codebook."""
    codes_used: list[int]
    """Codes seen at least once, of each codebook."""
    usage: list[float]
    """Share of the codes seen at least once, of each codebook."""
    perplexity: list[float]
    """Exponential of the entropy of the code histogram, of each codebook."""
    bits_per_token: float
    """Capacity of a token: Σ log2 K."""
    bits_used_per_token: float
    """Sum of the entropies of the code histograms, in bits; an upper bound on the information in a token."""
    tokens_per_sample: float
    """Mean number of tokens of a sample."""
    bits_per_sample: float
    """`tokens_per_sample` × `bits_per_token`: the size of a stored sample."""


def count_codes(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Count ids ``(B, N, C)`` exactly: for each codebook the distinct ids (sorted, int64) and their counts.

    Memory does not depend on the size of the codebooks. Negative ids are not counted.
    """
    columns = ids.reshape(-1, ids.shape[-1]).unbind(-1)
    return [torch.unique(column[column >= 0].long(), return_counts=True) for column in columns]


def merge_counts(codes: Tensor, counts: Tensor) -> Tensor:
    """Return counts ``(U,)`` of the distinct codes in ``codes``, the concatenated codes of several ranks."""
    distinct, position = torch.unique(codes, return_inverse=True)
    return torch.zeros_like(distinct).index_add_(0, position, counts)


def code_usage(counts: Sequence[Tensor], codebook_sizes: Sequence[int], samples: int) -> CodeUsage:
    """Return the statistics of counts ``(U_c,)`` of the codes in each codebook.

    Args:
        counts: int64, count of each code that occurs, one tensor for each codebook.
        codebook_sizes: K of each.
        samples: number of samples that the tokens come from.
    """
    tokens = int(counts[0].sum())
    entropies = [float(torch.special.entr(each.double() / max(1, tokens)).sum()) for each in counts]
    used = [len(each) for each in counts]
    bits = math.fsum(math.log2(size) for size in codebook_sizes)
    per_sample = tokens / max(1, samples)
    return CodeUsage(
        samples=samples,
        tokens=tokens,
        codebook_sizes=list(codebook_sizes),
        codes_used=used,
        usage=[number / size for number, size in zip(used, codebook_sizes, strict=True)],
        perplexity=[math.exp(entropy) for entropy in entropies],
        bits_per_token=bits,
        bits_used_per_token=math.fsum(entropies) / math.log(2),
        tokens_per_sample=per_sample,
        bits_per_sample=per_sample * bits,
    )
