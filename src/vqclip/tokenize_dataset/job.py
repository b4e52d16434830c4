"""Tokenize a data set: the processes of a job share the shards, and each becomes one token shard."""

from __future__ import annotations

import importlib.metadata
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
from pydantic import Field, ValidationError

from vqclip import dist
from vqclip.config import Config
from vqclip.data import ShardedSource, SourceConfigBase, prepare_sources
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.libraries import require_pyarrow
from vqclip.data.shard_folder import WorkResult, require_few_bad
from vqclip.data.tokens import IdLayout, Manifest
from vqclip.data.tokens.manifest import Settings, SourceShard, TokenizerInfo
from vqclip.data.workers import explain_worker_deaths, ordered_map
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.json_files import problem_message, read_json
from vqclip.nn.precision import Precision
from vqclip.process.memory import keep_freed_memory
from vqclip.runlog.bar import ProgressBar
from vqclip.tokenize_dataset.batches import DecodedBatch, ShardBatches
from vqclip.tokenize_dataset.encode import EncodedShard, Encoders
from vqclip.tokenize_dataset.folder import TokenFolder
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.tokenizer.fingerprint import fingerprint
from vqclip.tokenizer.folder import CONFIG_FILE, TokenizerFolder
from vqclip.tokenizer.hub import find_folder
from vqclip.tokenizer.loading import load_tokenizer

__all__ = ["Options", "tokenize"]

_MADE_WITH = ("torch", "torchvision", "pillow", "open_clip_torch", "timm")


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
    format: Literal["wds", "parquet"] = "wds"
    """Format of the token shards: WebDataset tars or Parquet."""
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
    max_pixels: int = MAX_PIXELS
    """Larger images are unusable."""
    timeout_s: float = 240.0
    """Longest wait for a worker."""


def tokenize(options: Options) -> WorkResult[Manifest]:
    """Tokenize this process's part of the shards; under torchrun every process takes every W-th shard.

    The processes index the shards together; after that none waits for another.

    Raises:
        VqclipError: for anything a user can correct; the message says how.
    """
    if options.format == "parquet":
        require_pyarrow("; tars (wds) need nothing more")  # now, not after the first shard
    device = dist.choose_device(options.device, "--device")
    torch.set_num_threads(options.threads)
    dist.init(device)
    try:
        prepare_sources([options.data])
        rank, world_size = dist.rank(), dist.world_size()
    finally:
        dist.shutdown()
    if device.type == "cpu":
        keep_freed_memory()
    built = options.data.build()
    if not hasattr(built, "key"):
        raise ConfigError(f"--data: kind {options.data.kind} has no shards; write some first (vqclip data pack)")
    source = cast(ShardedSource, built)
    encoders, facts = _encoders(options, device)
    folder = TokenFolder(options.out, _settings(options, encoders, facts, source, device))
    share = range(len(folder.settings.shards))[rank::world_size]
    return _tokenize(options, source, encoders, folder, share, visible=rank == 0)


def _tokenize(
    options: Options, source: ShardedSource, encoders: Encoders, folder: TokenFolder, share: range, visible: bool
) -> WorkResult[Manifest]:
    sizes = [shard.samples for shard in folder.settings.shards]
    allowed = int(options.tolerance * sum(sizes))
    there = {shard: facts for shard in share if (facts := folder.find_finished(shard)) is not None}
    wanted = [shard for shard in share if shard not in there]
    batches = ShardBatches(
        source,
        wanted,
        options.batch_size,
        None if encoders.image is None else encoders.image.transform,
        0 if encoders.image is None else encoders.image.tower.image_size,
        options.max_pixels,
    )
    bad = sum(sum(facts.bad.values()) for facts in there.values())
    start, seen = time.monotonic(), 0
    samples, done = sum(sizes[shard] for shard in share), sum(sizes[shard] for shard in there)
    with explain_worker_deaths("tokenize"), ProgressBar(samples, done, visible, "tokenize", "sample") as bar:
        for shard, parts in _by_shard(batches, options):
            collected = EncodedShard(encoders)
            for batch in parts:
                collected.add(batch)
                reasons = (str(each["reason"]) for each in collected.bad)
                require_few_bad(reasons, bad + len(collected.bad), allowed, folder.bad_option)
                bar.advance(batch.size)
                bar.show()
                seen += batch.size
            bad += len(collected.bad)
            folder.write(shard, collected.records(), len(collected), collected.bad)
    manifest = folder.finish(allowed)
    told = encoders.text and encoders.lengths.describe_cuts(
        encoders.text.preprocess.context_length, "the text tower's context_length"
    )
    return WorkResult(len(wanted), len(there), seen, time.monotonic() - start, folder.missing(), manifest, told or None)


def _by_shard(batches: ShardBatches, options: Options) -> Iterator[tuple[int, Iterator[DecodedBatch]]]:
    decoded = ordered_map(
        batches, range(len(batches)), options.workers, timeout_s=options.timeout_s, section="tokenize"
    )
    return itertools.groupby(decoded, key=lambda batch: batch.shard)


def _encoders(options: Options, device: torch.device) -> tuple[Encoders, TokenizerInfo]:
    """Load the tokenizers and describe them, both from one folder in one state."""
    home = find_folder(options.tokenizer)  # once: a name on the hub may mean another model a moment later
    TokenizerFolder.open(home)  # verifies it
    body, _ = read_json(home / CONFIG_FILE)
    image: ImageTokenizer | None = None
    text: TextTokenizer | None = None
    if options.modality in ("image", "both"):
        image = load_tokenizer(home, "image").to(device)
    if options.modality in ("text", "both"):
        text = load_tokenizer(home, "text").to(device)
    for tokenizer in (image, text):
        if tokenizer is not None and not tokenizer.codebook_sizes:
            raise ConfigError(
                f"--tokenizer: the {tokenizer.modality} tokenizer in {options.tokenizer} has no codes (its quantizer "
                "is the identity), so there are no ids; expected one with a codebook"
            )
    if read_json(home / CONFIG_FILE)[0] != body:
        raise CheckpointError(f"{home}: changed while it was loaded; run the command again")
    facts = TokenizerInfo(
        image=None if image is None else fingerprint(image),
        text=None if text is None else fingerprint(text),
        weights=body["weights"]["sha256"],
        config=body["sha256"],
        id_layout=body["id_layout"],
    )
    return Encoders(image, text, options.batch_size, options.precision), facts


def _settings(
    options: Options, encoders: Encoders, facts: TokenizerInfo, source: ShardedSource, device: torch.device
) -> Settings:
    image, text = encoders.image, encoders.text
    return Settings(
        storage=options.format,
        tokenizer=facts,
        image=None if image is None else _layout(image),
        text=None if text is None else _layout(text),
        batch_size=options.batch_size,
        precision=options.precision,
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        threads=options.threads,
        max_pixels=options.max_pixels,
        made_with={name: importlib.metadata.version(name) for name in _MADE_WITH},
        data=source.fingerprint,
        shards=tuple(
            SourceShard(
                name=str(shard["name"]),
                size=int(shard["bytes"]),
                samples=int(shard["samples"]),
                sha256=str(shard["sha256"]),
            )
            for shard in source.shards
        ),
    )


def _layout(tokenizer: ImageTokenizer | TextTokenizer) -> IdLayout:
    padded = isinstance(tokenizer, TextTokenizer)
    sizes = tokenizer.codebook_sizes
    try:
        return IdLayout(num_tokens=tokenizer.num_tokens, codebook_sizes=sizes, padded=padded)
    except ValidationError as error:
        raise ConfigError(f"--tokenizer: {tokenizer.modality}: {problem_message(error.errors()[0])}") from None
