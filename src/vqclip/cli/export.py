"""Commands that take something out of a run: ``vqclip tokenize``, ``export``, ``export-tokenizer``, ``copy-run``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vqclip.cli.options import (
    BadFraction,
    BatchSize,
    Command,
    Data,
    LocalPath,
    OnRay,
    Text,
    Tokenizer,
    Weights,
    Workers,
    paths_and_overrides,
)
from vqclip.errors import ConfigError
from vqclip.runlog.console import fit_lines, print_output

if TYPE_CHECKING:
    from torch import Tensor

    from vqclip.data import Source
    from vqclip.export.to_onnx import AnyTokenizer

_BAD_FRACTION = 0.01
"""Largest share of the samples to compare that may be unusable."""
_RANDOM_INPUTS = 64
_WORDS = ("a", "red", "small", "blue", "old", "river", "star", "house", "of", "under", "tree", "7", "?")


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


class Export(Command, words=("tokenizer",)):
    """Export a tokenizer to ONNX, and compare the ids of the files with its own; or towers to open_clip.

    Without --data the comparison uses random inputs: noise images, or captions of six words. --open-clip writes the
    towers of both tokenizers back into the open_clip model that they came from. The joint embedding of vqclip is no
    part of it; vqclip.integrations.open_clip gives any folder the methods of an open_clip model.

    Examples:
      vqclip export runs/base --modality image --out onnx/image --data path/to/cls_eurosat split=test
      vqclip export runs/base --modality text --out onnx/text --data 'val/{00000..00003}.tar'
      vqclip export --open-clip runs/base --out towers
    """

    tokenizer: Tokenizer
    modality: Literal["image", "text"] | None = None
    """Tokenizer to export."""
    out: LocalPath
    """Folder of the ONNX files, or of the model."""
    open_clip: bool = False
    """Write both towers into an open_clip model."""
    base: Text | None = None
    """With --open-clip: tag or file of the weights that the towers started from; without it what config.yaml names."""
    data: Data = ()
    batch_size: BatchSize = 50
    """Batch size of the comparison."""
    limit: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """Compare at most this number of inputs, evenly spread."""

    def run(self) -> None:
        """Export a tokenizer, and compare; or write towers into an open_clip model."""
        from vqclip.data import mask_credentials
        from vqclip.data.prepare import open_images
        from vqclip.export.runtime import verify
        from vqclip.export.to_onnx import export_onnx
        from vqclip.io.files import format_bytes
        from vqclip.tokenizer.loading import load_tokenizer

        if self.open_clip:
            self._export_open_clip()
            return
        if self.modality is None:
            raise ConfigError("--modality: got none; expected image or text (or --open-clip, for both)")
        if self.base is not None:
            raise ConfigError("--base: got it without --open-clip; expected both or neither")
        if self.limit is not None and not self.data:
            raise ConfigError("--limit: got it without --data; expected both or neither")
        source = open_images(*paths_and_overrides(self.data)) if self.data else None
        tokenizer = load_tokenizer(self.tokenizer, self.modality)
        export_onnx(tokenizer, self.out)
        sizes = ", ".join(f"{path.name} {format_bytes(path.stat().st_size)}" for path in sorted(self.out.iterdir()))
        print_output(f"{self.out}: {sizes}")
        inputs = list(batches(tokenizer, source, self.batch_size, self.limit))
        compared = mask_credentials(" ".join(self.data)) or f"{_RANDOM_INPUTS} random inputs"
        print_output(f"compared on: {compared}, batches of {self.batch_size}")
        print_output(f"onnxruntime: {verify(self.out, tokenizer, inputs)}")

    def _export_open_clip(self) -> None:
        from vqclip.export.open_clip import export_towers
        from vqclip.io.tensors import first_names
        from vqclip.tokenizer.folder import find_folder

        others = ("modality", "data", "limit")
        if given := [name for name in others if getattr(self, name)]:
            raise ConfigError(f"--{given[0].replace('_', '-')}: got it with --open-clip, to which it does not apply")
        folder = find_folder(self.tokenizer)
        written, kept = export_towers(folder, self.base or _base_of(folder.parent), self.out)
        print_output(
            f"{self.out}: {len(written)} tensors of the towers, {len(kept)} of the base checkpoint "
            f"({first_names(kept)}); open_clip loads it as local-dir:{self.out}"
        )


class ExportTokenizer(Command, words=("run_",)):
    """Write the tokenizer folder of any checkpoint of a run."""

    run_: LocalPath
    """The run's folder, such as runs/base."""
    step: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Step of the checkpoint; the newest without it."""
    best: bool = False
    """Take the best checkpoint; see train.keep_best."""
    out: LocalPath | None = None
    """Folder to write; tokenizer-step-<step> in the run's folder without it."""
    weights: Weights = "averaged"

    def run(self) -> None:
        """Write the folder."""
        from vqclip.runlog.records import read_best
        from vqclip.train.export import export_checkpoint

        if self.best and self.step is not None:
            raise ConfigError("--best: got it with --step; expected one of them")
        step = read_best(self.run_) if self.best else self.step
        print_output(str(export_checkpoint(self.run_, step, self.out, self.weights)), for_programs=True)


class CopyRun(Command, words=("url", "folder")):
    """Copy a run whose run.folder is a URL: its files, and its newest checkpoint, verified."""

    url: Text
    """URL of the run, such as s3://bucket/runs/base."""
    folder: LocalPath
    """Folder to write, such as runs/base."""

    def run(self) -> None:
        """Copy it."""
        from vqclip.train.run_store import copy_run

        print_output(str(copy_run(self.url, self.folder)), for_programs=True)


def _base_of(run: Path) -> str:
    """Return the pretrained weights that a run's configuration names."""
    from vqclip.config import load_config
    from vqclip.train import TrainConfig

    path = run / "config.yaml"
    if path.is_file():
        towers = load_config(TrainConfig, path).model.towers
        if towers is not None and towers.pretrained is not None:
            return towers.pretrained
    raise ConfigError(
        f"--base: got none, and no {path} with model.towers.pretrained; expected a tag or file of the weights that the "
        "towers started from: an exported folder does not contain open_clip's projections"
    )


def batches(tokenizer: AnyTokenizer, source: Source | None, size: int, limit: int | None = None) -> Iterator[Tensor]:
    """Yield batches of inputs of ``encode``: all images or captions of the source, or random ones without a source."""
    from vqclip.data import EvalSet
    from vqclip.tokenizer import ImageTokenizer

    if source is None:
        yield from _random_inputs(tokenizer).split(size)
    elif isinstance(tokenizer, ImageTokenizer):
        for batch in EvalSet(source, tokenizer.transform, size, limit=limit, max_bad_fraction=_BAD_FRACTION):
            if len(batch):
                yield batch.images
    else:
        captions = _captions(source)
        kept = [captions[place * len(captions) // limit] for place in range(limit)] if limit else captions
        for start in range(0, len(kept), size):
            yield tokenizer.preprocess(kept[start : start + size])


def _random_inputs(tokenizer: AnyTokenizer) -> Tensor:
    """Return noise images, or captions of six words, drawn with seed 0."""
    import torch

    from vqclip.tokenizer import ImageTokenizer

    generator = torch.Generator().manual_seed(0)
    if isinstance(tokenizer, ImageTokenizer):
        size = tokenizer.tower.image_size
        return torch.randint(0, 256, (_RANDOM_INPUTS, 3, size, size), dtype=torch.uint8, generator=generator)
    picks = torch.randint(0, len(_WORDS), (_RANDOM_INPUTS, 6), generator=generator).tolist()
    return tokenizer.preprocess([" ".join(_WORDS[word] for word in row) for row in picks])


def _captions(source: Source) -> list[str]:
    """Return the distinct captions of all samples; for labelled data, the prompts of all classes."""
    from vqclip.data.in_order import read_captions

    if source.classnames:
        return [prompt.replace("{c}", name) for name in source.classnames for prompt in source.templates]
    read = read_captions(source, _BAD_FRACTION)
    return list(dict.fromkeys(caption for captions in read.values() for caption in captions))
