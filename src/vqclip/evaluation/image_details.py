"""Details that every task on images has: described images, their codes, and accuracy against bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vqclip.errors import StopRequested
from vqclip.evaluation.bits import FiguresOf, accuracy_by_bits
from vqclip.evaluation.code_maps import SomeCodes, gather_codes, show_codes, spread
from vqclip.evaluation.details import Bits, Codes, Details, DetailsConfig, Reconstruction, ShownImage
from vqclip.evaluation.encode import Encoder
from vqclip.evaluation.images import EncodedImages
from vqclip.evaluation.reconstructions import pixel_transform, show_reconstructions
from vqclip.evaluation.thumbnails import ImageReader
from vqclip.tokenizer import ImageTokenizer

logger = logging.getLogger(__name__)


class ImageDetails:
    """Maker of the details of n encoded images, on rank 0.

    Args:
        encoder: encoder that has encoded the images, with details.
        tokenizer: the tokenizer of the images, in evaluation mode.
        images: the images.
        texts: ``n`` texts, the first caption or the class of each image.
        codes: ids of `rows_with_codes`; None without codes.
    """

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: ImageTokenizer,
        images: EncodedImages[Any],
        texts: Sequence[str],
        codes: SomeCodes | None,
    ):
        assert encoder.details is not None
        self.config, self._precision = encoder.details, encoder.precision
        self._tokenizer, self._images, self._texts, self._codes = tokenizer, images, texts, codes
        self._reader = ImageReader(images.source, tokenizer.transform, self.config.thumbnail)

    def image(self, row: int) -> ShownImage:
        """Describe the image of a row."""
        return self._reader.describe(int(self._images.indices[row]), self._texts[row])

    def codes(self) -> Codes | None:
        """Return code maps and galleries; None without codes."""
        rows = spread(len(self._texts), _looked_at(self.config))
        if self._codes is None or not rows:
            return None
        args = self.config, self._reader, self._images.indices, self.image
        return show_codes(self._tokenizer, self._codes, rows, *args)

    def bits(self, figures: FiguresOf) -> Bits | None:
        """Return the accuracy against bits; None without codes, and if they cannot be split."""
        if self._codes is None:
            return None
        rows = spread(len(self._texts), self.config.bits_images)
        whole = self._images.encoded.embeddings["codes_only"][rows]
        return accuracy_by_bits(self._tokenizer, self._codes, rows, whole, figures, self._precision)

    def reconstructions(self) -> tuple[Reconstruction, ...]:
        """Return images beside what their ids decode to; empty without codes or a pixel decoder."""
        tokenizer, rows = self._tokenizer, spread(len(self._texts), self.config.reconstructions)
        if self._codes is None or tokenizer.pixels is None or not rows:
            return ()
        images, ids = [self.image(row) for row in rows], self._codes.of(rows)
        if tokenizer.pixels.detail is not None:  # the stored ids are the tokenizer's own
            seen = [self._reader.pixels(image.index) for image in images]
            blank = torch.zeros(3, *[tokenizer.tower.image_size] * 2, dtype=torch.uint8)
            shown = torch.stack([blank if each is None else each for each in seen])
            ids = torch.cat((ids, tokenizer.encode_detail(shown).cpu()), dim=-1)
        reader = ImageReader(self._images.source, pixel_transform(tokenizer), self.config.thumbnail)
        return tuple(show_reconstructions(tokenizer, ids, images, reader))


def make_details(
    tokenizer: ImageTokenizer,
    encoder: Encoder,
    images: EncodedImages[Any],
    texts: Callable[[], Sequence[str]],
    make: Callable[[ImageDetails], Details],
) -> Details | None:
    """Return the details of a task on rank 0, if the encoder makes them; every rank must call this.

    If they cannot be made, the log says why: an evaluation is worth more than its report.

    Args:
        tokenizer: the tokenizer of the images, in evaluation mode.
        encoder: encoder of the task.
        images: the images.
        texts: function that returns the texts of `ImageDetails`.
        make: function that fills the details in; it must not contain a collective.
    """
    config, codes = encoder.details, None
    if config is None:
        return None
    count = len(images.annotations)
    if images.encoded.file is not None and count:
        codes = gather_codes(images.encoded, _rows_with_codes(count, config), tokenizer, encoder.partition)
    with encoder.partition.raise_on_all_ranks():
        if encoder.partition.rank:
            return None
        try:
            return make(ImageDetails(encoder, tokenizer, images, texts(), codes))
        except StopRequested:
            raise
        except Exception as error:  # of any kind, also a device that runs out of memory
            told = f"{type(error).__name__}: {error}"
            logger.warning("evaluation: no details for the report, the figures are not affected: %s", told)
            return None


def _looked_at(config: DetailsConfig) -> int:
    """Return the number of images for code maps and galleries."""
    return max(config.code_maps, config.gallery_images if config.gallery_codes else 0)


def _rows_with_codes(count: int, config: DetailsConfig) -> list[int]:
    """Return the rows of n images whose codes are needed."""
    return [
        row for some in (_looked_at(config), config.bits_images, config.reconstructions) for row in spread(count, some)
    ]
