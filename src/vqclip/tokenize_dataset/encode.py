"""Encode the batches of a shard to the records of its token shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from vqclip.data.tokens import TokenRecord
from vqclip.data.tokens.layout import strip_padding
from vqclip.nn.precision import Precision
from vqclip.tokenize_dataset.batches import DecodedBatch, DecodedSample
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.towers import CaptionLengths

__all__ = ["EncodedShard", "Encoders"]


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
        self.lengths = CaptionLengths()
        """Lengths of the captions encoded so far."""
        self._batch_size = batch_size
        self._precision = precision
        for tokenizer in (image, text):
            if tokenizer is not None and precision == "fp64":
                tokenizer.double()

    def encode_images(self, batch: DecodedBatch) -> list[np.ndarray] | None:
        """Return the ids of the usable samples of a batch, ``(N, C)`` each; None without an image tokenizer."""
        if self.image is None or batch.images is None:
            return None
        ids = self._ids(self.image, batch.images)
        return [strip_padding(ids[sample.row], self.image.codebook_sizes) for sample in batch.found]

    def encode_captions(self, captions: Iterable[str]) -> dict[str, np.ndarray]:
        """Return the ids ``(n, C)`` of each distinct caption, in batches that are padded with empty captions."""
        assert self.text is not None
        counts = Counter(captions)
        different = list(counts)
        known: dict[str, np.ndarray] = {}
        for start in range(0, len(different), self._batch_size):
            some = different[start : start + self._batch_size]
            tokens, lengths = self.text.preprocess.with_lengths([*some, *[""] * (self._batch_size - len(some))])
            for caption, length in zip(some, lengths, strict=False):
                self.lengths[length] += counts[caption]
            for caption, ids in zip(some, self._ids(self.text, tokens), strict=False):
                known[caption] = strip_padding(ids, self.text.codebook_sizes)
        return known

    @torch.inference_mode()
    def _ids(self, tokenizer: ImageTokenizer | TextTokenizer, inputs: Tensor) -> np.ndarray:
        """Return ids ``(B, N, C)`` int64."""
        return tokenizer.encode(inputs, self._precision).cpu().numpy()


class EncodedShard:
    """Encoded samples of one shard."""

    def __init__(self, encoders: Encoders):
        self._encoders = encoders
        self._samples: list[tuple[DecodedSample, np.ndarray | None]] = []
        self.bad: list[dict[str, str | int]] = []
        """Samples that are left out."""

    def add(self, batch: DecodedBatch) -> None:
        """Encode the images of a batch."""
        images = self._encoders.encode_images(batch)
        self._samples += [(each, None if images is None else images[n]) for n, each in enumerate(batch.found)]
        self.bad += [
            {"sample_id": bad.sample_id, "key": key, "kind": bad.kind, "reason": bad.reason} for key, bad in batch.bad
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def records(self) -> Iterator[TokenRecord]:
        """Yield the samples in order. Captions are encoded now, each distinct one once."""
        texts: dict[str, np.ndarray] | None = None
        if self._encoders.text is not None:
            texts = self._encoders.encode_captions(
                caption for sample, _ in self._samples for caption in sample.captions
            )
        for sample, image in self._samples:
            ids = None if texts is None else tuple(texts[caption] for caption in sample.captions)
            yield TokenRecord(sample.key, sample.sample_id, sample.label, sample.captions, image, ids)
