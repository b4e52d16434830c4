"""Pack a source into WebDataset shards with their indexes.

captions in img2dataset's layout, for sources of kind shards:
    OUT/00000.tar  00000_stats.json ...
labelled images in clip_benchmark's layout, for kind classes (kind shards reads OUT/SPLIT if they have captions too):
    OUT/classnames.txt  zeroshot_classification_templates.txt  SPLIT/0.tar ... SPLIT/nshards.txt

A shard holds a fixed range of the source's samples, so that its bytes do not depend on the number of processes, nor on
whether the job was interrupted. Workers read and verify samples; this process writes them in order.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from vqclip.config import Config
from vqclip.data import Source
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.in_order import InOrderReader, SamplesRead, ShardSlices, require_few_bad
from vqclip.data.lookup import locate
from vqclip.data.shard_folder import ShardFolder, ShardRecord, WorkResult
from vqclip.data.sources.captions import DEFAULT_TEMPLATE
from vqclip.data.sources.class_folder import CLASSNAMES, MAX_LINE, TEMPLATES
from vqclip.data.tokens.manifest import ShardInfo, ShardManifest
from vqclip.data.workers import explain_worker_deaths, ordered_map
from vqclip.data_tools.samples import PackedSample, SamplePacker
from vqclip.errors import ConfigError, DataError
from vqclip.io.atomic import write_file
from vqclip.io.tars import write_tar
from vqclip.runlog.bar import ProgressBar

__all__ = ["Options", "PackFolder", "PackManifest", "PackSettings", "pack"]

_MADE_WITH = ("webdataset", "torchvision", "pillow")
_BATCH = 16
"""Samples that a worker reads at once; a few keep the memory small, since an image may have 64 MiB."""
_PROBES = 32
"""Samples that are read to estimate the size."""
_HEADERS = 2048
"""Bytes of a sample in a tar beside its contents."""


class Options(Config):
    """Options of `vqclip data pack`."""

    out: Path
    """Folder to write to."""
    shard_size: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Samples in a shard, unusable ones included."""
    split: str = "train"
    """Folder of the shards of labelled data."""
    workers: Annotated[int, Field(ge=0, le=512)] = 1
    """Processes that read and verify; any number writes the same bytes."""
    part: tuple[int, int] = (1, 1)
    """Number of this part of the shards, from 1, and number of parts; machines with one folder take a part each."""
    bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Largest share of samples that cannot be used and are left out; bad_samples.jsonl names them."""
    max_pixels: Annotated[int, Field(ge=1)] = MAX_PIXELS
    """Larger images cannot be used."""
    timeout_s: float = 240.0
    """Longest wait for a worker."""


class PackSettings(Config):
    """Everything that determines the bytes of packed shards."""

    layout: Literal["captions", "classes"]
    """Members of a sample: captions, or a class number."""
    samples: int = Field(ge=1)
    """Samples of the source."""
    shard_size: int = Field(ge=1)
    """Samples in a shard, unusable ones included."""
    classnames: tuple[str, ...]
    """Names of the classes."""
    templates: tuple[str, ...]
    """Prompts of the classes."""
    max_pixels: int
    """Larger images are unusable."""
    made_with: dict[str, str]
    """Versions of the libraries that write, and that decide which images can be decoded."""
    data: dict[str, Any]
    """Fingerprint of the source."""

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.samples // self.shard_size)


class PackRecord(ShardRecord):
    """Record of a finished shard."""

    captions: int
    """Captions of all its samples."""


class PackManifest(ShardManifest):
    """A whole folder of packed shards."""

    settings: PackSettings
    """Settings of all shards."""
    captions: int
    """Captions of all samples."""


class PackFolder(ShardFolder[PackRecord, PackManifest]):
    """A folder of packed shards that is being made.

    Args:
        folder: the folder of the shards; made if it is missing.
        settings: everything that determines its bytes.

    Raises:
        ConfigError: it was begun with other settings, which the message shows, or contains something else.
    """

    command = "vqclip data pack"
    versions = {"format": "vqclip packed shards", "format_version": 1}
    suffixes = (".tar",)
    out_option = "OUT"
    bad_option = "--bad-fraction"
    record_type = PackRecord

    def __init__(self, folder: Path, settings: PackSettings):
        self.settings = settings
        super().__init__(folder, settings, settings.shards)

    def name(self, shard: int) -> str:
        """Return the file name of a shard: 00003.tar, or 3.tar as clip_benchmark wants it."""
        return f"{shard}.tar" if self.settings.layout == "classes" else f"{shard:05d}.tar"

    def write(self, shard: int, batches: Iterable[SamplesRead[PackedSample]], key: Callable[[int], str]) -> None:
        """Write a shard with its statistics and its index, and then its record."""
        tally = _Tally(key)
        file = self.write_file(
            shard, lambda file: write_tar(file, ((each.key, each.members) for each in tally.count(batches)))
        )
        failed = len(tally.bad)
        stats: dict[str, Any] = {"count": tally.samples + failed, "successes": tally.samples}
        stats |= {"failed_to_download": 0, "failed_to_resize": failed}
        stats["status_dict"] = {"success": tally.samples, "unusable": failed}
        write_file(self.folder / self.name(shard).replace(".tar", "_stats.json"), json.dumps(stats, indent=1).encode())
        self.add_record(shard, file, tally.samples, tally.bad, captions=tally.captions)

    def make_manifest(self, records: Sequence[PackRecord], samples: int, bad: dict[str, int]) -> PackManifest:
        """Return the manifest; see `ShardFolder.make_manifest`."""
        captions, shards = sum(record.captions for record in records), tuple(record.facts for record in records)
        return PackManifest(settings=self.settings, samples=samples, captions=captions, bad=bad, shards=shards)


class _Tally:
    """Counts of the samples of a shard.

    Args:
        key: sample → its key.
    """

    def __init__(self, key: Callable[[int], str]):
        self._key = key
        self.samples = self.captions = 0
        self.bad: list[dict[str, str | int]] = []

    def count(self, batches: Iterable[SamplesRead[PackedSample]]) -> Iterable[PackedSample]:
        """Yield the samples of batches and count them."""
        for batch in batches:
            for bad in batch.bad:
                key = self._key(bad.sample_id)
                self.bad.append({"sample_id": bad.sample_id, "key": key, "kind": bad.kind, "reason": bad.reason})
            for sample in batch.found.values():
                self.samples += 1
                self.captions += sample.captions
                yield sample


def pack(source: Source, options: Options) -> WorkResult[PackManifest]:
    """Write a source as shards; run again, it continues.

    Raises:
        VqclipError: for anything a user can correct; the message says how.
        OSError: the disk is full, or cannot be written.
    """
    settings = _settings(source, options)
    labelled = settings.layout == "classes"
    folder = PackFolder(options.out / options.split if labelled else options.out, settings)
    if labelled:
        _write_classes(options.out, settings)
    part, parts = options.part
    share = range(settings.shards)[part - 1 :: parts]
    finished = {shard: facts for shard in share if (facts := folder.find_finished(shard)) is not None}
    wanted = [shard for shard in share if shard not in finished]
    start = time.monotonic()
    seen = _pack(source, options, folder, wanted, [*finished.values()])
    manifest = folder.finish(int(options.bad_fraction * settings.samples))
    if manifest is not None and labelled:
        write_file(folder.folder / "nshards.txt", f"{settings.shards}\n".encode())
    return WorkResult(len(wanted), len(finished), seen, time.monotonic() - start, folder.missing(), manifest)


def _pack(
    source: Source, options: Options, folder: PackFolder, wanted: Sequence[int], finished: Sequence[ShardInfo]
) -> int:
    """Write the wanted shards; return the number of samples read."""
    total, size = folder.settings.samples, options.shard_size
    sizes = [min(size, total - shard * size) for shard in range(folder.shards)]
    slices = ShardSlices(sizes, wanted, _BATCH)
    packer = SamplePacker(source, size, options.max_pixels)
    _require_room(source, folder.folder, [range(shard * size, shard * size + sizes[shard]) for shard in wanted])
    allowed = int(options.bad_fraction * total)
    reasons: list[str] = []
    bad = sum(sum(facts.bad.values()) for facts in finished)
    done = sum(facts.samples + sum(facts.bad.values()) for facts in finished)
    seen = written = 0
    with (
        explain_worker_deaths("pack"),
        ProgressBar(done + sum(sizes[shard] for shard in wanted), done, True, "pack", "sample") as bar,
    ):

        def watch(batches: Iterable[SamplesRead[PackedSample]]) -> Iterable[SamplesRead[PackedSample]]:
            nonlocal seen, written
            for batch in batches:
                reasons.extend(each.reason for each in batch.bad)
                require_few_bad(reasons, bad + len(reasons), allowed, folder.bad_option)
                yield batch
                seen, written = seen + len(batch.ids), written + sum(sample.size for sample in batch.found.values())
                bar.advance(len(batch.ids))
                bar.show({"bytes": written})

        reader = InOrderReader(packer, slices)
        batches = ordered_map(reader, range(len(reader)), options.workers, timeout_s=options.timeout_s, section="pack")
        for shard, some in itertools.groupby(batches, key=lambda batch: batch.shard):
            folder.write(shard, watch(some), packer.key)
    return seen


def _settings(source: Source, options: Options) -> PackSettings:
    names, templates = source.classnames, source.templates
    if names and not templates:
        templates = (DEFAULT_TEMPLATE,)
    for text in (*names, *templates):
        if not text.strip() or len(text.splitlines()) != 1 or len(text) > MAX_LINE:
            raise DataError(
                f"class names and prompts are written one a line; got {text[:80]!r} of {len(text)} characters, "
                f"expected one line of at most {MAX_LINE}"
            )
    return PackSettings(
        layout="classes" if names else "captions",
        samples=len(source),
        shard_size=options.shard_size,
        classnames=names,
        templates=templates,
        max_pixels=options.max_pixels,
        made_with={name: importlib.metadata.version(name) for name in _MADE_WITH},
        data=source.fingerprint,
    )


def _write_classes(folder: Path, settings: PackSettings) -> None:
    for name, lines in ((CLASSNAMES, settings.classnames), (TEMPLATES, settings.templates)):
        path, data = folder / name, "".join(f"{line}\n" for line in lines).encode()
        if path.exists() and path.read_bytes() != data:
            raise ConfigError(f"{path}: belongs to data with other classes or prompts; expected a new folder")
        if not path.exists():
            write_file(path, data)


def _require_room(source: Source, folder: Path, wanted: Sequence[range]) -> None:
    """Raise ConfigError if the samples do not fit on the disk; their size is estimated from some of them."""
    count, sizes = sum(map(len, wanted)), []
    starts = np.cumsum([0, *map(len, wanted)])
    for number in range(0, count, -(-count // _PROBES) if count else 1):
        shard, place = locate(starts, number)
        with contextlib.suppress(DataError):  # counted where it is packed
            sample = source.read(wanted[shard][place])
            sizes.append(len(sample.image) + sum(map(len, sample.captions)) + _HEADERS)
    free = shutil.disk_usage(folder).free
    if sizes:
        error = 2 * float(np.std(sizes)) / len(sizes) ** 0.5  # two standard errors of the mean
        least = count * (float(np.mean(sizes)) - error)
        if least > free:
            raise ConfigError(
                f"OUT: {folder} has room for {free / 1e9:.1f} GB, but {count:,} samples need at least "
                f"{least / 1e9:.1f} GB; expected a folder on a larger disk"
            )
