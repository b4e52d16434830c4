"""Report what is bad, duplicated or unusual in a source.

read and decode every sample in the workers       # problem, remarks, digests of image, pixels and captions, lengths
bad samples: kind -> findings                     # they count for the tolerance
warnings:    kind -> findings                     # duplicates, cut captions, classes without images, overlap, ...
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vqclip.data import Source
from vqclip.data.batch_maker import Tokenize
from vqclip.data.decode import MAX_PIXELS, DecodedImage, image_format, read_image
from vqclip.data.in_order import read_in_order, slices_of
from vqclip.data.workers import explain_worker_deaths, ordered_map
from vqclip.errors import DataError, printable
from vqclip.io.files import format_bytes
from vqclip.runlog.bar import ProgressBar
from vqclip.towers import CaptionLengths

_BATCH = 16
_LONG_SIDE = 4.0
"""Largest ratio of the sides that is not remarkable."""
_BLACK = 8
"""Largest value of a black image; JPEG adds noise."""
_BITS = 14
"""Bits that a 16-bit image uses at least, unless it is remarkable."""
_PLACEHOLDERS = {"nan", "none", "null", "n/a", "na", "<na>", "#n/a", "nat", "undefined"}
"""Captions that programs write for a missing value, in lower case."""
_SHOWN = 160
"""Characters of a repeated caption that are shown."""


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


class Finding(NamedTuple):
    """A sample with a problem."""

    sample: str
    """File or shard, and sample."""
    detail: str


@dataclass
class CheckReport:
    """Result of a check."""

    samples: int
    """Samples of the source."""
    notes: tuple[str, ...] = ()
    """Remarks of the source on what is left out, grouped or ambiguous."""
    image_bytes: int = 0
    """Bytes of all images that could be read."""
    bad: dict[str, list[Finding]] = field(default_factory=dict)
    """Kind → samples that cannot be used."""
    warnings: dict[str, list[Finding]] = field(default_factory=dict)
    """Kind → samples, captions or classes that deserve a look."""
    captions: dict[str, Any] = field(default_factory=dict)
    """Number of captions, their lengths in tokens, and the share of those that are cut or repeated."""
    classes: dict[str, int] = field(default_factory=dict)
    """Class name → images."""

    @property
    def bad_samples(self) -> int:
        """Number of samples that cannot be used."""
        return sum(map(len, self.bad.values()))

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, with every name."""
        tree = dataclasses.asdict(self) | {"bad_samples": self.bad_samples}
        for section in ("bad", "warnings"):
            tree[section] = {kind: [each._asdict() for each in found] for kind, found in tree[section].items()}
        return tree


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


def scan(source: Source, options: CheckOptions, name: str = "check") -> Iterator[ScannedSample]:
    """Yield every sample of a source in order, and show progress in a bar of this name.

    Raises:
        StorageError: the storage cannot be read, which says nothing of the samples.
    """
    read, slices = partial(read_in_order, partial(_scan_sample, source, options)), slices_of(range(len(source)), _BATCH)
    with explain_worker_deaths("check"), ProgressBar(len(source), 0, True, name, "sample") as bar:
        for batch in ordered_map(read, slices, options.workers, timeout_s=240.0, section="check"):
            bad = {each.sample_id: (each.kind, each.reason) for each in batch.bad}
            for index in batch.ids:
                if index in batch.found:
                    yield batch.found[index]
                else:
                    kind, reason = bad[index]
                    yield ScannedSample(index, (kind, reason.removeprefix(f"{source.name(index)}: ")))
            bar.advance(len(batch.ids))
            bar.show()


def _scan_sample(source: Source, options: CheckOptions, index: int) -> ScannedSample:
    """Return the properties of a sample, of a bad one those that could be read; it raises DataError if none could."""
    sample = source.read(index)
    found = ScannedSample(index, label=sample.label, size=len(sample.image), file_digest=_digest(sample.image))
    try:
        found.captions = [_digest(caption.encode()) for caption in sample.captions]
        if options.tokenize is not None:
            found.lengths = [*options.tokenize([*sample.captions])[1]]
        for caption in () if source.templates else sample.captions:
            if caption.strip().lower() in _PLACEHOLDERS:
                found.remarks.append(("placeholder as caption", f"{caption!r} looks like a missing value"))
        image = read_image(sample.image, options.max_pixels)
        found.pixel_digest = _digest(f"{tuple(image.pixels.shape)}".encode(), image.pixels.contiguous().numpy().data)
        found.remarks += _image_remarks(image, options.min_side)
        if source.classnames and not 0 <= found.label < len(source.classnames):
            last = len(source.classnames) - 1
            raise DataError(f"class {found.label}; expected a class number, 0 to {last}", "class number")
    except UnicodeEncodeError as error:
        found.problem = "not UTF-8", f"caption with a lone surrogate at character {error.start}"
    except DataError as error:
        found.problem = error.kind, str(error)
        if error.kind == "damaged image" and _is_truncated(sample.image):
            found.problem = "truncated image", f"{error}; the file ends early"
    return found


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _image_remarks(image: DecodedImage, min_side: int) -> Iterator[tuple[str, str]]:
    height, width = image.pixels.shape[1:]
    if min(height, width) < min_side:
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


def _is_truncated(data: bytes) -> bool:
    """Return whether a damaged image lacks its end."""
    kind = image_format(data)
    if kind == "webp":
        return int.from_bytes(data[4:8], "little") + 8 > len(data)
    if kind == "png":
        return b"IEND" not in data
    return kind == "jpeg" and data.rfind(b"\xff\xd9") <= data.rfind(b"\xff\xda")  # marks of the end and the pixels


class _Digests:
    """Digests of many items, 16 bytes each, with the sample that each belongs to."""

    def __init__(self) -> None:
        self._bytes, self._samples = bytearray(), bytearray()

    def add(self, digest: bytes, sample: int) -> None:
        """Add an item; an empty digest is skipped."""
        if digest:
            self._bytes += digest
            self._samples += np.int64(sample).tobytes()

    def groups(self) -> list[list[int]]:
        """Return the samples of each digest that several samples have, in the order of the first ones."""
        values, samples = np.frombuffer(self._bytes, "S16"), np.frombuffer(self._samples, np.int64)
        order = np.argsort(values, kind="stable")
        starts = 1 + np.flatnonzero(values[order][1:] != values[order][:-1])
        parts = (np.unique(part) for part in np.split(samples[order], starts))
        return sorted(part.tolist() for part in parts if len(part) > 1)


def check_source(source: Source, options: CheckOptions, against: Source | None = None) -> CheckReport:
    """Read and decode every sample of a source; a bad sample never ends the check.

    Args:
        source: the samples.
        options: the limits.
        against: other data, whose images should not be in this source.
    """
    report = CheckReport(len(source), tuple(getattr(source, "notes", ())))
    bad, warnings = defaultdict[str, list[Finding]](list), defaultdict[str, list[Finding]](list)
    files, pixels, captions = _Digests(), _Digests(), _Digests()
    lengths, classes = CaptionLengths(), Counter[int]()
    for sample in scan(source, options):
        if sample.problem is not None:
            kind, detail = sample.problem
            bad[kind].append(Finding(source.name(sample.index), detail))
        for length in sample.lengths:
            if options.context_length is not None and length > options.context_length:
                sample.remarks.append(("cut caption", f"{length} tokens; {options.context_length} are read"))
        for kind, detail in sample.remarks:
            warnings[kind].append(Finding(source.name(sample.index), detail))
        report.image_bytes += sample.size
        files.add(sample.file_digest, sample.index)
        pixels.add(sample.pixel_digest, sample.index)
        for digest in sample.captions:
            captions.add(digest, sample.index)
        lengths.update(sample.lengths)
        classes[sample.label] += sample.problem is None
    same_files = files.groups()
    first = {sample: group[0] for group in same_files for sample in group}
    same_pixels = (sorted({first.get(sample, sample) for sample in group}) for group in pixels.groups())
    warnings["same image file"] = _name_duplicates(source, same_files)
    warnings["same pixels"] = _name_duplicates(source, same_pixels)
    if lengths:
        report.captions = {"captions": lengths.total(), "longest": max(lengths)}
        report.captions |= {f"length_of_{percent}_percent": lengths.length_for(percent) for percent in (50, 95, 99)}
        if (limit := options.context_length) is not None:
            report.captions |= {"context_length": limit, "cut": lengths.count_cut(limit)}
    if not source.templates:  # otherwise the images of a class share their captions
        groups = sorted(captions.groups(), key=len, reverse=True)
        samples = {sample for group in groups for sample in group}
        report.captions |= {"repeated": len(groups), "samples_with_repeated": len(samples)}
        for group in groups:
            one, other = (source.read(index).captions for index in group[:2])
            text = printable(next(caption for caption in one if caption in other)[:_SHOWN])
            warnings["repeated caption"].append(Finding(source.name(group[0]), f"{len(group)} images have {text!r}"))
    for number, name in enumerate(source.classnames):
        report.classes[name] = classes[number]
        if not classes[number]:
            warnings["class without images"].append(Finding(name, f"class {number}"))
    if against is not None:
        warnings["also in the other data"] = _find_overlap(source, against, files, pixels, options)
    report.bad, report.warnings = (
        {kind: found[kind] for kind in sorted(found) if found[kind]} for found in (bad, warnings)
    )
    return report


def _name_duplicates(source: Source, groups: Iterable[Sequence[int]]) -> list[Finding]:
    return [Finding(source.name(other), f"same as {source.name(group[0])}") for group in groups for other in group[1:]]


def _find_overlap(
    source: Source, against: Source, files: _Digests, pixels: _Digests, options: CheckOptions
) -> list[Finding]:
    """Return the samples of a source whose file or pixels are in other data; the digests of these are added."""
    own = len(source)
    for sample in scan(against, dataclasses.replace(options, tokenize=None), "other data"):
        files.add(sample.file_digest, own + sample.index)
        pixels.add(sample.pixel_digest, own + sample.index)
    found: dict[int, Finding] = {}
    for digests, what in ((files, "same file"), (pixels, "same pixels")):
        for group in digests.groups():
            others = [index - own for index in group if index >= own]
            for index in group if others else ():
                if index < own:
                    found.setdefault(index, Finding(source.name(index), f"{what} as {against.name(others[0])}"))
    return [*found.values()]


def format_report(report: CheckReport, examples: int = 3) -> str:
    """Return the report as text: a line for each kind, with its first findings below."""
    samples, facts = max(1, report.samples), report.captions
    size = f"{format_bytes(report.image_bytes)} of images ({format_bytes(report.image_bytes / samples)} each)"
    lines = [f"{report.samples:,} samples, {size}"]
    for title, section, notes in (("bad samples", report.bad, ()), ("warnings", report.warnings, report.notes)):
        lines.append(f"\n{title}{'' if section or notes else ': none'}")
        lines += [f"  {note}" for note in notes]
        for kind, found in section.items():
            share = 100 * len({each.sample for each in found}) / samples
            lines.append(f"  {kind:<26}{len(found):>9,} {share:>6.2f} %")
            lines += [f"      {each.sample}: {each.detail}" for each in found[:examples]]
            if 0 < examples < len(found):
                lines.append(f"      and {len(found) - examples:,} more")
    if "captions" in facts:
        half, most, nearly_all = (facts[f"length_of_{percent}_percent"] for percent in (50, 95, 99))
        lines.append(
            f"\ncaptions: {facts['captions']:,}; tokens, marks included: half have at most {half}, 95 % {most}, 99 % "
            f"{nearly_all}, the longest {facts['longest']}"
        )
    if "cut" in facts:
        cut = f"{facts['cut']:,} ({100 * facts['cut'] / facts['captions']:.2f} %)"
        lines.append(f"captions longer than {facts['context_length']} tokens, which are cut: {cut}")
    if facts.get("repeated"):
        share = 100 * facts["samples_with_repeated"] / samples
        lines.append(
            f"captions of several images: {facts['repeated']:,}, on {facts['samples_with_repeated']:,} images "
            f"({share:.2f} %); in one batch they are false negatives of each other"
        )
    if count := len(report.warnings.get("same image file", ())):
        lines.append(
            f"samples with the image of an earlier one: {count:,} ({100 * count / samples:.2f} %); in one batch they "
            "are false negatives, and retrieval counts them as wrong: give an image once, with all its captions"
        )
    if report.classes:
        counts = report.classes.values()
        lines.append(f"\nclasses: {len(counts)}, with {min(counts):,} to {max(counts):,} images")
    return "\n".join(map(printable, lines))
