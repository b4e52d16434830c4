"""Read every sample of a source in workers, and note everything that a report needs of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from vqclip.data import Source
from vqclip.data.batch_maker import Tokenize
from vqclip.data.decode import MAX_PIXELS, DecodedImage, image_format, read_image
from vqclip.data.in_order import InOrderReader, ShardSlices
from vqclip.data.workers import explain_worker_deaths, ordered_map
from vqclip.errors import DataError
from vqclip.runlog.bar import ProgressBar

__all__ = ["CheckOptions", "ScannedSample", "scan"]

_BATCH = 16
_LONG_SIDE = 4.0
"""Largest ratio of the sides that is not remarkable."""
_BLACK = 8
"""Largest value of a black image; JPEG adds noise."""
_BITS = 14
"""Bits that a 16-bit image uses at least, unless it is remarkable."""
_PLACEHOLDERS = {"nan", "none", "null", "n/a", "na", "<na>", "#n/a", "nat", "undefined"}
"""Captions that programs write for a missing value, in lower case."""


@dataclass(frozen=True)
class CheckOptions:
    """Options of `vqclip data check`."""

    tokenize: Tokenize | None = None
    """Captions → tokens and lengths; None does not count tokens."""
    context_length: int | None = None
    """Tokens of a caption, marks included, after which it is cut; None: captions are not cut."""
    max_pixels: int = MAX_PIXELS
    """Larger images are bad samples."""
    min_side: int = 32
    """Images with a shorter side give a warning."""
    workers: int = 0
    """Processes that read and decode; 0: this one."""


@dataclass
class ScannedSample:
    """Properties of a sample."""

    index: int
    problem: tuple[str, str] | None = None
    """Kind and description of the problem of a bad sample."""
    remarks: list[tuple[str, str]] = field(default_factory=list)
    """Kinds and descriptions of unusual properties."""
    label: int = -1
    size: int = 0
    """Bytes of the image."""
    file_digest: bytes = b""
    """Digest of the image's bytes."""
    pixel_digest: bytes = b""
    """Digest of its decoded pixels; empty for a bad sample."""
    captions: list[bytes] = field(default_factory=list)
    """Digest of each caption."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each caption before it is cut."""


class _Scanner:
    """Scans samples of a source; runs in the workers.

    Args:
        source: the samples.
        options: the limits.
    """

    def __init__(self, source: Source, options: CheckOptions):
        self._source, self._options = source, options

    def __call__(self, index: int) -> ScannedSample:
        """Return the properties of a sample; of a bad one those that could be read.

        Raises:
            DataError: the sample cannot be read at all.
        """
        sample = self._source.read(index)
        found = ScannedSample(index, label=sample.label, size=len(sample.image), file_digest=_digest(sample.image))
        try:
            found.captions = [_digest(caption.encode()) for caption in sample.captions]
            if self._options.tokenize is not None:
                found.lengths = [*self._options.tokenize([*sample.captions])[1]]
            if not self._source.templates:
                found.remarks += [
                    ("placeholder as caption", f"{each!r} looks like a missing value")
                    for each in sample.captions
                    if each.strip().lower() in _PLACEHOLDERS
                ]
            image = read_image(sample.image, self._options.max_pixels)
            found.pixel_digest = _pixel_digest(image.pixels)
            found.remarks += self._remarks(image)
            if self._source.classnames and not 0 <= found.label < len(self._source.classnames):
                last = len(self._source.classnames) - 1
                raise DataError(f"class {found.label}; expected a class number, 0 to {last}", "class number")
        except UnicodeEncodeError as error:
            found.problem = "not UTF-8", f"caption with a lone surrogate at character {error.start}"
        except DataError as error:
            found.problem = error.kind, str(error)
            if error.kind == "damaged image" and _is_truncated(sample.image):
                found.problem = "truncated image", f"{error}; the file ends early"
        return found

    def _remarks(self, image: DecodedImage) -> Iterator[tuple[str, str]]:
        height, width = image.pixels.shape[1:]
        if min(height, width) < self._options.min_side:
            yield "small image", f"{width}x{height} pixels"
        if max(height, width) > _LONG_SIDE * min(height, width):
            yield "long image", f"{width}x{height} pixels"
        if image.mode in ("1", "L", "LA", "I") or image.mode.startswith("I;16"):
            yield "grey image", f"mode {image.mode}"
        if image.transparent:
            yield "transparent image", f"mode {image.mode}; it is composited on white"
        if image.orientation in range(2, 9):
            yield "EXIF orientation", f"orientation {image.orientation}; the image is rotated or flipped upright"
        if image.largest is not None and image.largest.bit_length() < _BITS:
            bits = image.largest.bit_length()
            yield "dark 16-bit image", f"values to {image.largest}, {bits} of 16 bits; scale them to 65535"
        if int(image.pixels.max()) < _BLACK:
            yield "black image", f"no value above {int(image.pixels.max())} of 255"
        elif bool((image.pixels == image.pixels[:, :1, :1]).all()):
            yield "image of one colour", f"{tuple(image.pixels[:, 0, 0].tolist())}"


def scan(source: Source, options: CheckOptions, name: str = "check") -> Iterator[ScannedSample]:
    """Yield every sample of a source in order, and show progress in a bar of this name.

    Raises:
        StorageError: the storage cannot be read, which says nothing of the samples.
    """
    reader = InOrderReader(_Scanner(source, options), ShardSlices([len(source)], [0], _BATCH))
    with explain_worker_deaths("check"), ProgressBar(len(source), 0, True, name, "sample") as bar:
        batches = ordered_map(reader, range(len(reader)), options.workers, timeout_s=240.0, section="check")
        for batch in batches:
            bad = {each.sample_id: (each.kind, each.reason) for each in batch.bad}
            for index in batch.ids:
                if index in batch.found:
                    yield batch.found[index]
                else:
                    kind, reason = bad[index]
                    yield ScannedSample(index, (kind, reason.removeprefix(f"{source.name(index)}: ")))
            bar.advance(len(batch.ids))
            bar.show()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _pixel_digest(image: Tensor) -> bytes:
    digest = hashlib.blake2b(str(tuple(image.shape)).encode(), digest_size=16)
    digest.update(image.contiguous().numpy().data)
    return digest.digest()


def _is_truncated(data: bytes) -> bool:
    """Return whether a damaged image lacks its end."""
    kind = image_format(data)
    if kind not in ("jpeg", "png", "webp"):
        return False
    if kind == "webp":
        return int.from_bytes(data[4:8], "little") + 8 > len(data)
    if kind == "png":
        return b"IEND" not in data
    return data.rfind(b"\xff\xd9") <= data.rfind(b"\xff\xda")  # the mark of the end, and that of the pixels
