"""Pack a source into WebDataset shards.

captions in img2dataset's layout, for sources of kind shards:
    OUT/00000.tar  00000_stats.json ...
labelled images in clip_benchmark's layout, for kind classes (kind shards reads OUT/SPLIT if they have captions too):
    OUT/classnames.txt  zeroshot_classification_templates.txt  SPLIT/0.tar ... SPLIT/nshards.txt

A shard holds a fixed range of the source's samples, or a piece of a source that is packed anyway, such as some row
groups of a Parquet file, so that its bytes do not depend on the number of processes and machines, nor on whether the
job was interrupted. The processes share the shards through the folder; see `vqclip.data.work_folder`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from vqclip.data import Source
from vqclip.data.batch import allowed_bad, require_few_bad
from vqclip.data.decode import decode_image
from vqclip.data.sources.base import RawSample
from vqclip.data.sources.class_names import CLASSNAMES, DEFAULT_TEMPLATE, MAX_LINE, TEMPLATES
from vqclip.data.sources.packed import PackedConfig, SourceStream, Stream, require_room, write_piece
from vqclip.data.work_folder import FolderLayout, ItemRecord, WorkFolder, WorkResult
from vqclip.data.workers import explain_worker_deaths, ordered_map
from vqclip.errors import ConfigError, DataError
from vqclip.io.atomic import write_file
from vqclip.runlog.bar import ProgressBar

_VERSIONS = {"format": "vqclip packed shards", "format_version": 2}
_MADE_WITH = ("webdataset", "simplejpeg", "pillow")
_PROBES = 32
"""Samples that are read to estimate the size."""
_HEADERS = 2048
"""Bytes of a sample in a tar beside its contents."""


def _slices(source: Source, shard_size: int) -> SourceStream:
    """Return a source in pieces of some samples; their size in a tar is estimated, at least, from some of them."""
    sizes = []
    for index in range(0, len(source), max(1, -(-len(source) // _PROBES))):
        with contextlib.suppress(DataError):  # counted where it is packed
            sample = source.read(index)
            sizes.append(len(sample.image) + sum(map(len, sample.captions)) + _HEADERS)
    size = np.mean(sizes) - 2 * np.std(sizes) / len(sizes) ** 0.5 if sizes else 0.0  # two standard errors
    return SourceStream(source, "the source", shard_size, max(0.0, float(size)))


class _PieceWriter:
    """Writes pieces of a source as shards; runs in the workers.

    Args:
        data: the source, or the configuration of one that is read forward.
        folder: the folder of the shards.
        shard_size: samples in a shard.
        max_pixels: larger images cannot be used.
    """

    def __init__(self, data: Source | PackedConfig, folder: WorkFolder, shard_size: int, max_pixels: int):
        self._data, self._folder, self._shard_size, self._max_pixels = data, folder, shard_size, max_pixels
        self._stream: Stream | None = None

    def __call__(self, piece: int) -> ItemRecord | None:
        """Write a piece and its statistics, and return its record; None if another process is writing it."""
        if self._stream is None:
            data = self._data
            self._stream = data.find().open() if isinstance(data, PackedConfig) else _slices(data, self._shard_size)
        for _ in self._folder.claim([piece]):
            record = write_piece(self._folder, piece, self._stream, self._check)
            good, bad = record.samples, len(record.bad)
            stats = {"count": good + bad, "successes": good, "failed_to_download": 0, "failed_to_resize": bad}
            status = {"status_dict": {"success": good, "unusable": bad}}
            path = self._folder.file(piece).with_name(f"{self._folder.file(piece).stem}_stats.json")
            write_file(path, json.dumps(stats | status, indent=1).encode())
            return record
        return None

    def _check(self, sample: RawSample) -> None:
        decode_image(sample.image, self._max_pixels)


def pack(
    data: Source | PackedConfig,
    out: Path,
    *,
    split: str,
    shard_size: int,
    workers: int,
    bad_fraction: float,
    max_pixels: int,
) -> WorkResult:
    """Write a source as shards; run again, or by several processes at a time, it continues.

    Args:
        data: the source, or the configuration of one that is read forward, which is then not packed into the cache.
        out: folder to write to.
        split: folder of the shards of labelled data.
        shard_size: samples in a shard, unusable ones included; sources that are read in pieces have a shard for each.
        workers: processes that read, verify and write; any number writes the same bytes.
        bad_fraction: largest share of samples that are left out; bad_samples.jsonl names them.
        max_pixels: larger images cannot be used.

    Raises:
        VqclipError: for anything a user can correct; the message says how.
        OSError: the disk is full, or cannot be written.
    """
    start, made, samples = time.monotonic(), 0, 0
    if isinstance(data, PackedConfig):
        data = data.model_copy(update=data.pins())
        packable = data.find()
        stream, identity = packable.open(), packable.identity
    else:
        stream, identity = _slices(data, shard_size), data.fingerprint
    settings = {"shard_size": None if isinstance(data, PackedConfig) else shard_size, "max_pixels": max_pixels}
    folder = _open_folder(data, stream, settings | {"data": identity}, out, split)
    records = [folder.record(piece, verify=True) for piece in range(folder.items)]
    wanted = folder.arrange(piece for piece, record in enumerate(records) if record is None)
    found = folder.items - len(wanted)
    require_room(folder.path, sum(stream.pieces[piece].size for piece in wanted), "OUT: name a folder on a larger disk")
    allowed = None if isinstance(data, PackedConfig) else allowed_bad(bad_fraction, len(data))
    bad = [each.reason for record in records if record is not None for each in record.bad]
    writer = _PieceWriter(data, folder, shard_size, max_pixels)
    with explain_worker_deaths("pack"), ProgressBar(folder.items, found, True, "pack", "shard") as bar:
        for record in ordered_map(writer, wanted, min(workers, len(wanted)), section="pack"):
            if record is not None:
                made, samples = made + 1, samples + record.samples
                bad += [each.reason for each in record.bad]
                if allowed is not None:
                    require_few_bad(bad, len(bad), allowed, "--bad-fraction")
            bar.advance()
            bar.show({"samples": samples})
    manifest = note = None
    if (whole := folder.records()) is not None:
        manifest = folder.finish(whole, bad_fraction, "--bad-fraction")
        captions = sum(record.facts["captions"] for record in whole)
        note = f"{{kind: shards, path: {out}{', captions: json' * (captions > manifest.samples)}}}"
        if stream.classnames:
            write_file(folder.path / "nshards.txt", f"{folder.items}\n".encode())
            note = f"{{kind: classes, path: {out}, split: {split}}}"
        note = f"read them with {note}"
    return WorkResult(made, found, folder.missing(), samples, time.monotonic() - start, manifest, note)


def _open_folder(
    data: Source | PackedConfig, stream: Stream, settings: dict[str, Any], out: Path, split: str
) -> WorkFolder:
    """Make the folder of the shards, beside the names of the classes; or compare what is there."""
    names = stream.classnames
    templates = (data.templates if stream.has_prompts else ()) if isinstance(data, PackedConfig) else data.templates
    if names and not templates:
        templates = (DEFAULT_TEMPLATE,)
    for text in (*names, *templates):
        if not text.strip() or len(text.splitlines()) != 1 or len(text) > MAX_LINE:
            raise DataError(
                f"class names and prompts are written one a line; got {text[:80]!r} of {len(text)} characters, "
                f"expected one line of at most {MAX_LINE}"
            )
    settings |= {"layout": "classes" if names else "captions", "classnames": names, "templates": templates}
    settings["made_with"] = {name: importlib.metadata.version(name) for name in _MADE_WITH}
    path = out / split if names else out
    layout = FolderLayout(_VERSIONS, ".tar", "vqclip data pack", "OUT", 1 if names else 5)
    folder = WorkFolder(path, settings, len(stream.pieces), layout)
    for name, lines in ((CLASSNAMES, names), (TEMPLATES, templates)) if names else ():
        file, content = out / name, "".join(f"{line}\n" for line in lines).encode()
        if file.exists() and file.read_bytes() != content:
            raise ConfigError(f"{file}: belongs to data with other classes or prompts; expected a new folder")
        if not file.exists():
            write_file(file, content)
    return folder
