"""Report what is bad, duplicated or unusual in a source.

scan every sample in the workers                  # problem, remarks, digests of image, pixels and captions, lengths
bad samples: kind -> findings                     # they count for the tolerance
warnings:    kind -> findings                     # duplicates, cut captions, classes without images, overlap, ...
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vqclip.data import Source
from vqclip.data_tools.scan import CheckOptions, scan
from vqclip.errors import printable
from vqclip.towers import CaptionLengths

__all__ = ["CheckOptions", "CheckReport", "Finding", "check_source", "format_report"]

_DIGEST = "S16"
_SHOWN = 160


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


class _Digests:
    """Digests of many items, 16 bytes each, with the sample that each belongs to."""

    def __init__(self) -> None:
        self._bytes, self._samples = bytearray(), bytearray()

    def add(self, digest: bytes, sample: int) -> None:
        """Add an item; an empty digest is skipped."""
        if digest:
            self._bytes += digest
            self._samples += np.int64(sample).tobytes()

    @property
    def values(self) -> np.ndarray:
        """``(n,)`` of 16 bytes."""
        return np.frombuffer(self._bytes, _DIGEST)

    @property
    def samples(self) -> np.ndarray:
        """``(n,)`` int64."""
        return np.frombuffer(self._samples, np.int64)

    def groups(self) -> Iterator[list[int]]:
        """Yield the samples of each digest that several samples have, in the order of the first ones."""
        order = np.argsort(self.values, kind="stable")
        values = self.values[order]
        starts = 1 + np.flatnonzero(values[1:] != values[:-1])
        parts = (np.unique(part) for part in np.split(self.samples[order], starts))
        yield from sorted(part.tolist() for part in parts if len(part) > 1)


def check_source(source: Source, options: CheckOptions, against: Source | None = None) -> CheckReport:
    """Read and decode every sample of a source; a bad sample never ends the check.

    Args:
        source: the samples.
        options: the limits.
        against: other data, whose images should not be in this source.
    """
    report, bad, warnings = (
        CheckReport(len(source), tuple(getattr(source, "notes", ()))),
        defaultdict(list),
        defaultdict(list),
    )
    files, pixels, captions = _Digests(), _Digests(), _Digests()
    lengths, classes = CaptionLengths(), Counter[int]()
    for sample in scan(source, options):
        if sample.problem is not None:
            kind, detail = sample.problem
            bad[kind].append(Finding(source.name(sample.index), detail))
        for kind, detail in sample.remarks:
            warnings[kind].append(Finding(source.name(sample.index), detail))
        report.image_bytes += sample.size
        files.add(sample.file_digest, sample.index)
        pixels.add(sample.pixel_digest, sample.index)
        for digest in sample.captions:
            captions.add(digest, sample.index)
        lengths.update(sample.lengths)
        classes[sample.label] += sample.problem is None
        if options.context_length is not None:
            for length in sample.lengths:
                if length > options.context_length:
                    detail = f"{length} tokens; {options.context_length} are read"
                    warnings["cut caption"].append(Finding(source.name(sample.index), detail))
    same_files = [*files.groups()]
    _add_duplicates(warnings["same image file"], source, same_files)
    _add_duplicates(warnings["same pixels"], source, _other_groups(pixels.groups(), same_files))
    report.captions = _describe_captions(lengths, options.context_length)
    if not source.templates:  # otherwise the images of a class share their captions
        _add_repeated_captions(report, warnings["repeated caption"], source, captions)
    for number, name in enumerate(source.classnames):
        report.classes[name] = classes[number]
        if not classes[number]:
            warnings["class without images"].append(Finding(name, f"class {number}"))
    if against is not None:
        _add_overlap(warnings["also in the other data"], source, against, files, pixels, options)
    report.bad, report.warnings = _sort_kinds(bad), _sort_kinds(warnings)
    return report


def _sort_kinds(found: dict[str, list[Finding]]) -> dict[str, list[Finding]]:
    return {kind: found[kind] for kind in sorted(found) if found[kind]}


def _other_groups(groups: Iterator[list[int]], known: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield groups with one sample for each of the known groups in them, if several remain."""
    first = {sample: group[0] for group in known for sample in group}
    for group in groups:
        different = sorted({first.get(sample, sample) for sample in group})
        if len(different) > 1:
            yield different


def _add_duplicates(found: list[Finding], source: Source, groups: Sequence[list[int]] | Iterator[list[int]]) -> None:
    for first, *others in groups:
        found += [Finding(source.name(other), f"same as {source.name(first)}") for other in others]


def _add_repeated_captions(report: CheckReport, found: list[Finding], source: Source, captions: _Digests) -> None:
    """Note captions of several images: in one batch, each is a false negative of the others."""
    repeated = sorted(captions.groups(), key=len, reverse=True)
    samples = {sample for group in repeated for sample in group}
    report.captions |= {"repeated": len(repeated), "samples_with_repeated": len(samples)}
    for group in repeated:
        text = _shared_caption(source, group)
        found.append(Finding(source.name(group[0]), f"{len(group)} images have {printable(text[:_SHOWN])!r}"))


def _shared_caption(source: Source, group: list[int]) -> str:
    first, second = (source.read(index).captions for index in group[:2])
    return next(caption for caption in first if caption in second)


def _describe_captions(lengths: CaptionLengths, context_length: int | None) -> dict[str, Any]:
    if not lengths:
        return {}
    found: dict[str, Any] = {"captions": lengths.total(), "longest": max(lengths)}
    found |= {f"length_of_{percent}_percent": lengths.length_for(percent) for percent in (50, 95, 99)}
    if context_length is not None:
        found |= {"context_length": context_length, "cut": lengths.count_cut(context_length)}
    return found


def _add_overlap(
    found: list[Finding], source: Source, against: Source, files: _Digests, pixels: _Digests, options: CheckOptions
) -> None:
    other_files, other_pixels = _Digests(), _Digests()
    for sample in scan(against, dataclasses.replace(options, tokenize=None), "other data"):
        other_files.add(sample.file_digest, sample.index)
        other_pixels.add(sample.pixel_digest, sample.index)
    seen: set[int] = set()
    for here, there, detail in ((files, other_files, "same file"), (pixels, other_pixels, "same pixels")):
        values, first = np.unique(there.values, return_index=True)
        for row in np.flatnonzero(np.isin(here.values, values)):
            index = int(here.samples[row])
            other = int(there.samples[first[np.searchsorted(values, here.values[row])]])
            if index not in seen:
                seen.add(index)
                found.append(Finding(source.name(index), f"{detail} as {against.name(other)}"))


def format_report(report: CheckReport, examples: int = 3) -> str:
    """Return the report as text: a line for each kind, with its first findings below."""
    mean = report.image_bytes / max(1, report.samples)
    lines = [f"{report.samples:,} samples, {report.image_bytes / 1e6:,.1f} MB of images ({mean / 1e3:.1f} kB each)"]
    for title, section in (("bad samples", report.bad), ("warnings", report.warnings)):
        notes = report.notes if title == "warnings" else ()
        lines.append(f"\n{title}{'' if section or notes else ': none'}")
        lines += [f"  {note}" for note in notes]
        for kind, found in section.items():
            share = 100 * len({each.sample for each in found}) / max(1, report.samples)
            lines.append(f"  {kind:<26}{len(found):>9,} {share:>6.2f} %")
            lines += [f"      {each.sample}: {each.detail}" for each in found[:examples]]
            if 0 < examples < len(found):
                lines.append(f"      and {len(found) - examples:,} more")
    return "\n".join(
        printable(line) for line in [*lines, *_caption_lines(report), *_duplicate_lines(report), *_class_lines(report)]
    )


def _caption_lines(report: CheckReport) -> Iterator[str]:
    facts = report.captions
    if "captions" in facts:
        half, most, nearly_all = (facts[f"length_of_{percent}_percent"] for percent in (50, 95, 99))
        yield (
            f"\ncaptions: {facts['captions']:,}; tokens, marks included: half have at most {half}, 95 % {most}, 99 % "
            f"{nearly_all}, the longest {facts['longest']}"
        )
    if "cut" in facts:
        share = 100 * facts["cut"] / facts["captions"]
        yield f"captions longer than {facts['context_length']} tokens, which are cut: {facts['cut']:,} ({share:.2f} %)"
    if facts.get("repeated"):
        share = 100 * facts["samples_with_repeated"] / max(1, report.samples)
        yield (
            f"captions of several images: {facts['repeated']:,}, on {facts['samples_with_repeated']:,} images "
            f"({share:.2f} %); in one batch they are false negatives of each other"
        )


def _duplicate_lines(report: CheckReport) -> Iterator[str]:
    if count := len(report.warnings.get("same image file", ())):
        share = 100 * count / max(1, report.samples)
        yield (
            f"samples with the image of an earlier one: {count:,} ({share:.2f} %); in one batch they are false "
            "negatives of each other, and retrieval counts them as wrong: give an image once, with all its captions"
        )


def _class_lines(report: CheckReport) -> Iterator[str]:
    if report.classes:
        counts = sorted(report.classes.values())
        yield f"\nclasses: {len(counts)}, with {counts[0]:,} to {counts[-1]:,} images"
