"""Samples of a shard to ids: batches of one shape are read and decoded in workers, and encoded in order.

A batch contains samples of one shard, and is padded to ``batch_size`` rows. So each batch, and with it every id, is a
function of the shard, the tokenizer and the batch size, and not of the process that encodes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vqclip.data import RawSample, ShardedSource
from vqclip.data.in_order import read_in_order
from vqclip.data.samples import read_decoded
from vqclip.data.tokens.shards import TokenRecord, strip_padding
from vqclip.nn.precision import Precision
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.towers import CaptionLengths


class DecodedBatch(NamedTuple):
    """Samples of one shard, ready to be encoded."""

    ids: Sequence[int]
    """Numbers of the samples, usable or not, in the whole data set; the first one is row 0."""
    images: Tensor | None
    """``(B, 3, S, S)`` uint8, always with all B rows: black without a sample; None without usable or wanted images."""
    found: tuple[TokenRecord, ...]
    """The usable samples, without ids."""
    bad: tuple[dict[str, Any], ...]
    """The unusable samples, with the keys of `vqclip.data.work_folder.BadRecord`."""


class BatchReader:
    """Reads batches of one shard, by the ids of their samples; workers get a copy of it.

    Args:
        source: source of the samples.
        first: number of the source's first sample in the whole data set.
        batch_size: B.
        transform: ``(3, H, W)`` uint8 → ``(3, S, S)`` uint8; None if no images are wanted.
        max_pixels: larger images are bad samples.
    """

    def __init__(
        self,
        source: ShardedSource,
        first: int,
        batch_size: int,
        transform: Callable[[Tensor], Tensor] | None,
        max_pixels: int,
    ):
        self._source, self._first, self._batch_size = source, first, batch_size
        self._transform, self._max_pixels = transform, max_pixels

    def __call__(self, ids: Sequence[int]) -> DecodedBatch:
        """Return the batch of some consecutive samples, at most B.

        Raises:
            StorageError: the shard cannot be fetched.
        """
        read, images = read_in_order(self._read, ids), None
        for sample_id, (_, image) in read.found.items():
            if image is not None:
                images = image.new_zeros(self._batch_size, *image.shape) if images is None else images
                images[sample_id - ids[0]] = image
        keys = {sample_id: self._source.key(sample_id - self._first) for sample_id in ids}
        found = tuple(
            TokenRecord(keys[sample_id], sample_id, sample.label, sample.captions, image=None, texts=None)
            for sample_id, (sample, _) in read.found.items()
        )
        bad = tuple(
            {"sample_id": each.sample_id, "key": keys[each.sample_id], "kind": each.kind, "reason": each.reason}
            for each in read.bad
        )
        return DecodedBatch(ids, images, found, bad)

    def _read(self, sample_id: int) -> tuple[RawSample, Tensor | None]:
        """Return a sample, and its transformed image if images are wanted."""
        index = sample_id - self._first
        if self._transform is None:
            return self._source.read(index), None
        sample, image = read_decoded(self._source, index, self._max_pixels)
        return sample, self._transform(image)


class Encoders:
    """The tokenizers, always called with ``batch_size`` rows.

    Args:
        image: the image tokenizer, or None.
        text: the text tokenizer, or None.
        batch_size: B.
        precision: fp32: in the dtype of the weights. bf16 and fp16: under autocast. fp64: everything in float64; the
            tokenizers are converted.
    """

    def __init__(self, image: ImageTokenizer | None, text: TextTokenizer | None, batch_size: int, precision: Precision):
        self.image, self.text = image, text
        self._batch_size = batch_size
        self._precision = precision
        for tokenizer in (image, text):
            if tokenizer is not None and precision == "fp64":
                tokenizer.double()

    def encode_images(self, batch: DecodedBatch) -> Sequence[TokenRecord]:
        """Return the usable samples of a batch with the ids of their images, without an image tokenizer as they are."""
        if self.image is None or batch.images is None:
            return batch.found
        ids, sizes = self._ids(self.image, batch.images), self.image.codebook_sizes
        return [each._replace(image=strip_padding(ids[each.sample_id - batch.ids[0]], sizes)) for each in batch.found]

    def encode_captions(
        self, records: Sequence[TokenRecord], between: Callable[[], object]
    ) -> tuple[Sequence[TokenRecord], CaptionLengths]:
        """Encode each distinct caption once, in batches that are padded with empty captions.

        Args:
            records: samples with their captions.
            between: is called after each batch.

        Returns:
            The samples with the ids of their captions, and the lengths of all captions in tokens; without a text
            tokenizer the samples as they are, and no lengths.
        """
        lengths = CaptionLengths()
        if self.text is None:
            return records, lengths
        counts = Counter(caption for record in records for caption in record.captions)
        different = list(counts)
        known: dict[str, np.ndarray] = {}
        for start in range(0, len(different), self._batch_size):
            some = different[start : start + self._batch_size]
            tokens, sizes = self.text.preprocess.with_lengths([*some, *[""] * (self._batch_size - len(some))])
            for caption, size, ids in zip(some, sizes, self._ids(self.text, tokens), strict=False):
                lengths[size] += counts[caption]
                known[caption] = strip_padding(ids, self.text.codebook_sizes)
            between()
        return [each._replace(texts=tuple(known[caption] for caption in each.captions)) for each in records], lengths

    @torch.inference_mode()
    def _ids(self, tokenizer: ImageTokenizer | TextTokenizer, inputs: Tensor) -> np.ndarray:
        """Return ids ``(B, N, C)`` int64."""
        return tokenizer.encode(inputs, self._precision).cpu().numpy()
