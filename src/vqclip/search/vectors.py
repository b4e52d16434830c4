"""Search over embedded codes as float vectors, by faiss (Douze et al. 2024, arXiv 2401.08281)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from vqclip.errors import ConfigError
from vqclip.search.index import CodeIndex
from vqclip.search.scan import SearchResult, require_queries, require_tokenizer
from vqclip.tokenizer import Tokenizer

__all__ = ["FaissSearch"]

_CHUNK = 4096


class FaissSearch:
    """Search by faiss in the embeddings of all items, by inner product.

    ``Flat`` is exact; ``HNSW32`` is fast and approximate, ``SQ8`` and ``PQ16`` are small and approximate. Among equal
    scores faiss promises no order. It exists in memory only: files of faiss are not read here.

    Args:
        index: the index.
        tokenizer: the tokenizer that the index was built with, in evaluation mode.
        factory: argument of ``faiss.index_factory``.

    Raises:
        CheckpointError: another tokenizer than the one that made the codes.
        ConfigError: faiss is not installed, or refuses ``factory``.
    """

    def __init__(self, index: CodeIndex, tokenizer: Tokenizer, factory: str = "Flat"):
        self._faiss = _import_faiss()
        require_tokenizer(index, tokenizer)
        self._width = tokenizer.embed_dim
        try:
            self._index = self._faiss.index_factory(self._width, factory, self._faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ConfigError(f"factory: got {factory!r}, which faiss refuses: {error}") from error
        parts = [_embed(index, tokenizer, items) for items in torch.arange(len(index)).split(_CHUNK)]
        vectors = torch.cat(parts).numpy() if parts else torch.empty(0, self._width).numpy()
        if not self._index.is_trained:
            self._index.train(vectors)
        self._index.add(vectors)

    @property
    def nbytes(self) -> int:
        """Bytes of the serialised faiss index."""
        return len(self._faiss.serialize_index(self._index))

    def search(self, queries: Tensor, k: int = 10) -> SearchResult:
        """Return the best items; -1 in place of items if faiss finds fewer than k.

        Raises:
            ShapeError: see `CodeSearch.search`.
        """
        require_queries(queries, self._width, k)
        scores, items = self._index.search(queries.float().cpu().contiguous().numpy(), k)
        return SearchResult(torch.from_numpy(scores), torch.from_numpy(items))


def _import_faiss() -> Any:
    try:
        return import_module("faiss")
    except ImportError as error:
        raise ConfigError(f"faiss: not installed ({error}); pip install 'vqclip[search]'") from error


@torch.no_grad()
def _embed(index: CodeIndex, tokenizer: Tokenizer, items: Tensor) -> Tensor:
    return tokenizer.embed(index.ids(items).to(tokenizer.device)).float().cpu()
