"""Tokenize a data set: each input shard becomes one token shard, made by the process that claims it.

    index the shards together                   # a collective; from here on no process waits for another
    folder = work folder: tokenizer, data, versions; refused if it was begun with others
    for shard in folder.claim():
        batches, decoded in workers -> ids -> Parquet file -> record of the shard
    manifest                                    # as soon as every shard is finished

A batch contains samples of one shard, and is padded to ``batch_size`` rows. So each id, and the bytes of a token shard,
depend on the settings and the shard alone, and any processes, on any engine, write the same.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from vqclip import dist
from vqclip.config import Config
from vqclip.data import ShardedSource, SourceConfigBase, open_sources
from vqclip.data.batch import allowed_bad, require_few_bad
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.in_order import SamplesRead, read_in_order, slices_of
from vqclip.data.lookup import require_pyarrow
from vqclip.data.on_ray import RayOptions, connect_to_ray
from vqclip.data.remote.files import Shard
from vqclip.data.samples import read_decoded
from vqclip.data.tokens.shards import (
    SUFFIX,
    VERSIONS,
    IdLayout,
    Settings,
    TokenizerInfo,
    TokenRecord,
    strip_padding,
    write_shard,
)
from vqclip.data.work_folder import VISIBLE_S, FolderLayout, ItemRecord, WorkFolder, WorkResult
from vqclip.data.workers import explain_worker_deaths, ordered_map
from vqclip.errors import CheckpointError, ConfigError, StorageError
from vqclip.io.atomic import write_file
from vqclip.io.json_files import problem_message, read_json
from vqclip.nn.precision import Precision
from vqclip.process.memory import keep_freed_memory
from vqclip.runlog.bar import ProgressBar
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.tokenizer.folder import CONFIG_FILE, TokenizerFolder, find_folder
from vqclip.tokenizer.loading import load_whole
from vqclip.tokenizer.stored import fingerprint
from vqclip.towers import CaptionLengths

LAYOUT = FolderLayout(VERSIONS, SUFFIX, command="vqclip tokenize", option="--out")
"""Layout of the work folder."""
_MADE_WITH = ("torch", "torchvision", "simplejpeg", "pillow", "open_clip_torch", "timm", "pyarrow")


class Options(Config):
    """Options of `vqclip tokenize`."""

    tokenizer: str
    """Tokenizer folder, or hub name."""
    data: SourceConfigBase
    """The data set."""
    out: Path
    """Folder of the token shards."""
    modality: Literal["image", "text", "both"] = "both"
    """Data to tokenize."""
    batch_size: Annotated[int, Field(ge=1, le=2**16)] = 64
    """Samples in a batch; the last batch of a shard is padded."""
    workers: Annotated[int, Field(ge=0, le=512)] = 0
    """Worker processes that decode images, for each process of the job."""
    precision: Precision = "fp32"
    """fp32: in the type of the weights; bf16, fp16: under autocast; fp64: everything in float64, several times slower,
    but batch size, threads and machine change ids about half a billion times less often."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of each process on the CPU; more processes are faster than more threads."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Largest share of samples that may be unusable; they are left out."""


def tokenize(options: Options) -> WorkResult:
    """Tokenize what no other process has done or is doing; under torchrun all processes share the shards.

    Raises:
        VqclipError: for anything a user can correct; the message says how.
    """
    require_pyarrow()  # now, not after the first shard
    device = dist.choose_device(options.device, "--device")
    dist.init(device)
    try:
        source = _open_source(options)
        rank, world_size = dist.rank(), dist.world_size()
    finally:
        dist.shutdown()
    maker = ShardMaker(options, source.fingerprint, source.shards, device)
    folder, sizes = maker.folder, [len(ids) for ids in maker.ids]
    for shard in range(rank, len(sizes), world_size):
        folder.record(shard, verify=True)
    records = [folder.record(shard) for shard in range(len(sizes))]
    bad = sum(len(record.bad) for record in records if record is not None)
    left = [shard for shard, record in enumerate(records) if record is None]
    seen = made = 0
    start, position = time.monotonic(), sum(sizes) - sum(sizes[shard] for shard in left)
    with ProgressBar(sum(sizes), position, rank == 0, "tokenize", "sample") as bar:
        for shard in folder.claim(left):
            done = sum(size for each, size in enumerate(sizes) if folder.record_path(each).exists())
            bar.advance(done - position)  # by what others have made
            position = done
            for count in maker.make(source, shard, 0, bad):
                seen, position = seen + count, position + count
                bar.advance(count)
                bar.show()
            record = folder.record(shard)
            bad, made = bad + (0 if record is None else len(record.bad)), made + 1
    return finish_folder(options, folder, made, len(sizes) - len(left), seen, start)


def tokenize_on_ray(options: Options, ray: RayOptions) -> WorkResult:
    """Tokenize a data set of tars on Ray; shards are made and recorded as by `tokenize`, and have the same bytes.

    The output folder, and data that are not at URLs, must have the same path on all machines. A worker reads one shard
    at a time, so that it needs the index of no other.

    Raises:
        VqclipError: for anything a user can correct; the message says how.
    """
    require_pyarrow()
    if not hasattr(options.data, "build_part"):
        raise ConfigError(
            f"--engine ray: got data of kind {options.data.kind}; expected tars (vqclip data pack), or --engine local"
        )
    made, seen, bad, folder = 0, 0, list[str](), None
    with connect_to_ray(ray, options.threads + options.workers, options.device) as cluster:
        source = _open_source(options)
        start, sizes = time.monotonic(), [int(shard["samples"]) for shard in source.shards]
        tars = tuple(options.data.tars())  # type: ignore[attr-defined]
        open_job = partial(_open_maker, options, tars, source.fingerprint, source.shards, cluster.on_gpu)
        with ProgressBar(sum(sizes), 0, True, "tokenize", "sample") as bar:
            for shard, is_new in cluster.map(open_job, range(len(sizes)), "shard"):
                made, seen = made + is_new, seen + is_new * sizes[shard]
                folder, record = _wait_for(options.out, shard, folder)
                bad += [each.reason for each in record.bad]
                require_few_bad(bad, len(bad), allowed_bad(options.tolerance, sum(sizes)), "--tolerance")
                bar.advance(sizes[shard])
                bar.show()
    assert folder is not None  # there is a shard
    return finish_folder(options, folder, made, len(sizes) - made, seen, start)


def _open_source(options: Options) -> ShardedSource:
    """Index and open the data set; a collective."""
    (source,) = open_sources([options.data])
    if not hasattr(source, "key"):
        raise ConfigError(f"--data: kind {options.data.kind} has no shards; write some first (vqclip data pack)")
    return cast(ShardedSource, source)


def _open_maker(
    options: Options, tars: Sequence[Shard], data: dict[str, Any], facts: Sequence[dict[str, Any]], on_gpu: bool
) -> Callable[[int], bool]:
    """Load the tokenizers; return the function that makes a shard, and returns whether it was not finished before."""
    maker = ShardMaker(options, data, facts, dist.choose_device("cuda" if on_gpu else "cpu", "--device"))

    def make(shard: int) -> bool:
        if maker.folder.record(shard, verify=True) is not None:
            return False
        for _ in maker.folder.claim([shard], wait=True):
            source = options.data.build_part([tars[shard]])  # type: ignore[attr-defined]
            if source.shards[0]["sha256"] != facts[shard]["sha256"]:
                raise StorageError(
                    f"{tars[shard]}: the shard has changed since it was indexed, or is another one on machine "
                    f"{os.uname().nodename}; run the command again when it is complete",
                    "changed shard",
                )
            for _ in maker.make(source, shard, maker.ids[shard].start):
                pass
        return True

    return make


def _wait_for(out: Path, shard: int, folder: WorkFolder | None) -> tuple[WorkFolder, ItemRecord]:
    """Return the folder and the record of a shard when this machine sees what a worker wrote, or raise ConfigError.

    The folder is opened once, with the settings that the workers wrote: they know the names of their devices.
    """
    end = time.monotonic() + VISIBLE_S
    while True:
        folder = folder or WorkFolder.existing(out, LAYOUT)
        if folder is not None and (record := folder.record(shard)) is not None:
            return folder, record
        if time.monotonic() > end:
            raise ConfigError(
                f"--out: this machine does not see what a worker of Ray wrote to {out}; expected a folder that "
                "all machines share, under the same path"
            )
        time.sleep(1)


class ShardMaker:
    """Loaded tokenizers, and the work folder that they write to.

    Args:
        options: of the command.
        data: fingerprint of the whole data set.
        facts: `ShardedSource.shards` of the whole data set.
        device: of the tokenizers.

    Attributes:
        folder: the work folder.
        ids: numbers of the samples of each shard in the whole data set.
        most_bad: largest number of samples that may be left out.

    Raises:
        VqclipError: the tokenizers cannot be used, or the folder was begun with other settings.
    """

    def __init__(self, options: Options, data: dict[str, Any], facts: Sequence[dict[str, Any]], device: torch.device):
        torch.set_num_threads(options.threads)
        if device.type == "cpu":
            keep_freed_memory()
        self._options = options
        self._image, self._text, info = _load_tokenizers(options, device)
        self._settings = Settings(
            tokenizer=info,
            image=_layout(self._image),
            text=_layout(self._text),
            context_length=None if self._text is None else self._text.preprocess.context_length,
            batch_size=options.batch_size,
            precision=options.precision,
            device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
            threads=options.threads,
            max_pixels=MAX_PIXELS,
            made_with={name: importlib.metadata.version(name) for name in _MADE_WITH},
            data=data,
            shards=tuple(facts),
        )
        self.folder = WorkFolder(options.out, self._settings.model_dump(mode="json"), len(facts), LAYOUT)
        ends = itertools.accumulate((shard["samples"] for shard in facts), initial=0)
        self.ids = [range(start, stop) for start, stop in itertools.pairwise(ends)]
        self.most_bad = allowed_bad(options.tolerance, self.ids[-1].stop)

    def make(self, source: ShardedSource, shard: int, first: int, bad: int = 0) -> Iterator[int]:
        """Make a token shard that this process has claimed; yield the number of samples read since the last time.

        Args:
            source: reads the samples.
            shard: number of the shard.
            first: number of the source's first sample in the whole data set.
            bad: number of samples left out before.

        Raises:
            DataError: more samples cannot be used than are allowed, or the shard cannot be read.
        """
        options, settings, image = self._options, self._settings, self._image
        read = partial(_read_batch, source, first, options.batch_size, None if image is None else image.transform)
        batches = slices_of(self.ids[shard], options.batch_size)
        records: list[TokenRecord] = []
        left_out: list[dict[str, Any]] = []
        with explain_worker_deaths("tokenize"):
            for batch, images in ordered_map(read, batches, options.workers, timeout_s=240.0, section="tokenize"):
                for each in batch.bad:
                    key = source.key(each.sample_id - first)
                    left_out.append({"sample_id": each.sample_id, "key": key, "kind": each.kind, "reason": each.reason})
                require_few_bad(
                    (each["reason"] for each in left_out), len(left_out) + bad, self.most_bad, "--tolerance"
                )
                found = [*batch.found.values()]
                if image is not None and images is not None:
                    ids = _encode(image, images, options.precision)
                    rows = [strip_padding(ids[number - batch.ids[0]], image.codebook_sizes) for number in batch.found]
                    found = [each._replace(image=row) for each, row in zip(found, rows, strict=True)]
                records += found
                yield len(batch.ids)
        lengths = CaptionLengths()
        if self._text is not None:
            records, lengths = encode_captions(self._text, records, options.batch_size, options.precision)
        file = write_file(self.folder.file(shard), lambda out: write_shard(out, records, settings.image, settings.text))
        self.folder.add_record(shard, file, len(records), left_out, lengths=sorted(lengths.items()))


def finish_folder(
    options: Options, folder: WorkFolder, made: int, found: int, samples: int, start: float
) -> WorkResult:
    """Write the manifest if every shard is finished, and return the work since `start`, see `WorkResult`.

    Raises:
        DataError: more samples were left out than are allowed; the message names some.
    """
    manifest = note = None
    if (records := folder.records()) is not None:
        manifest = folder.finish(records, options.tolerance, "--tolerance")
        lengths, longest = CaptionLengths(), folder.settings["context_length"]
        for record in records:
            lengths.update(dict(record.facts["lengths"]))
        note = None if longest is None else lengths.describe_cuts(longest, "the text tower's context_length")
    return WorkResult(made, found, folder.missing(), samples, time.monotonic() - start, manifest, note)


def _load_tokenizers(
    options: Options, device: torch.device
) -> tuple[ImageTokenizer | None, TextTokenizer | None, TokenizerInfo]:
    """Load the tokenizers and describe them, both from one folder in one state."""
    folder = find_folder(options.tokenizer)  # once: a hub name may change its meaning
    body, _ = read_json(folder / CONFIG_FILE)
    opened = TokenizerFolder.open(folder)
    image: Any = load_whole(opened, "image").to(device) if options.modality != "text" else None
    text: Any = load_whole(opened, "text").to(device) if options.modality != "image" else None
    if read_json(folder / CONFIG_FILE)[0] != body:
        raise CheckpointError(f"{folder}: changed while it was loaded; run the command again")
    info = TokenizerInfo(
        image=None if image is None else fingerprint(image),
        text=None if text is None else fingerprint(text),
        weights=body["weights"]["sha256"],
        config=body["sha256"],
        id_layout=body["id_layout"],
    )
    for tokenizer in (image, text):
        if tokenizer is not None and options.precision == "fp64":
            tokenizer.double()
    return image, text, info


def _layout(tokenizer: ImageTokenizer | TextTokenizer | None) -> IdLayout | None:
    if tokenizer is None:
        return None
    tokenizer.require_codes("--tokenizer:")
    tokenizer.require_image_size("a token shard")
    padded, sizes = isinstance(tokenizer, TextTokenizer), tokenizer.codebook_sizes
    try:
        return IdLayout(num_tokens=tokenizer.num_tokens, codebook_sizes=sizes, padded=padded)
    except ValidationError as error:
        raise ConfigError(f"--tokenizer: {tokenizer.modality}: {problem_message(error.errors()[0])}") from None


def _read_batch(
    source: ShardedSource,
    first: int,
    batch_size: int,
    transform: Callable[[Tensor], Tensor] | None,
    ids: Sequence[int],
) -> tuple[SamplesRead[TokenRecord], Tensor | None]:
    """Read some consecutive samples of one shard, at most B, in a worker.

    Args:
        source: reads the samples.
        first: number of the source's first sample in the whole data set.
        batch_size: B.
        transform: ``(3, H, W)`` uint8 → ``(3, S, S)`` uint8; None if no images are wanted.
        ids: numbers of the samples.

    Returns:
        The samples, without ids; and their images ``(B, 3, S, S)`` uint8 by their place in the batch, always with all B
        rows: black without a sample; None without usable or wanted images.

    Raises:
        StorageError: the shard cannot be fetched.
    """
    images: Tensor | None = None

    def read(sample_id: int) -> TokenRecord:
        nonlocal images
        index = sample_id - first
        if transform is None:
            sample = source.read(index)
        else:
            sample, decoded = read_decoded(source, index, MAX_PIXELS)
            image = transform(decoded)
            images = image.new_zeros(batch_size, *image.shape) if images is None else images
            images[sample_id - ids[0]] = image
        return TokenRecord(source.key(index), sample_id, sample.label, sample.captions, None, None)

    return read_in_order(read, ids), images


def encode_captions(
    tokenizer: TextTokenizer, records: Sequence[TokenRecord], batch_size: int, precision: Precision
) -> tuple[list[TokenRecord], CaptionLengths]:
    """Encode each distinct caption once, in batches that are padded with empty captions.

    Returns:
        The samples with the ids of their captions, and the lengths of all captions in tokens.
    """
    lengths, known = CaptionLengths(), dict[str, np.ndarray]()
    counts = Counter(caption for record in records for caption in record.captions)
    for some in slices_of([*counts], batch_size):
        tokens, sizes = tokenizer.preprocess.with_lengths([*some, *[""] * (batch_size - len(some))])
        for caption, size, ids in zip(some, sizes, _encode(tokenizer, tokens, precision), strict=False):
            lengths[size] += counts[caption]
            known[caption] = strip_padding(ids, tokenizer.codebook_sizes)
    return [each._replace(texts=tuple(known[caption] for caption in each.captions)) for each in records], lengths


@torch.inference_mode()
def _encode(tokenizer: ImageTokenizer | TextTokenizer, inputs: Tensor, precision: Precision) -> np.ndarray:
    """Return ids ``(B, N, C)`` int64."""
    return tokenizer.encode(inputs, precision).cpu().numpy()
