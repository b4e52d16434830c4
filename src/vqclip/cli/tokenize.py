"""``vqclip tokenize``: turn image-text shards into token shards."""

from __future__ import annotations

import argparse
import os

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.data import parse_source
from vqclip.data.remote import protocol_of
from vqclip.errors import ConfigError
from vqclip.tokenize_dataset.job import Options, tokenize, tokenize_on_ray

__all__ = ["run"]

_FIELDS = ("modality", "batch_size", "workers", "precision", "device", "threads", "tolerance")


def run(options: argparse.Namespace) -> None:
    """Write the token shards; it returns when this process has done its part of the work."""
    dist.stop_with_launcher()
    ray = types.ray_options(options)
    paths, overrides = types.paths_and_overrides(options.data)
    if not paths:
        raise ConfigError(f"--data: got {' '.join(options.data)!r}; expected a path before it")
    at_urls = protocol_of(paths[0]) not in (None, "file")
    data = parse_source(paths, overrides, kind="shards" if at_urls else None)
    data.require_no_weight("vqclip tokenize")
    fields = {name: getattr(options, name) for name in ("tokenizer", *_FIELDS)}
    job = Options(data=data, out=options.out.expanduser().absolute(), **fields)
    done = tokenize(job) if ray is None else tokenize_on_ray(job, ray)
    who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    print(done.describe(options.out, who), flush=True)
