"""``vqclip tokenize``: turn image-text shards into token shards."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field

from vqclip.cli.options import (
    BadFraction,
    BatchSize,
    Data,
    LocalPath,
    OnRay,
    Tokenizer,
    Workers,
    paths_and_overrides,
)
from vqclip.runlog.console import fit_lines


class Tokenize(OnRay, failure=1, after_interrupt="run the same command to continue"):
    """Turn image-text shards into token shards with captions and sample ids, one for each input shard.

    Run the same command again to continue after a stop. docs/reuse.md describes the files that it writes.

    Examples:
      vqclip tokenize --tokenizer runs/base --data '/datasets/mine/{00000..00999}.tar' --out tokens/mine
      vqclip tokenize --tokenizer runs/eurosat --data data/cls_eurosat split=train --out tokens/eurosat
      torchrun --standalone --nproc-per-node 8 -m vqclip tokenize --tokenizer ... --data ... --out ...
      vqclip tokenize --engine ray --ray-address auto --tokenizer ... --data s3://bucket/all --out ...
    """

    tokenizer: Tokenizer
    data: Data
    out: LocalPath
    """Folder of the token shards and manifest.json."""
    modality: Literal["image", "text", "both"] = "both"
    """Data to tokenize; image: the images of a folder need no captions."""
    batch_size: BatchSize = 64
    """Samples in a batch; the last batch of a shard is padded."""
    workers: Workers = 0
    """Worker processes that decode images, for each process of the job."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """fp32: in the type of the weights; bf16, fp16: under autocast; fp64: everything in float64, several times slower,
    but batch size, threads and machine change ids about half a billion times less often."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of each process on the CPU; more processes are faster than more threads."""
    tolerance: BadFraction = 0.01
    """Largest share of samples that may be unusable; they are left out."""

    def run(self) -> None:
        """Write the token shards; it returns when this process has done its part of the work."""
        from vqclip import dist
        from vqclip.data import parse_source
        from vqclip.data.sources.folder import FolderConfig
        from vqclip.tokenize_dataset.job import Options, tokenize, tokenize_on_ray

        dist.stop_with_launcher()
        ray = self.cluster
        data = parse_source(*paths_and_overrides(self.data))
        data.require_no_weight("vqclip tokenize")
        if self.modality == "image" and isinstance(data, FolderConfig):
            data = data.with_all_images()
        fields = self.model_dump(include={*Options.model_fields} - {"data", "out"})
        job = Options(data=data, out=self.out.expanduser().absolute(), **fields)
        done = tokenize(job) if ray is None else tokenize_on_ray(job, ray)
        who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(fit_lines(done.describe(self.out, who)), flush=True)
