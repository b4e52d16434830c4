"""Images and texts in one vocabulary, after the ids that a language model already has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vqclip.config import Modality
from vqclip.errors import ConfigError, ShapeError
from vqclip.lm_vocabulary.checks import require_integers, require_room
from vqclip.lm_vocabulary.embedding import mean_rows, projected_rows, require_rows
from vqclip.lm_vocabulary.flat import FlatCodes
from vqclip.seeds import derive_seed

SPECIAL = ("pad", "begin_image", "end_image", "begin_text", "end_text")


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
        row = torch.nn.functional.pad(flat, (1, 1), value=self.pad)
        row[:, 0] = begin
        return row.scatter(1, 1 + _length(flat != self.pad)[:, None], end)

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


def _length(present: Tensor) -> Tensor:
    """Return ``(B,)``: the number of columns up to the last True of ``(B, M)`` bool."""
    places = torch.arange(1, present.shape[1] + 1, device=present.device)
    return (present * places).amax(dim=1) if present.shape[1] else present.new_zeros(len(present), dtype=torch.int64)
