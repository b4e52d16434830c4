"""Reconstructions for a page: images beside what their ids decode to, from the fewest bits to all.

Shapes: B images in a batch, n in all, m shown, N tokens, C codebooks, Cd detail
codebooks, S pixels on each side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vqclip.data import EvalBatch, EvalSet, RawSample, Source
from vqclip.data.draws import hash_integers, permute
from vqclip.data.transforms import EvalTransform
from vqclip.errors import ConfigError, DataError
from vqclip.evaluation.details import (
    DIFFERENCE_GAIN,
    DecodedImage,
    ImageReader,
    Reconstruction,
    ShownImage,
    exact_thumbnail,
)
from vqclip.pixels.codecs import best_within, compress
from vqclip.pixels.metrics import compare_images, mean_figures, to_uint8
from vqclip.quantizers import Prefix
from vqclip.seeds import derive_seed
from vqclip.tokenizer import ImageTokenizer

ALL_IDS = "all ids"
"""Label of all ids where they have no shorter prefix."""


class DecodedPrefix(NamedTuple):
    """A prefix of the ids that is decoded to pixels."""

    label: str
    bits: float
    """Bits an image."""
    prefix: Prefix
    """Prefix of the tokenizer's own ids."""
    detail: int | None
    """Number of detail stages; None for a decoder without detail codebooks."""

    def decode(self, tokenizer: ImageTokenizer, ids: Tensor) -> Tensor:
        """Decode the prefix of ids ``(B, N, C + Cd)`` to images ``(B, 3, S, S)`` uint8 on the CPU.

        Raises:
            NonFiniteError: a pixel is NaN or infinite.
        """
        ids = ids.to(tokenizer.device)
        pixels = tokenizer.decode_pixels(ids, self.prefix.stages, self.prefix.codebooks, self.detail)
        return to_uint8(pixels).cpu()


def decoded_prefixes(tokenizer: ImageTokenizer) -> list[DecodedPrefix]:
    """Return the prefixes by stages, then those by codebooks, all ids, and with them the first detail stages."""
    assert tokenizer.pixels is not None
    extent, detail = tokenizer.quantizer.extent, tokenizer.pixels.detail
    none = None if detail is None else 0
    found = [
        DecodedPrefix(prefix_label(each, extent) or ALL_IDS, prefix_bits(tokenizer, each), each, none)
        for each in extent.shorter()
    ]
    if detail is None or not found:
        return found
    for stages, _ in Prefix(detail.stages, 1).shorter():
        sizes = detail.codebook_sizes[: stages * len(detail.codebook_sizes) // detail.stages]
        bits = tokenizer.num_tokens * math.fsum(map(math.log2, sizes))
        label = f"{ALL_IDS}, {stages} of {detail.stages} detail stages"
        found.append(DecodedPrefix(label, tokenizer.bits_per_sample + bits, extent, stages))
    return found


def prefix_bits(tokenizer: ImageTokenizer, prefix: Prefix) -> float:
    """Return the bits of a prefix of an image's ids."""
    columns = tokenizer.quantizer.columns(*prefix)
    return tokenizer.num_tokens * math.fsum(math.log2(tokenizer.codebook_sizes[column]) for column in columns)


def prefix_label(prefix: Prefix, whole: Prefix) -> str:
    """Return a name such as ``2 of 4 stages``; empty for one stage of one codebook."""
    words = zip(("stages", "codebooks"), prefix, whole, strict=True)
    return ", ".join(f"{number} of {most} {word}" for word, number, most in words if most > 1)


def pixel_transform(tokenizer: ImageTokenizer) -> EvalTransform:
    """Return the transform of the originals: that of the tokenizer, at the size of the decoded images."""
    assert tokenizer.pixels is not None
    return tokenizer.config.preprocess.build(tokenizer.pixels.image_size)


def show_reconstructions(
    tokenizer: ImageTokenizer, ids: Tensor, images: Sequence[ShownImage], reader: ImageReader, *, large: bool = False
) -> Iterator[Reconstruction]:
    """Describe images beside what the prefixes of their ids decode to; those that cannot be read again are left out.

    Args:
        tokenizer: with a pixel decoder, in evaluation mode.
        ids: ``(m, N, C)`` of any integer type, or with detail ids ``(m, N, C + Cd)``.
        images: m images of the set of ``reader``, described.
        reader: reader with `pixel_transform`; its thumbnails are at most as large as the images.
        large: whether to make images of the differences, and to compare with WebP at the bytes of all ids.
    """
    prefixes = decoded_prefixes(tokenizer)
    for image, one in zip(images, ids, strict=True):
        original = reader.pixels(image.index)
        if original is None:  # the file has changed since
            continue
        decoded = [(each.label, each.bits, each.decode(tokenizer, one[None])[0]) for each in prefixes]
        if large:
            budget = int(prefixes[-1].bits // 8)
            file = best_within(compress(original, "webp", budget), original, budget)  # else the smallest one
            label = "WebP" if file.bytes <= budget else "WebP, smallest file"
            decoded.append((label, 8.0 * file.bytes, file.pixels))
        described = []
        for label, bits, pixels in decoded:
            errors = (pixels.float() - original.float()).abs().mean(dim=0, keepdim=True)  # of the channels
            grey = (errors * DIFFERENCE_GAIN).clamp(0, 255).round().to(torch.uint8).expand(3, -1, -1)
            figures = compare_images(pixels[None], original[None])
            described.append(
                DecodedImage(
                    label=label,
                    bits=bits,
                    figures={name: float(value) for name, value in figures.items()},
                    image=exact_thumbnail(pixels, reader.side),
                    difference=exact_thumbnail(grey, reader.side) if large else None,
                )
            )
        shown = image.model_copy(update={"thumbnail": exact_thumbnail(original, reader.side)})
        yield Reconstruction(image=shown, decoded=tuple(described))


class DrawnSource:
    """Samples of a source that a seed draws, in the order of the source.

    Args:
        source: the source.
        count: number of samples; all of a smaller source.
        seed: seed of the draw.
    """

    def __init__(self, source: Source, count: int, seed: int):
        self._source = source
        self.classnames, self.templates, self.notes = source.classnames, source.templates, source.notes
        size, key = len(source), hash_integers(derive_seed(seed, "reconstruct"))
        self.indices: list[int] = sorted(permute(np.arange(min(count, size)), size, key).tolist()) if size else []
        """Their numbers in the source."""

    def __len__(self) -> int:
        """Return the number of drawn samples."""
        return len(self.indices)

    def read(self, index: int) -> RawSample:
        """Read one sample; see `Source.read`."""
        return self._source.read(self.indices[index])

    def name(self, index: int) -> str:
        """Return shard and sample; see `Source.name`."""
        return self._source.name(self.indices[index])

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the source, and the numbers of the samples."""
        return {"source": self._source.fingerprint, "indices": self.indices}


class Reconstructions(NamedTuple):
    """Reconstructions of n images."""

    images: int
    """n."""
    bad: int
    """Number of images that cannot be used and are left out."""
    decodings: list[tuple[str, float, dict[str, float]]]
    """Label, bits and `mean_figures` of each prefix, from few bits to all."""
    groups: list[tuple[str, list[Reconstruction]]]
    """Titles with images."""


def reconstruct(tokenizer: ImageTokenizer, source: Source, shown: int, side: int, **reading: Any) -> Reconstructions:
    """Decode every prefix of the ids of images; show the worst, median and best images by the PSNR of all ids.

    Args:
        tokenizer: with a pixel decoder, in evaluation mode.
        source: the images.
        shown: number of images of each group.
        side: largest side of an image that is shown, in pixels.
        **reading: ``batch_size``, ``workers`` and ``max_bad_fraction`` of `EvalSet`.

    Raises:
        ConfigError: the tokenizer has no codes.
        DataError: no image can be used, or too many cannot.
        NonFiniteError: a decoded pixel is NaN or infinite.
    """
    prefixes, bad, texts = decoded_prefixes(tokenizer), 0, dict[int, str]()
    if not prefixes:
        raise ConfigError("reconstruct: the image quantizer has no codes (Identity); expected one with a codebook")
    ids, figures = list[Tensor](), [list[dict[str, Tensor]]() for _ in prefixes]
    seen, transform = EvalSet(source, tokenizer.transform, **reading), pixel_transform(tokenizer)
    is_same = transform.image_size == tokenizer.tower.image_size
    decoded_size: Iterable[EvalBatch | None] = (
        itertools.repeat(None) if is_same else EvalSet(source, transform, **reading)
    )
    for batch, other in zip(seen, decoded_size, strict=False):
        bad += len(batch.bad)
        if len(batch):
            ids.append(tokenizer.encode_pixels(batch.images).to("cpu", torch.int32))
            names = [source.classnames[label] for label in batch.labels.tolist()] if source.classnames else []
            each_text = names or [captions[0] for captions in batch.captions]
            texts |= zip(batch.sample_ids.tolist(), each_text, strict=True)
            originals = batch.images if other is None else other.images
            for prefix, found in zip(prefixes, figures, strict=True):
                found.append(compare_images(prefix.decode(tokenizer, ids[-1]), originals))
    if not texts:
        raise DataError(f"none of the {len(source)} images can be used; expected at least one")
    every, places = torch.cat(ids), list(texts)
    values = [{name: torch.cat([each[name] for each in found]) for name in found[0]} for found in figures]
    reader = ImageReader(source, pixel_transform(tokenizer), side)
    groups = []
    for title, rows in choose_images(values[-1]["psnr"], shown).items():
        images = [reader.describe(places[row], texts[places[row]]) for row in rows]
        groups.append((title, [*show_reconstructions(tokenizer, every[rows], images, reader, large=True)]))
    means = [(each.label, each.bits, mean_figures(found)) for each, found in zip(prefixes, values, strict=True)]
    return Reconstructions(len(texts), bad, means, groups)


def choose_images(psnr: Tensor, some: int) -> dict[str, list[int]]:
    """Return rows of the worst, median and best images of ``psnr`` ``(n,)``; one group of all if there are few."""
    order = psnr.argsort(stable=True).tolist()
    if len(order) <= 3 * some:
        return {"All images, worst first": order}
    middle = (len(order) - some) // 2
    return {"Worst": order[:some], "Median": order[middle : middle + some], "Best": order[: -some - 1 : -1]}
