"""Reconstructions: image files for other programs, and a page of images beside what their ids decode to.

Shapes: B images in a batch, n in all, m shown, N tokens, C codebooks, Cd detail
codebooks, S pixels on each side.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from functools import partial
from os.path import getmtime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision.transforms.v2.functional as F
from PIL.Image import Resampling
from torch import Tensor
from torchvision.transforms import InterpolationMode
from tqdm import tqdm

from vqclip import dist
from vqclip.data import EvalBatch, EvalSet, Source
from vqclip.data.batch import allowed_bad, require_few_bad
from vqclip.data.decode import IMAGE_ENDINGS, decode_image
from vqclip.data.sources.base import read_image
from vqclip.data.transforms import EvalTransform
from vqclip.errors import ConfigError, DataError
from vqclip.evaluation.details import DIFFERENCE_GAIN, Card, ImageReader, Item, Section, clip_text, exact_thumbnail
from vqclip.evaluation.encode import RankPartition
from vqclip.io.atomic import TEMPORARY, remove_leftovers, write_file, write_text
from vqclip.io.files import walk_files
from vqclip.pixels.codecs import best_within, compress
from vqclip.pixels.metrics import compare_images, mean_figures, to_uint8
from vqclip.process import progress
from vqclip.quantizers import Prefix
from vqclip.tokenizer import ImageTokenizer
from vqclip.tokenizer.stored import fingerprint, pixels_fingerprint

BEGUN_FILE = ".vqclip-reconstruct.json"
"""Hidden file of a folder of reconstructions, with the tokenizer and the images that they are of."""


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
    """Return the prefixes by stages, then those by codebooks, all ids, and with them the first detail stages.

    Of a decoder that reads first stages alone, these are all that there are.
    """
    decoder, whole = tokenizer.require_pixels(), tokenizer.quantizer.extent
    detail, extent = decoder.detail, whole._replace(stages=decoder.stages or whole.stages)
    none, ending = (None, "") if detail is None else (0, ", no detail")
    found = [
        DecodedPrefix((prefix_label(each, whole) or "all ids") + ending, prefix_bits(tokenizer, each), each, none)
        for each in extent.shorter()
    ]
    if detail is None or not found:
        return found
    for stages, _ in Prefix(detail.stages, 1).shorter():
        sizes = detail.codebook_sizes[: stages * len(detail.codebook_sizes) // detail.stages]
        bits = tokenizer.num_tokens * math.fsum(map(math.log2, sizes))
        label = f"{stages} of {detail.stages} detail stages"
        found.append(DecodedPrefix(label, prefix_bits(tokenizer, extent) + bits, extent, stages))
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
    return tokenizer.config.preprocess.build(tokenizer.require_pixels().image_size)


def show_reconstruction(
    tokenizer: ImageTokenizer, ids: Tensor, reader: ImageReader, index: int, title: str, *, large: bool = False
) -> tuple[Card, list[tuple[float, float]]] | None:
    """Show an image beside what the prefixes of its ids decode to; None if it cannot be read again.

    Args:
        tokenizer: with a pixel decoder, in evaluation mode.
        ids: ``(N, C)`` of any integer type, or with detail ids ``(N, C + Cd)``.
        reader: reader with `pixel_transform`; its thumbnails are at most as large as the images.
        index: number of the image in the source.
        title: its caption or class.
        large: whether to show differences, too, and to compare with WebP at the bytes of all ids.

    Returns:
        The card, and bits and PSNR of each image on it that was made from ids or by WebP.
    """
    original = reader.pixels(index)
    if original is None:  # the file has changed since
        return None
    prefixes = decoded_prefixes(tokenizer)
    decoded = [(each.label, each.bits, each.decode(tokenizer, ids[None])[0]) for each in prefixes]
    if large:
        budget = int(prefixes[-1].bits // 8)
        file = best_within(compress(original, "webp", budget), original, budget)  # else the smallest one
        label = "WebP" if file.bytes <= budget else "WebP, smallest file"
        decoded.append((label, 8.0 * file.bytes, file.pixels))
    numbers = []
    items = [Item(image=exact_thumbnail(original, reader.side), name=reader.name(index), text="original")]
    for label, bits, pixels in decoded:
        figures = {name: float(value) for name, value in compare_images(pixels[None], original[None]).items()}
        numbers.append((bits, figures["psnr"]))
        told = f"{bits:,.0f} bits, {figures['psnr']:.1f} dB"
        told += f", SSIM {figures['ssim']:.2f}" if "ssim" in figures else ""
        items.append(Item(image=exact_thumbnail(pixels, reader.side), text=label, note=told))
        if large:
            errors = (pixels.float() - original.float()).abs().mean(dim=0, keepdim=True)  # of the channels
            grey = (errors * DIFFERENCE_GAIN).clamp(0, 255).round().to(torch.uint8).expand(3, -1, -1)
            items.append(Item(image=exact_thumbnail(grey, reader.side), note="difference"))
    return Card(title=clip_text(title), items=tuple(items)), numbers


class Reconstructions(NamedTuple):
    """Reconstructions of n images."""

    images: int
    """n."""
    bad: int
    """Number of images that cannot be used and are left out."""
    decodings: list[tuple[str, float, dict[str, float]]]
    """Label, bits and `mean_figures` of each prefix, from few bits to all."""
    groups: list[Section]
    """The images that are shown."""
    shown: list[list[tuple[float, float]]]
    """Bits and PSNR of what is beside each of them: of the prefixes, and of WebP last."""


def reconstruct(tokenizer: ImageTokenizer, source: Source, shown: int, side: int, **reading: Any) -> Reconstructions:
    """Decode every prefix of the ids of images; show the worst, median and best images by the PSNR of all ids.

    Args:
        tokenizer: with codes and a pixel decoder, in evaluation mode.
        source: the images.
        shown: number of images of each group.
        side: largest side of an image that is shown, in pixels.
        **reading: ``batch_size``, ``workers``, ``limit`` and ``max_bad_fraction`` of `EvalSet`.

    Raises:
        DataError: no image can be used, or too many cannot.
        NonFiniteError: a decoded pixel is NaN or infinite.
    """
    prefixes, bad, texts = decoded_prefixes(tokenizer), 0, dict[int, str]()
    ids, figures = list[Tensor](), [list[dict[str, Tensor]]() for _ in prefixes]
    seen, transform = EvalSet(source, tokenizer.transform, **reading), pixel_transform(tokenizer)
    is_same = transform.size == tokenizer.tower.image_size
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
    groups, numbers = list[Section](), list[list[tuple[float, float]]]()
    for title, rows in choose_images(values[-1]["psnr"], shown).items():
        found_images = [
            show_reconstruction(tokenizer, every[row], reader, places[row], texts[places[row]], large=True)
            for row in rows
        ]
        pairs = [each for each in found_images if each is not None]
        cards = tuple(card for card, _ in pairs)
        groups.append(Section(layout="decoded", title=f"{title} by the PSNR of all ids", cards=cards))
        numbers += [each for _, each in pairs]
    means = [(each.label, each.bits, mean_figures(found)) for each, found in zip(prefixes, values, strict=True)]
    return Reconstructions(len(texts), bad, means, groups, numbers)


def choose_images(psnr: Tensor, some: int) -> dict[str, list[int]]:
    """Return rows of the worst, median and best images of ``psnr`` ``(n,)``; one group of all if there are few."""
    order = psnr.argsort(stable=True).tolist()
    if len(order) <= 3 * some:
        return {"All images, worst first": order}
    middle = (len(order) - some) // 2
    return {"Worst": order[:some], "Median": order[middle : middle + some], "Best": order[: -some - 1 : -1]}


def write_reconstructions(
    tokenizer: ImageTokenizer, images: Path, out: Path, batch_size: int, bad_fraction: float
) -> tuple[int, int, int]:
    """Write what the ids of every image of a folder decode to, under its relative name and at its own size.

        whole image -> fitted into a white square -> ids -> square -> without the white, at its own size -> PNG

    Every file is a PNG without loss, whatever its name ends in, and is written whole or not at all; those that are
    there and not older than their original are not written again. All ranks must call this: rank r of W writes the
    images r, r + W, ... in the order of their names.

    Args:
        tokenizer: with codes and a pixel decoder, in evaluation mode.
        images: folder of images and subfolders; hidden ones are skipped.
        out: a new folder, or one that this function began with the same tokenizer and images.
        batch_size: images in a batch.
        bad_fraction: largest share of images that cannot be used and are left out.

    Returns:
        Number of images of all ranks that were written, that were there before, and that cannot be used.

    Raises:
        VqclipError: ``out`` has other content, one of the folders contains the other, there is no image, too many
            cannot be used, or a decoded pixel is NaN or infinite; raised on every rank.
    """
    names = dist.run_on_main(lambda: _begin_folder(tokenizer, images, out))  # so that all ranks have the same ones
    side = tokenizer.tower.image_size
    scale = tokenizer.require_pixels().image_size / side
    interpolation = InterpolationMode(tokenizer.config.preprocess.interpolation)
    partition, bad = RankPartition.create(True), list[str]()
    with partition.raise_on_all_ranks():
        mine = [names[index] for index in partition.indices(len(names))]
        found = {each for each in mine if (out / each).is_file() and getmtime(out / each) >= getmtime(images / each)}
        todo = [name for name in mine if name not in found]
        silent = None if dist.is_main() else True  # None: shown on a terminal alone
        for start in tqdm(range(0, len(todo), batch_size), "reconstruct", unit="batch", disable=silent):
            progress.heartbeat()
            squares, places = list[Tensor](), list[tuple[str, tuple[int, int], tuple[float, float, float, float]]]()
            for name in todo[start : start + batch_size]:
                try:
                    image = decode_image(read_image(images / name, name))
                except DataError as error:
                    bad.append(f"{name}: {str(error).removeprefix(f'{name}: ')}")
                    continue
                height, width = (max(1, round(side * each / max(image.shape[1:]))) for each in image.shape[1:])
                left, top = (side - width) // 2, (side - height) // 2
                right, bottom = left + width, top + height
                whole = F.resize(image, [height, width], interpolation, antialias=True)
                squares.append(F.pad(whole, [left, top, side - right, side - bottom], fill=255.0))
                box = (scale * left, scale * top, scale * right, scale * bottom)
                places.append((name, (image.shape[2], image.shape[1]), box))
            if squares:
                decoded = to_uint8(tokenizer.decode_pixels(tokenizer.encode_pixels(torch.stack(squares))))
                for (name, size, box), made in zip(places, tokenizer.to_pil(decoded), strict=True):
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    write_file(out / name, partial(made.resize(size, Resampling.BICUBIC, box).save, format="PNG"))
    reasons, there = partition.gather_items(bad), sum(partition.gather_items([len(found)]))
    require_few_bad(reasons, len(reasons), allowed_bad(bad_fraction, len(names)), "--bad-fraction")
    return len(names) - there - len(reasons), there, len(reasons)


def _begin_folder(tokenizer: ImageTokenizer, images: Path, out: Path) -> list[str]:
    """Begin the folder ``out``, or go on with it, and return the relative names of the images."""
    images, out = images.resolve(), out.resolve()
    if not images.is_dir():
        raise ConfigError(f"--images: got {images}, expected a folder of images")
    if out.is_relative_to(images) or images.is_relative_to(out):
        raise ConfigError(f"--out: got {out}, expected a folder beside {images}, whose images would be replaced")
    names = [name for name in walk_files(images) if name.lower().endswith(IMAGE_ENDINGS)]
    if not names:
        raise DataError(f"{images}: contains no image; expected files such as {', '.join(IMAGE_ENDINGS[:5])}")
    settings = {"images": str(images), "tokenizer": fingerprint(tokenizer), "pixels": pixels_fingerprint(tokenizer)}
    file, text = out / BEGUN_FILE, json.dumps(settings, indent=2) + "\n"
    if file.is_file():
        if (there := file.read_text(encoding="utf-8", errors="replace")) != text:
            raise ConfigError(f"--out: {out} was begun with other settings; expected a new folder:\n{there}{text}")
    elif out.exists() and not (out.is_dir() and all(each.name.startswith(TEMPORARY) for each in out.iterdir())):
        raise ConfigError(f"--out: {out} exists, and this command did not begin it; expected a new folder")
    else:
        out.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    for folder in {(out / name).parent for name in names} | {out}:
        remove_leftovers(folder)
    return names
