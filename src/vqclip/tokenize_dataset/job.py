"""Tokenize a data set: the processes of a job share the shards, and each becomes one token shard."""

from __future__ import annotations

import time
from typing import cast

import torch

from vqclip import dist
from vqclip.data import ShardedSource, open_source, prepare_sources
from vqclip.data.libraries import require_pyarrow
from vqclip.data.shard_folder import WorkResult
from vqclip.data.tokens import Manifest
from vqclip.errors import ConfigError
from vqclip.process.memory import keep_freed_memory
from vqclip.runlog.bar import ProgressBar
from vqclip.tokenize_dataset.maker import ShardMaker, allowed_bad, describe_cuts, describe_shards
from vqclip.tokenize_dataset.options import Options

__all__ = ["Options", "tokenize"]


def tokenize(options: Options) -> WorkResult[Manifest]:
    """Tokenize this process's part of the shards; under torchrun every process takes every W-th shard.

    The processes index the shards together; after that none waits for another.

    Raises:
        VqclipError: for anything a user can correct; the message says how.
    """
    require_pyarrow()  # now, not after the first shard
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
    built = open_source(options.data)
    if not hasattr(built, "key"):
        raise ConfigError(f"--data: kind {options.data.kind} has no shards; write some first (vqclip data pack)")
    source = cast(ShardedSource, built)
    maker = ShardMaker(options, source.fingerprint, describe_shards(source.shards), device)
    share = range(len(maker.folder.settings.shards))[rank::world_size]
    return _tokenize(options, source, maker, share, visible=rank == 0)


def _tokenize(
    options: Options, source: ShardedSource, maker: ShardMaker, share: range, visible: bool
) -> WorkResult[Manifest]:
    folder = maker.folder
    sizes = [shard.samples for shard in folder.settings.shards]
    there = {shard: facts for shard in share if (facts := folder.find_finished(shard)) is not None}
    wanted = [shard for shard in share if shard not in there]
    bad = sum(sum(facts.bad.values()) for facts in there.values())
    start, seen = time.monotonic(), 0
    samples, done = sum(sizes[shard] for shard in share), sum(sizes[shard] for shard in there)
    with ProgressBar(samples, done, visible, "tokenize", "sample") as bar:
        for progress in maker.make(source, wanted, bad):
            if progress.samples:
                bar.advance(progress.samples)
                bar.show()
                seen += progress.samples
    manifest = folder.finish(allowed_bad(options, folder.settings.shards))
    cut = describe_cuts(maker.lengths, maker.context_length)
    return WorkResult(len(wanted), len(there), seen, time.monotonic() - start, folder.missing(), manifest, cut)
