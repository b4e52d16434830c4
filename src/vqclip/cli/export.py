"""``vqclip export``: write a tokenizer as ONNX files, and compare their ids with its own; or towers to open_clip."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from vqclip.config import load_config
from vqclip.data import EvalSet, Source, mask_credentials
from vqclip.data.prepare import open_images
from vqclip.errors import ConfigError
from vqclip.export.agreement import verify, verify_program
from vqclip.export.open_clip import export_towers
from vqclip.export.program import AnyTokenizer
from vqclip.export.runtime import OnnxTokenizer
from vqclip.export.to_onnx import export_onnx
from vqclip.io.files import expand_home
from vqclip.runlog.console import print_output
from vqclip.tokenizer import ImageTokenizer
from vqclip.tokenizer.folder import CONFIG_FILE
from vqclip.tokenizer.loading import load_tokenizer

_RANDOM_INPUTS = 64
_WORDS = ("a", "red", "small", "blue", "old", "river", "star", "house", "of", "under", "tree", "7", "?")


def run(options: argparse.Namespace) -> None:
    """Export a tokenizer, and compare; or write towers into an open_clip model."""
    if options.open_clip:
        _export_open_clip(options)
        return
    if options.modality is None:
        raise ConfigError("--modality: got none; expected image or text (or --open-clip, for both)")
    if options.base is not None:
        raise ConfigError("--base: got it without --open-clip; expected both or neither")
    for name in ("split", "limit"):
        if options.data is None and getattr(options, name) is not None:
            raise ConfigError(f"--{name}: got it without --data; expected both or neither")
    if options.compare_only and options.precision:
        raise ConfigError("--precision: got it with --compare-only, which writes no files; expected one of them")
    source = None if options.data is None else open_images(options.data, options.split)
    precision = OnnxTokenizer(options.out).precision if options.compare_only else options.precision
    tokenizer = load_tokenizer(options.tokenizer, options.modality)
    if precision == "fp64":
        tokenizer.double()
    if not options.compare_only:
        export_onnx(tokenizer, options.out)
        sizes = ", ".join(f"{path.name} {path.stat().st_size:,} bytes" for path in sorted(options.out.iterdir()))
        print_output(f"{options.out}: {sizes}")
    inputs = list(batches(tokenizer, source, options.batch_size, options.limit))
    compared = f"{_RANDOM_INPUTS} random inputs" if options.data is None else mask_credentials(options.data)
    print_output(f"compared on: {compared}, batches of {options.batch_size}")
    print_output(f"onnxruntime: {verify(options.out, tokenizer, inputs)}")
    if options.program:
        print_output(f"torch.export: {verify_program(tokenizer, inputs)}")


def _export_open_clip(options: argparse.Namespace) -> None:
    others = ("modality", "precision", "compare_only", "data", "split", "limit", "program")
    if given := [name for name in others if getattr(options, name)]:
        raise ConfigError(f"--{given[0].replace('_', '-')}: got it with --open-clip, to which it does not apply")
    folder = expand_home(options.tokenizer)
    run = folder if (folder / "tokenizer" / CONFIG_FILE).is_file() else folder.parent
    inside = folder / "tokenizer" if run == folder else folder
    print_output(export_towers(inside, options.base or _base_of(run), options.out).describe())


def _base_of(run: Path) -> str:
    """Return the pretrained weights that a run's configuration names."""
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
    if source is None:
        yield from _random_inputs(tokenizer).split(size)
    elif isinstance(tokenizer, ImageTokenizer):
        for batch in EvalSet(source, tokenizer.transform, size, limit=limit):
            yield batch.images
    else:
        captions = _captions(source)
        kept = [captions[place * len(captions) // limit] for place in range(limit)] if limit else captions
        for start in range(0, len(kept), size):
            yield tokenizer.preprocess(kept[start : start + size])


def _random_inputs(tokenizer: AnyTokenizer) -> Tensor:
    """Return noise images, or captions of six words, drawn with seed 0."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(tokenizer, ImageTokenizer):
        size = tokenizer.tower.image_size
        return torch.randint(0, 256, (_RANDOM_INPUTS, 3, size, size), dtype=torch.uint8, generator=generator)
    picks = torch.randint(0, len(_WORDS), (_RANDOM_INPUTS, 6), generator=generator).tolist()
    return tokenizer.preprocess([" ".join(_WORDS[word] for word in row) for row in picks])


def _captions(source: Source) -> list[str]:
    """Return the distinct captions of all samples; for labelled data, the prompts of all classes."""
    if source.classnames:
        return [prompt.replace("{c}", name) for name in source.classnames for prompt in source.templates]
    return list(dict.fromkeys(caption for index in range(len(source)) for caption in source.read(index).captions))
