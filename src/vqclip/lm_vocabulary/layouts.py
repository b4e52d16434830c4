"""Ids of a tokenizer as ids of a language model, and back: one sequence, delayed streams, or a joint vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from vqclip.config import Modality
from vqclip.errors import ConfigError, ShapeError
from vqclip.lm_vocabulary.embedding import mean_rows, projected_rows, require_rows
from vqclip.nn.inputs import require_all, require_codes, require_ids
from vqclip.seeds import derive_seed

INT64_IDS = 2**63
"""Number of ids from 0 that int64 has."""
SPECIAL = ("pad", "begin_image", "end_image", "begin_text", "end_text")


@dataclass(frozen=True)
class FlatCodes:
    """Ids ``(B, N, C)`` as ``(B, N·C)``: token after token, the C codebooks of a token one after another.

    Code k of codebook c is id ``offset + K_0 + ... + K_(c-1) + k``, so that the position in the sequence and the
    id always belong to the same codebook.

    Args:
        codebook_sizes: K of each codebook.
        offset: id of the first code.
        pad: id in place of -1; any id outside of the codes' range, -1 itself by default.

    Raises:
        ConfigError: no codebook, a range that does not fit int64, or a ``pad`` inside it.
    """

    codebook_sizes: Sequence[int]
    offset: int = 0
    pad: int = -1

    def __post_init__(self) -> None:
        require_codebooks(self.codebook_sizes)
        require_room(self.codebook_sizes, self.offset)
        if self.offset <= self.pad < self.stop:
            raise ConfigError(
                f"pad: got {self.pad}, which is a code; expected none of {self.offset} to {self.stop - 1}"
            )

    @property
    def size(self) -> int:
        """Number of ids of the codes."""
        return sum(self.codebook_sizes)

    @property
    def stop(self) -> int:
        """First id after the codes."""
        return self.offset + self.size

    @property
    def starts(self) -> tuple[int, ...]:
        """Id of the first code of each codebook."""
        return tuple(accumulate(self.codebook_sizes[:-1], initial=self.offset))

    def to_vocabulary(self, ids: Tensor) -> Tensor:
        """Turn ids ``(B, N, C)`` of a tokenizer into ``(B, N·C)`` int64.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        codes = require_codes(ids, self.codebook_sizes, samples=True)
        starts = torch.tensor(self.starts, device=ids.device)
        return torch.where(codes < 0, self.pad, codes + starts).flatten(1)

    def from_vocabulary(self, flat: Tensor) -> Tensor:
        """Invert `to_vocabulary`: ``(B, N·C)`` integers → ``(B, N, C)`` int64.

        Raises:
            ShapeError: for another shape or dtype, or an id outside the range of the codebook at its position.
        """
        codebooks = len(self.codebook_sizes)
        flat = require_integers("vocabulary ids", flat, 2, f"(B, N·{codebooks})")
        if flat.shape[1] % codebooks:
            raise ShapeError(
                f"vocabulary ids: got shape {tuple(flat.shape)}, expected a multiple of {codebooks} ids a sample: one "
                "for each codebook of a token"
            )
        ids = flat.unflatten(1, (flat.shape[1] // codebooks, codebooks))
        starts = torch.tensor(self.starts, device=flat.device)
        last = torch.tensor([s + size - 1 for s, size in zip(self.starts, self.codebook_sizes, strict=True)]).to(starts)
        absent = ids == self.pad
        spans = zip(starts.tolist(), last.tolist(), strict=True)
        expected = [f"{first} to {final}, or {self.pad} for none" for first, final in spans]
        require_all(absent | ((ids >= starts) & (ids <= last)), ids, "vocabulary ids", expected)
        return torch.where(absent, -1, ids - starts)


@dataclass(frozen=True)
class DelayedCodes:
    """Ids ``(B, N, C)`` as C streams of N + C - 1 steps (the delay pattern: MusicGen, Copet et al. 2023).

    At step t stream c contains the code of token t - c, so that a model that predicts all streams of a step at once
    still sees codebooks 0 to c - 1 of a token when it predicts codebook c:

        step       0    1    2    3
        stream 0   a0   b0   c0   pad
        stream 1   pad  a1   b1   c1

    A sample takes N + C - 1 steps instead of N·C. The ids of each stream are those of its codebook; `pad` fills the
    steps before and after a stream, and replaces -1.

    Args:
        codebook_sizes: K of each codebook.

    Raises:
        ConfigError: no codebook, or one that leaves int64 no id for `pad`.
    """

    codebook_sizes: Sequence[int]

    def __post_init__(self) -> None:
        require_codebooks(self.codebook_sizes)
        if max(self.codebook_sizes) >= INT64_IDS:
            raise ConfigError(
                f"vocabulary: a codebook of {max(self.codebook_sizes)} codes leaves no int64 id for padding; expected "
                f"fewer than {INT64_IDS}: train a Product of smaller codebooks"
            )

    @property
    def pad(self) -> int:
        """Padding id: one more than the largest id of any codebook; the same in all streams."""
        return max(self.codebook_sizes)

    @property
    def size(self) -> int:
        """Ids of a stream, including `pad`: rows that each stream's embedding table needs."""
        return self.pad + 1

    def to_vocabulary(self, ids: Tensor) -> Tensor:
        """Turn ids ``(B, N, C)`` of a tokenizer into ``(B, N + C - 1, C)`` int64.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        codes = require_codes(ids, self.codebook_sizes, samples=True)
        samples, tokens, codebooks = codes.shape
        streams = codes.new_full((samples, tokens + codebooks - 1, codebooks), self.pad)
        for c in range(codebooks):
            streams[:, c : c + tokens, c] = torch.where(codes[..., c] < 0, self.pad, codes[..., c])
        return streams

    def from_vocabulary(self, streams: Tensor) -> Tensor:
        """Invert `to_vocabulary`: ``(B, N + C - 1, C)`` integers → ``(B, N, C)`` int64.

        Raises:
            ShapeError: for another shape or dtype, an id outside its codebook, or one where a stream must be padded.
        """
        codebooks = len(self.codebook_sizes)
        streams = require_integers("vocabulary ids", streams, 3, f"(B, N + {codebooks - 1}, {codebooks})")
        tokens = streams.shape[1] - codebooks + 1
        if streams.shape[2] != codebooks or tokens < 0:
            raise ShapeError(
                f"vocabulary ids: got shape {tuple(streams.shape)}, expected (B, N + {codebooks - 1}, {codebooks})"
            )
        sizes = torch.tensor(self.codebook_sizes, device=streams.device)
        steps = torch.arange(streams.shape[1], device=streams.device)[:, None]
        delay = torch.arange(codebooks, device=streams.device)
        inside = (steps >= delay) & (steps < delay + tokens)
        absent = streams == self.pad
        expected = [f"0 to {size - 1}, or {self.pad} for none and beside its tokens" for size in self.codebook_sizes]
        require_all(absent | (inside & (streams >= 0) & (streams < sizes)), streams, "vocabulary ids", expected)
        codes = torch.stack([streams[:, c : c + tokens, c] for c in range(codebooks)], dim=-1)
        return torch.where(codes == self.pad, -1, codes)


@dataclass(frozen=True)
class Vocabulary:
    """Five special ids, then the codes of images, then those of texts, from id ``offset``.

    A sample becomes ``begin, codes, end`` with the codes of `FlatCodes`; if the last tokens are absent, as in padded
    captions, the end mark follows the last code, and `pad` fills the row.

    Args:
        image: K of each codebook of the image tokenizer; None without one.
        text: the same of the text tokenizer.
        offset: first new id: the number of ids that the language model has.

    Raises:
        ConfigError: neither tokenizer, one without codebooks, or ids that do not fit int64.
    """

    image: Sequence[int] | None = None
    text: Sequence[int] | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.image is None and self.text is None:
            raise ConfigError("vocabulary: got neither image nor text; expected the codebook_sizes of a tokenizer")
        require_room([len(SPECIAL), *(self.image or ()), *(self.text or ())], self.offset)
        for modality in self.modalities:
            self.codes(modality)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Modalities in the vocabulary."""
        both: tuple[Modality, ...] = ("image", "text")
        return tuple(modality for modality in both if getattr(self, modality) is not None)

    @property
    def special(self) -> dict[str, int]:
        """Special ids by name: pad, begin_image, end_image, begin_text, end_text."""
        return {name: self.offset + number for number, name in enumerate(SPECIAL)}

    @property
    def pad(self) -> int:
        """Id that fills rows and replaces absent codes."""
        return self.offset

    @property
    def size(self) -> int:
        """Number of new ids."""
        return len(SPECIAL) + sum(self.image or ()) + sum(self.text or ())

    @property
    def stop(self) -> int:
        """First id after them: number of ids that the language model needs."""
        return self.offset + self.size

    def codes(self, modality: Modality) -> FlatCodes:
        """Return the ids of a modality's codes.

        Raises:
            ConfigError: the vocabulary lacks this modality.
        """
        sizes = getattr(self, modality, None) if modality in ("image", "text") else None
        if sizes is None:
            raise ConfigError(f"vocabulary: got modality {modality!r}, expected {' or '.join(self.modalities)}")
        before = sum(self.image or ()) if modality == "text" else 0
        return FlatCodes(sizes, self.offset + len(SPECIAL) + before, pad=self.pad)

    def to_vocabulary(self, ids: Tensor, modality: Modality) -> Tensor:
        """Turn ids ``(B, N, C)`` of a tokenizer into ``(B, N·C + 2)`` int64 with marks.

        Raises:
            ConfigError: the vocabulary lacks this modality.
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        flat = self.codes(modality).to_vocabulary(ids)
        begin, end = self._marks(modality)
        row = F.pad(flat, (1, 1), value=self.pad)
        row[:, 0] = begin
        places = torch.arange(1, flat.shape[1] + 1, device=flat.device)
        length = F.pad((flat != self.pad) * places, (1, 0)).amax(dim=1, keepdim=True)  # up to the last code
        return row.scatter(1, 1 + length, end)

    def from_vocabulary(self, rows: Tensor, modality: Modality) -> Tensor:
        """Invert `to_vocabulary`: ``(B, N·C + 2)`` integers → ``(B, N, C)`` int64.

        Codes after the end mark become -1, as in rows of padded captions and dropped stages, and in an image that a
        model ended too early.

        Raises:
            ConfigError: the vocabulary lacks this modality.
            ShapeError: for another shape or dtype, marks that are missing or misplaced, or an id outside the range of
                the codebook at its position.
        """
        codes = self.codes(modality)
        rows = require_integers("vocabulary ids", rows, 2, f"(B, N·{len(codes.codebook_sizes)} + 2)")
        begin, end = self._marks(modality)
        columns, codebooks = rows.shape[1], len(codes.codebook_sizes)
        if columns < 2 or (columns - 2) % codebooks:
            raise ShapeError(
                f"vocabulary ids: got shape {tuple(rows.shape)}, expected marks of begin and end in a row, and a "
                f"multiple of {codebooks} ids between them: one for each codebook of a token"
            )
        ends = rows == end
        place = ends.int().argmax(dim=1, keepdim=True)
        after = torch.arange(columns, device=rows.device) > place
        whole = (rows[:, 0] == begin) & (ends.sum(dim=1) == 1) & ((rows == self.pad) | ~after).all(dim=1)
        for row in (~whole).nonzero().flatten().tolist():
            raise ShapeError(
                f"vocabulary ids[{row}]: expected {begin} (begin_{modality}), codes, one {end} (end_{modality}) and "
                f"nothing but {self.pad} (pad) after it; got {rows[row].tolist()[:8]}..."
            )
        return codes.from_vocabulary(rows.scatter(1, place, self.pad)[:, 1:-1])

    def rows(self, table: Tensor, seed: int, codebooks: Mapping[Modality, Sequence[Tensor]] | None = None) -> Tensor:
        """Return initial embeddings of the new ids, for `resize`.

        Args:
            table: ``(V, H)`` existing embeddings, which give mean and deviation.
            seed: seed of the draws.
            codebooks: matrices ``(K, d)`` of each codebook of a modality, from a tokenizer's `codebook`: similar codes
                then get similar rows (`projected_rows`). A modality without them gets `mean_rows`.

        Returns:
            ``(size, H)`` in the dtype of ``table``.

        Raises:
            ConfigError: codebooks of a modality that the vocabulary lacks.
            ShapeError: codebooks of other sizes than those of this vocabulary, or more than `MAX_ROWS` new ids.
        """
        require_rows(self.size)
        for modality in codebooks or {}:
            self.codes(modality)
        parts = [mean_rows(table, len(SPECIAL), derive_seed(seed, "special"))]
        for modality in self.modalities:
            sizes = self.codes(modality).codebook_sizes
            given = (codebooks or {}).get(modality)
            if given is None:
                parts.append(mean_rows(table, sum(sizes), derive_seed(seed, modality)))
                continue
            if [len(matrix) for matrix in given] != list(sizes):
                got = [tuple(matrix.shape) for matrix in given]
                raise ShapeError(f"codebooks of {modality}: got shapes {got}, expected (K, d) with K of {list(sizes)}")
            parts += [
                projected_rows(table, matrix, derive_seed(seed, f"{modality}.{number}"))
                for number, matrix in enumerate(given)
            ]
        return torch.cat(parts)

    def _marks(self, modality: Modality) -> tuple[int, int]:
        return self.special[f"begin_{modality}"], self.special[f"end_{modality}"]


def require_codebooks(sizes: Sequence[int]) -> None:
    """Check that there is a codebook, and none is empty; raise ConfigError otherwise."""
    if not sizes or min(sizes) < 1:
        raise ConfigError(
            f"codebook sizes: got {tuple(sizes)}, expected at least one codebook of at least one code: a tokenizer's "
            "codebook_sizes (Identity has none)"
        )


def require_room(sizes: Sequence[int], offset: int) -> None:
    """Check that ids from ``offset``, one for each code, fit int64; raise ConfigError otherwise."""
    if offset < 0:
        raise ConfigError(f"offset: got {offset}, expected 0 or more")
    if offset + sum(sizes) > INT64_IDS:
        raise ConfigError(
            f"vocabulary: {len(sizes)} codebooks of together {sum(sizes)} codes from id {offset} do not fit int64 ids "
            f"(at most {INT64_IDS}); train a Product of smaller codebooks, or use DelayedCodes, whose streams have "
            "ids of their own"
        )


def require_integers(name: str, ids: Tensor, ndim: int, shape: str) -> Tensor:
    """Return integers with ``ndim`` axes as int64; for ``shape`` and errors see `require_ids`."""
    wide = require_ids(ids, name, shape)
    if wide.ndim != ndim:
        raise ShapeError(f"{name}: got shape {tuple(ids.shape)} and dtype {ids.dtype}, expected integers {shape}")
    return wide
