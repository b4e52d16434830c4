"""Exact search: every code is embedded and compared with every query. For the rest there is faiss.

    for each chunk of distinct codes:
        embeddings = tokenizer.embed(ids of the chunk)    # or kept ones
        scores     = queries @ embeddings.T               # (Q, chunk)
        best       = top k of (best, scores), ties by item number

A query is compared with the embeddings of the codes, not with other codes: only one side of the comparison is quantized
("asymmetric"; Jégou et al. 2011). Product quantizers use tables, one look-up a codebook, because there the score is a
sum over codebooks. Here it is not: a token's vector is normalised and the tokens are weighted by a softmax before they
are summed (`vqclip.nn.layers`), so no tables give the score (ADR 20).

Shapes: Q queries, U distinct codes, n items, E embedding width, k results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vqclip.data import ShardedSource
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.prepare import open_images
from vqclip.data.samples import read_decoded
from vqclip.errors import CheckpointError, ConfigError, DataError, ShapeError, StorageError, import_extra
from vqclip.nn.precision import full_precision
from vqclip.search.index import CodeIndex
from vqclip.tokenizer import Tokenizer
from vqclip.tokenizer.stored import fingerprint

_CHUNK = 4096
_LOW, _MAGNITUDE = 2**32 - 1, 2**31 - 1


@dataclass(frozen=True)
class SearchResult:
    """The k best items of every query, best first; items of equal score in the order of their numbers."""

    scores: Tensor
    """``(Q, k)`` float32 cosines."""
    items: Tensor
    """``(Q, k)`` int64."""


class CodeSearch:
    """Exact search of an index through its tokenizer.

    Scores that differ by the rounding of float32 may change places.

    Args:
        index: the index.
        tokenizer: the tokenizer that the index was built with, in evaluation mode.
        keep: keep the embeddings of all distinct codes in memory, 4 E bytes each; False: embed them at every call.

    Raises:
        CheckpointError: another tokenizer than the one that made the codes.
    """

    def __init__(self, index: CodeIndex, tokenizer: Tokenizer, keep: bool = False):
        _require_tokenizer(index, tokenizer)
        self.index, self.tokenizer = index, tokenizer
        self._by_code = None if index.row is None else index.row.long().sort(stable=True)
        self._kept = list(_embed_codes(index, tokenizer)) if keep else None

    @property
    def nbytes(self) -> int:
        """Bytes in memory: the index and the embeddings that are kept."""
        return self.index.nbytes + sum(each.nbytes for each in self._kept or ())

    def search(self, queries: Tensor, k: int = 10) -> SearchResult:
        """Return the k best items of every query, best first.

        Args:
            queries: ``(Q, E)`` unit-norm embeddings of either modality, continuous or from codes.
            k: number of results, at least 1; fewer if the index has fewer items.

        Raises:
            ShapeError: queries of another width or not finite, or k less than 1.
        """
        _require_queries(queries, self.tokenizer.embed_dim, k)
        queries = queries.float().to(self.tokenizer.device)
        best, start = queries.new_empty(len(queries), 0, dtype=torch.int64), 0
        for chunk in _embed_codes(self.index, self.tokenizer) if self._kept is None else self._kept:
            codes = torch.arange(start, start + len(chunk))
            with full_precision(queries.device):
                best = torch.cat((best, self._keys(queries @ chunk.T, codes)), dim=1)
            best = best.topk(min(k, best.shape[1]), dim=1).values
            start += len(chunk)
        ordered = best >> 32
        pattern = torch.where(ordered >= 0, ordered, ordered ^ _MAGNITUDE)
        return SearchResult(pattern.to(torch.int32).view(torch.float32), _LOW - (best & _LOW))

    def _keys(self, scores: Tensor, codes: Tensor) -> Tensor:
        """Return an int64 for each query and each item with one of the codes: of scores ``(Q, M)``, larger is better.

        `torch.topk` promises no order among equal scores, so score and number of the item are packed into one integer:

            key = (score as an ordered int32) << 32 | (2^32 - 1 - item)
        """
        pattern = (scores + 0.0).view(torch.int32).long()  # + 0.0: -0 equals 0, and its bits do not
        # As integers, the bits of positive floats are ordered like the floats, and those of negative ones in reverse.
        ordered = torch.where(pattern >= 0, pattern, pattern ^ _MAGNITUDE)
        if self._by_code is None:
            return (ordered << 32) | (_LOW - codes.to(scores.device))
        rows, items = self._by_code
        starts, ends = torch.searchsorted(rows, codes), torch.searchsorted(rows, codes, right=True)
        items = items[int(starts[0]) : int(ends[-1])].to(scores.device)  # codes follow each other
        column = torch.arange(len(codes)).repeat_interleave(ends - starts).to(scores.device)
        return (ordered[:, column] << 32) | (_LOW - items)


class FaissSearch:
    """Search by faiss in the embeddings of all items, by inner product (Douze et al. 2024, arXiv 2401.08281).

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
        faiss = import_extra("faiss", "search", "FaissSearch ")
        self._width, vectors = tokenizer.embed_dim, embeddings(index, tokenizer).numpy()
        try:
            self._index = faiss.index_factory(self._width, factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ConfigError(f"factory: got {factory!r}, which faiss refuses: {error}") from error
        if not self._index.is_trained:
            self._index.train(vectors)
        self._index.add(vectors)

    @property
    def nbytes(self) -> int:
        """Bytes of the serialised faiss index."""
        return len(import_extra("faiss", "search", "FaissSearch ").serialize_index(self._index))

    def search(self, queries: Tensor, k: int = 10) -> SearchResult:
        """Return the best items; -1 in place of items if faiss finds fewer than k.

        Raises:
            ShapeError: see `CodeSearch.search`.
        """
        _require_queries(queries, self._width, k)
        scores, items = self._index.search(queries.float().cpu().contiguous().numpy(), k)
        return SearchResult(torch.from_numpy(scores), torch.from_numpy(items))


def embeddings(index: CodeIndex, tokenizer: Tokenizer) -> Tensor:
    """Return the embeddings ``(n, E)`` of all items on the CPU, float32 of unit norm, for a database of vectors.

    Raises:
        CheckpointError: another tokenizer than the one that made the codes.
    """
    _require_tokenizer(index, tokenizer)
    every = torch.cat([torch.empty(0, tokenizer.embed_dim), *(part.cpu() for part in _embed_codes(index, tokenizer))])
    return every if index.row is None else every[index.row.long()]


def _embed_codes(index: CodeIndex, tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Yield the embeddings of the distinct codes."""
    for codes in index.codes.split(_CHUNK) if len(index.codes) else ():
        with torch.no_grad(), full_precision(tokenizer.device):
            embedded = tokenizer.embed(index.packing.unpack(codes).to(tokenizer.device)).float()
        yield embedded


def _require_queries(queries: Tensor, width: int, k: int) -> None:
    if queries.ndim != 2 or queries.shape[1] != width or not queries.is_floating_point():
        got = f"{tuple(queries.shape)} {queries.dtype}"
        raise ShapeError(f"queries: got {got}, expected (Q, {width}) floating point; one query: query[None]")
    if not bool(queries.isfinite().all()):
        raise ShapeError("queries: got NaN or infinity, expected finite embeddings")
    if k < 1:
        raise ShapeError(f"k: got {k}, expected at least 1")


def _require_tokenizer(index: CodeIndex, tokenizer: Tokenizer) -> None:
    ours = fingerprint(tokenizer)
    if index.tokenizer_sha256 != ours:
        raise CheckpointError(
            f"index: its codes were made by the {index.modality} tokenizer {index.tokenizer_sha256}, got the "
            f"{tokenizer.modality} tokenizer {ours}; load the tokenizer it was built with"
        )


@dataclass(frozen=True)
class Hit:
    """One result."""

    name: str
    """Name of the item."""
    score: float
    """Cosine."""
    picture: Tensor | None = None
    """``(3, H, W)`` uint8, or None if it cannot be shown; the page then shows the name alone."""


def open_indexed(index: CodeIndex, paths: Sequence[str], keys: Sequence[str] = ()) -> ShardedSource:
    """Open the images that an index was built from.

    Paths and keys are given by the user: those in an index from somebody else could name any local folder.

    Args:
        index: the index.
        paths: of the images.
        keys: ``key=value`` of their kind.

    Raises:
        CheckpointError: the index names an image that the source does not have.
        ConfigError, DataError: there are no images, or not those that the index was built from.
    """
    source, shown = open_images(paths, keys), " ".join([*paths, *keys])
    if source.fingerprint != index.origin.fingerprint:
        raise DataError(
            f"{shown}: the index was built from other data, with other keys, or by an older version; expected the same "
            "images, or a rebuilt index"
        )
    last = len(index) - 1 if index.places is None else int(index.places.max()) if len(index) else -1
    if last >= len(source):
        raise CheckpointError(
            f"index: places: got {last}, expected less than {len(source)}, the images of {shown}; rebuild the index"
        )
    return source


def find_hits(
    index: CodeIndex, found: SearchResult, source: ShardedSource | None, report_bad: Callable[[DataError], None]
) -> list[Hit]:
    """Return the results of the first query, with their images if there is a source.

    Args:
        index: the index.
        found: results of a search of it.
        source: from `open_indexed`; None for results without images.
        report_bad: called with the error of an image that cannot be used; its result has none.

    Raises:
        StorageError: the source cannot be read.
    """
    scores, items = found.scores[0].tolist(), found.items[0].tolist()
    places = items if index.places is None else index.places[torch.tensor(items, dtype=torch.int64)].tolist()
    images: dict[int, Tensor | None] = dict.fromkeys(places)  # captions may share an image
    for place in images:
        if source is None:
            break
        try:
            images[place] = read_decoded(source, place, MAX_PIXELS)[1]
        except StorageError:
            raise  # the storage failed, not the image
        except DataError as error:
            report_bad(error)
    rows = zip(scores, items, places, strict=True)
    return [Hit(index.names[item], score, images[place]) for score, item, place in rows]
