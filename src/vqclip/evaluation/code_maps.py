"""Codes on images: maps of the ids of single images, and patches of several images that share a code.

Shapes: m images, N tokens, C codebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vqclip.evaluation.codes import load_ids
from vqclip.evaluation.details import MAX_CODEBOOKS, Codebook, CodeMap, Codes, DetailsConfig, Gallery, ShownImage
from vqclip.evaluation.encode import Encoded
from vqclip.evaluation.partition import RankPartition
from vqclip.evaluation.thumbnails import ImageReader, patch
from vqclip.quantizers import Quantizer
from vqclip.tokenizer import ImageTokenizer


class SomeCodes(NamedTuple):
    """Ids of some images of a set."""

    rows: list[int]
    """Their rows in the set, ascending."""
    ids: Tensor
    """``(m, N, C)`` int64, -1 where absent."""

    def of(self, rows: Sequence[int]) -> Tensor:
        """Return the ids of some of the rows."""
        places = {row: place for place, row in enumerate(self.rows)}
        return self.ids[[places[row] for row in rows]]


def spread(count: int, some: int) -> list[int]:
    """Return at most ``some`` of ``count`` rows, evenly spread."""
    some = min(count, some)
    return [number * count // some for number in range(some)]


def gather_codes(
    encoded: Encoded, rows: Sequence[int], tokenizer: ImageTokenizer, partition: RankPartition
) -> SomeCodes:
    """Gather the stored ids of some rows of a set; every rank must call this with the same rows.

    Args:
        encoded: the set, with codes.
        rows: rows of `Encoded.embeddings`.
        tokenizer: the tokenizer that made the ids.
        partition: the ranks.
    """
    chosen = torch.tensor(sorted(set(rows)), dtype=torch.int64)
    with partition.raise_on_all_ranks():
        assert encoded.file is not None
        assert encoded.rows is not None
        mine = torch.isin(encoded.rows, chosen)
        ids = load_ids(encoded.file, tokenizer.codebook_sizes)[mine].to(tokenizer.device, torch.int64)
        places = encoded.rows[mine].to(tokenizer.device)
    order = partition.gather(places).argsort()
    return SomeCodes(chosen.tolist(), partition.gather(ids)[order].cpu())


def codebook_names(quantizer: Quantizer) -> list[str]:
    """Return the name of each codebook, such as ``stage 2`` or ``stage 1, codebook 3``."""
    whole = quantizer.extent
    return [
        ", ".join(
            f"{word} {number + 1}"
            for word, number, most in zip(("stage", "codebook"), place, whole, strict=True)
            if most > 1 or (word == "codebook" and max(whole) == 1)
        )
        for place in quantizer.places
    ]


def show_codes(
    tokenizer: ImageTokenizer,
    codes: SomeCodes,
    rows: Sequence[int],
    config: DetailsConfig,
    reader: ImageReader,
    indices: Tensor,
    image: Callable[[int], ShownImage],
) -> Codes:
    """Return code maps and galleries.

    Args:
        tokenizer: the tokenizer of the images.
        codes: contains the ids of ``rows``.
        rows: rows to look at.
        config: numbers of maps and patches.
        reader: reader of the set.
        indices: number of each row in the source.
        image: function of a row.
    """
    names, sizes = codebook_names(tokenizer.quantizer), tokenizer.codebook_sizes
    grid = token_grid(tokenizer)
    maps = [rows[place] for place in spread(len(rows), config.code_maps)]
    galleries: list[Gallery] = []
    if grid is not None and config.gallery_codes:
        ids = codes.of(rows)
        for codebook in range(min(len(names), config.gallery_codebooks)):
            for code, count, places in shared_codes(ids[..., codebook], config.gallery_codes, config.gallery_patches):
                cut = [_cut(reader.pixels(int(indices[rows[row]])), grid, token) for row, token in places]
                patches = [patch(each, config.thumbnail) for each in cut if each is not None]
                kept = tuple(each for each in patches if each is not None)
                galleries.append(Gallery(codebook=codebook, code=code, images=count, patches=kept))
    return Codes(
        codebooks=tuple(
            Codebook(name=name, size=size) for name, size in list(zip(names, sizes, strict=True))[:MAX_CODEBOOKS]
        ),
        all_codebooks=len(names),
        grid=grid,
        maps=tuple(
            CodeMap(image=image(row), ids=tuple(map(tuple, ids[:, :MAX_CODEBOOKS].tolist())))
            for row, ids in zip(maps, codes.of(maps), strict=True)
        ),
        looked_at=len(rows),
        galleries=tuple(galleries),
    )


def token_grid(tokenizer: ImageTokenizer) -> tuple[int, int] | None:
    """Return rows and columns of an image's tokens; None if they were reduced and have no place in the image.

    A tower sees square images, and its tokens are patches in the order of reading.
    """
    side = round(tokenizer.num_tokens**0.5)
    return (side, side) if tokenizer.reduce is None and side * side == tokenizer.num_tokens else None


class SharedCode(NamedTuple):
    """A code of one codebook, and where it occurs."""

    code: int
    images: int
    """Number of images that contain it."""
    places: list[tuple[int, int]]
    """Place of an image among those that were looked at, and of the first token with the code in it."""


def shared_codes(ids: Tensor, some: int, patches: int) -> list[SharedCode]:
    """Return the codes of one codebook that occur in the most images, at least two; of equal ones the most used.

    Args:
        ids: ``(m, N)`` int64, -1 where absent.
        some: number of codes.
        patches: number of places of each.
    """
    codes, which = ids.unique(return_inverse=True)
    contains = torch.zeros(len(ids), len(codes), dtype=torch.bool).scatter_(1, which, True)
    images, uses = contains.sum(0), which.flatten().bincount(minlength=len(codes))
    order = (images * (1 + ids.numel()) + uses).argsort(stable=True, descending=True)
    order = order[(codes[order] >= 0) & (images[order] > 1)][:some]
    found = []
    for code in order.tolist():
        rows = contains[:, code].nonzero()[:patches, 0]
        tokens = (which[rows] == code).to(torch.uint8).argmax(dim=1)  # the first of several
        places = list(zip(rows.tolist(), tokens.tolist(), strict=True))
        found.append(SharedCode(int(codes[code]), int(images[code]), places))
    return found


def _cut(pixels: Tensor | None, grid: tuple[int, int], token: int) -> Tensor | None:
    """Return the pixels of a token, ``(3, h, w)``."""
    if pixels is None:
        return None
    (rows, columns), (height, width) = grid, pixels.shape[1:]
    row, column = divmod(token, columns)
    return pixels[
        :,
        row * height // rows : max(row * height // rows + 1, (row + 1) * height // rows),
        column * width // columns : max(column * width // columns + 1, (column + 1) * width // columns),
    ]
