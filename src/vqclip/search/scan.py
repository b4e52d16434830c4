"""Exact search: every code is embedded and compared with every query.

    for each chunk of distinct codes:
        embeddings = tokenizer.embed(ids of the chunk)    # or a cached copy
        scores     = queries @ embeddings.T               # (Q, chunk)
        best       = top k of (best, scores), ties by item number

    with a float16 or int8 cache:
        bounds     = score of the compressed form +- its distance from the embedding
        candidates = items whose upper bound reaches the k-th best lower bound
        embed the candidates again, and score them exactly

A query is compared with the embeddings of the codes, not with other codes: only one side of the comparison is quantized
("asymmetric"; Jégou et al. 2011). Product quantizers use tables, one look-up a codebook, because there the score is a
sum over codebooks. Here it is not: a token's vector is normalised and the tokens are weighted by a softmax before they
are summed (`vqclip.nn.pooling`), so no tables give the score (ADR 20).

Shapes: Q queries, U distinct codes, n items, E embedding width, k results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import CheckpointError, ConfigError, ShapeError
from vqclip.search.index import CodeIndex
from vqclip.search.topk import rank_keys, scores_and_items, top_keys
from vqclip.tokenizer import Tokenizer
from vqclip.tokenizer.fingerprint import fingerprint

__all__ = ["Cache", "CodeSearch", "SearchResult", "require_queries"]

Cache = Literal["none", "float32", "float16", "int8"]
"""Embeddings kept in memory: none, all, or a compressed form that finds the candidates."""

_CHUNK = 4096
_SCORES = 2**24
"""Largest number of scores of compressed forms at a time: 64 MiB."""
_ROUNDING = 1e-5
"""Allowance for rounding in the distance of a compressed form from its embedding."""


@dataclass(frozen=True)
class SearchResult:
    """The k best items of every query, best first; items of equal score in the order of their numbers."""

    scores: Tensor
    """``(Q, k)`` float32 cosines."""
    items: Tensor
    """``(Q, k)`` int64."""


class CodeSearch:
    """Exact search of an index through its tokenizer.

    The results equal those of a search over all embeddings in float32, whatever the cache: with ``float16`` or ``int8``
    each row's distance from its embedding is known, which bounds the scores; every item that can be among the best is
    embedded again. Scores that differ by the rounding of float32 may change places. On CUDA this requires torch's
    default precision of matrix products: if TF32 is allowed (``torch.backends.cuda.matmul.allow_tf32``,
    ``torch.set_float32_matmul_precision``), products round far more than the bounds allow, and `search` refuses.

    Args:
        index: the index.
        tokenizer: the tokenizer that the index was built with, in evaluation mode.
        cache: ``none``: ids only, all embedded at every call. ``float32``: 4 E bytes a distinct code.
            ``float16``: 2 E + 4. ``int8``: E + 8.

    Raises:
        CheckpointError: another tokenizer than the one that made the codes.
        ConfigError: an unknown cache.
    """

    def __init__(self, index: CodeIndex, tokenizer: Tokenizer, cache: Cache = "none"):
        if cache not in get_args(Cache):
            raise ConfigError(f"cache: got {cache!r}, expected one of {', '.join(get_args(Cache))}")
        require_tokenizer(index, tokenizer)
        self.index, self.tokenizer, self.cache = index, tokenizer, cache
        self._by_code = None if index.row is None else index.row.long().sort(stable=True)
        self._embeddings = (
            torch.cat([torch.empty(0, tokenizer.embed_dim, device=tokenizer.device), *self._embed_all()])
            if cache == "float32"
            else None
        )
        self._compressed = (
            _CompressedEmbeddings.from_chunks(self._embed_all(), cache) if cache in ("float16", "int8") else None
        )

    @property
    def nbytes(self) -> int:
        """Bytes in memory: the index and the cache."""
        kept = [self._embeddings] if self._embeddings is not None else []
        if self._compressed is not None:
            kept += [self._compressed.values, self._compressed.scales, self._compressed.errors]
        return self.index.nbytes + sum(each.numel() * each.element_size() for each in kept)

    def search(self, queries: Tensor, k: int = 10) -> SearchResult:
        """Return the k best items of every query, best first.

        Args:
            queries: ``(Q, E)`` unit-norm embeddings of either modality, continuous or from codes.
            k: number of results, at least 1; fewer if the index has fewer items.

        Raises:
            ConfigError: on CUDA, if TF32 is allowed.
            ShapeError: queries of another width or not finite, or k less than 1.
        """
        require_queries(queries, self.tokenizer.embed_dim, k)
        _require_float32(self.tokenizer.device)
        queries = queries.float().to(self.tokenizer.device)
        if self._compressed is None:
            return self._scan(queries, k)
        rows = max(1, _SCORES // max(1, len(self.index.codes)))
        parts = [self._refine(part, k, self._compressed) for part in queries.split(rows)]
        parts = parts or [self._scan(queries, k)]
        return SearchResult(torch.cat([part.scores for part in parts]), torch.cat([part.items for part in parts]))

    def embeddings(self, codes: Tensor) -> Tensor:
        """Return the embeddings ``(M, E)`` float32 of distinct codes, given by row ``(M,)``."""
        with torch.no_grad():
            ids = self.index.packing.unpack(self.index.codes[codes])
            return self.tokenizer.embed(ids.to(self.tokenizer.device)).float()

    def _embed_all(self) -> Iterator[Tensor]:
        for codes in torch.arange(len(self.index.codes)).split(_CHUNK):
            yield self.embeddings(codes)

    def _scan(self, queries: Tensor, k: int) -> SearchResult:
        chunks = self._embed_all() if self._embeddings is None else iter(self._embeddings.split(_CHUNK))
        found, start = queries.new_empty(len(queries), 0, dtype=torch.int64), 0
        for chunk in chunks:
            codes = torch.arange(start, start + len(chunk))
            found = top_keys(torch.cat((found, self._rank_keys(queries @ chunk.T, codes)), dim=1), k)
            start += len(chunk)
        return SearchResult(*scores_and_items(found))

    def _refine(self, queries: Tensor, k: int, compressed: _CompressedEmbeddings) -> SearchResult:
        """Score the items exactly that the bounds do not exclude."""
        scores, slack = compressed.scores(queries), queries.norm(dim=1, keepdim=True) * (compressed.errors + _ROUNDING)
        count = min(k, scores.shape[1])
        if not count:
            return SearchResult(scores, scores.long())
        surely = (scores - slack).topk(count, dim=1).values[:, -1:]
        candidates = (scores + slack >= surely).any(dim=0).nonzero().flatten().cpu()
        found = queries.new_empty(len(queries), 0, dtype=torch.int64)
        for codes in candidates.split(_CHUNK):
            found = top_keys(torch.cat((found, self._rank_keys(queries @ self.embeddings(codes).T, codes)), dim=1), k)
        return SearchResult(*scores_and_items(found))

    def _rank_keys(self, scores: Tensor, codes: Tensor) -> Tensor:
        """Return the `rank_keys` of all items with one of the codes ``(M,)``, ascending, of scores ``(Q, M)``."""
        if self._by_code is None:
            return rank_keys(scores, codes.to(scores.device))
        ordered, items = self._by_code
        starts, ends = torch.searchsorted(ordered, codes), torch.searchsorted(ordered, codes, right=True)
        counts = ends - starts
        column = torch.arange(len(codes)).repeat_interleave(counts)
        within = torch.arange(len(column)) - (counts.cumsum(0) - counts)[column]
        return rank_keys(scores[:, column.to(scores.device)], items[starts[column] + within].to(scores.device))


@dataclass(frozen=True)
class _CompressedEmbeddings:
    """Embeddings in fewer bits, and the distance of each from the exact one."""

    values: Tensor
    """``(U, E)`` float16 or int8."""
    scales: Tensor
    """``(U,)`` float32 factors; empty for float16."""
    errors: Tensor
    """``(U,)`` float32: length of the difference."""

    @staticmethod
    def from_chunks(chunks: Iterator[Tensor], cache: Cache) -> _CompressedEmbeddings:
        """Compress chunks of embeddings."""
        parts = [_compress(chunk, cache) for chunk in chunks]
        joined = map(torch.cat, zip(*parts, strict=True)) if parts else [torch.empty(0)] * 3
        return _CompressedEmbeddings(*joined)

    def scores(self, queries: Tensor) -> Tensor:
        """``(Q, U)`` float32."""
        parts = [queries @ values.float().T for values in self.values.split(_CHUNK)]
        scores = torch.cat(parts, dim=1) if len(self.values) else queries.new_empty(len(queries), 0)
        return scores * self.scales if len(self.scales) else scores


def _compress(embeddings: Tensor, cache: Cache) -> tuple[Tensor, Tensor, Tensor]:
    if cache == "float16":
        values, scales = embeddings.half(), embeddings.new_empty(0)
        restored = values.float()
    else:
        scales = embeddings.abs().amax(dim=1) / 127
        values = (embeddings / scales.clamp(min=1e-12)[:, None]).round().to(torch.int8)
        restored = values.float() * scales[:, None]
    return values, scales, (restored - embeddings).norm(dim=1)


def _require_float32(device: torch.device) -> None:
    """Check that float32 products are not rounded to TF32 (10 bits): `_ROUNDING` only covers float32."""
    precision = dist.matmul_precision()
    if device.type == "cuda" and precision not in ("none", "ieee"):
        raise ConfigError(
            f"search: got float32 matrix products in {precision}, expected ieee, without which results are not exact: "
            "torch.set_float32_matmul_precision('highest')"
        )


def require_queries(queries: Tensor, width: int, k: int) -> None:
    """Check the arguments of `CodeSearch.search`; raise ShapeError if they are wrong."""
    if queries.ndim != 2 or queries.shape[1] != width or not queries.is_floating_point():
        got = f"{tuple(queries.shape)} {queries.dtype}"
        raise ShapeError(f"queries: got {got}, expected (Q, {width}) floating point; one query: query[None]")
    if not bool(queries.isfinite().all()):
        raise ShapeError("queries: got NaN or infinity, expected finite embeddings")
    if k < 1:
        raise ShapeError(f"k: got {k}, expected at least 1")


def require_tokenizer(index: CodeIndex, tokenizer: Tokenizer) -> None:
    """Check that a tokenizer made the ids of an index; raise CheckpointError otherwise."""
    ours = fingerprint(tokenizer)
    if index.tokenizer_sha256 != ours:
        raise CheckpointError(
            f"index: its codes were made by the {index.modality} tokenizer {index.tokenizer_sha256}, got the "
            f"{tokenizer.modality} tokenizer {ours}; load the tokenizer it was built with"
        )
