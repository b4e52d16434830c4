"""Results of a search with the images that the index was built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vqclip.data.decode import MAX_PIXELS
from vqclip.data.prepare import ImageSource, open_images
from vqclip.data.samples import read_decoded
from vqclip.errors import CheckpointError, DataError, StorageError
from vqclip.search.index import CodeIndex
from vqclip.search.scan import SearchResult

__all__ = ["Hit", "find_hits", "open_indexed"]


@dataclass(frozen=True)
class Hit:
    """One result."""

    name: str
    """Name of the item."""
    score: float
    """Cosine."""
    picture: Tensor | None = None
    """``(3, H, W)`` uint8, or None if it cannot be shown; the page then shows the name alone."""


def open_indexed(index: CodeIndex, images: str) -> ImageSource:
    """Open the images that an index was built from.

    The path is given by the user: one in an index from somebody else could name any local folder.

    Args:
        index: the index.
        images: argument of `vqclip.data.prepare.open_images`.

    Raises:
        CheckpointError: the index names an image that the source does not have.
        ConfigError, DataError: there are no images, or not those that the index was built from.
    """
    source = open_images(images, index.origin.split)
    if source.fingerprint != index.origin.fingerprint:
        raise DataError(
            f"{images}: the index was built from other data, or by an older version; expected the same images, or a "
            "rebuilt index"
        )
    last = len(index) - 1 if index.places is None else int(index.places.max()) if len(index) else -1
    if last >= len(source):
        raise CheckpointError(
            f"index: places: got {last}, expected less than {len(source)}, the images of {images}; rebuild the index"
        )
    return source


def find_hits(
    index: CodeIndex, found: SearchResult, source: ImageSource | None, report_bad: Callable[[DataError], None]
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
    pictures: dict[int, Tensor | None] = dict.fromkeys(places)  # captions may share an image
    for place in pictures:
        if source is None:
            break
        try:
            pictures[place] = read_decoded(source, place, MAX_PIXELS)[1]
        except StorageError:
            raise  # the storage failed, not the image
        except DataError as error:
            report_bad(error)
    rows = zip(scores, items, places, strict=True)
    return [Hit(index.names[item], score, pictures[place]) for score, item, place in rows]
