"""Evaluate a trained model: continuous, quantized and codes-only figures beside chance.

vqclip evaluate zero-shot runs/base --kind scenes
vqclip evaluate zero-shot runs/eurosat --data path/to/cls_eurosat
vqclip evaluate zero-shot runs/base --data path/to/folder_of_class_folders --template "a photo of a {c}"
vqclip evaluate retrieval runs/base --kind scenes
vqclip evaluate retrieval runs/captions --data "val/{00000..00003}.tar" --captions json --json-key caption

On several processes, which share the work: torchrun --standalone --nproc-per-node 8 -m vqclip evaluate ...
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, FolderConfig, ScenesSourceConfig
from vqclip.errors import CheckpointError, ConfigError
from vqclip.evaluation import (
    CaptionedData,
    LabelledData,
    RetrievalConfig,
    ZeroShotConfig,
    evaluate,
    evaluate_depths,
    format_depths,
    format_results,
    write_json,
)
from vqclip.io.json_files import problem_message
from vqclip.runlog.console import print_output
from vqclip.train.loading import MODEL_HELP, load_model

_OPTIONS = {
    "max_bad_fraction": "--bad-fraction",
    "templates": "--template",
    "path": "--data",
    "json_keys": "--json-key",
}
"""Configuration keys whose option has another name."""


@command("vqclip evaluate")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; under torchrun all processes share the work, and rank 0 prints."""
    options = _parser().parse_args(arguments)
    try:
        task = _zero_shot(options) if options.task == "zero-shot" else _retrieval(options)
        dist.init(options.device)
        model, place, weights = load_model(options.model, options.weights)
        model.to(_device(options.device))
        if options.depths:
            depths = evaluate_depths(model, [task], precision=options.precision, codes_folder=options.codes)
            tables = format_depths(depths)
            results = [
                replace(result, name=f"{result.name}, {n} stages") for n, each in depths.items() for result in each
            ]
        else:
            results = evaluate(model, [task], precision=options.precision, codes_folder=options.codes)
            tables = format_results(results)
        if dist.is_main():
            if options.json is not None:
                write_json(options.json, results)
            print_output(f"model: {place}\nweights: {weights}\n\n{tables}")
    except ValidationError as error:
        raise ConfigError("\n".join(_problem(each) for each in error.errors())) from None
    finally:
        dist.shutdown()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vqclip evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = parser.add_subparsers(dest="task", required=True)
    zero_shot = tasks.add_parser("zero-shot", help="classify labelled images by prompts")
    _add_common(zero_shot)
    add = zero_shot.add_argument
    add("--data", type=types.path, help="folder of the data; not for --kind scenes")
    add(
        "--kind",
        choices=("classes", "folder", "scenes"),
        help="classes: clip_benchmark's layout (classnames.txt, <split>/*.tar); folder: one subfolder of images for "
        "each class; scenes: the drawn data set. Default: classes if there is a classnames.txt or a tar, else folder",
    )
    add(
        "--split", help="subfolder of --data (default for classes: test; for folder: none); for scenes: test or heldout"
    )
    add("--template", type=types.text, action="append", help="prompt with {c} for the class; repeat for several")
    retrieval = tasks.add_parser("retrieval", help="find the captions of images, and images by captions")
    _add_common(retrieval)
    add = retrieval.add_argument
    add(
        "--data",
        type=types.text,
        nargs="+",
        action="extend",
        help="folders of tars, tars or patterns; several may follow, or repeat the option; not for --kind scenes",
    )
    add(
        "--kind",
        choices=("shards", "scenes"),
        default="shards",
        help="caption shards, or the drawn data set (%(default)s)",
    )
    add(
        "--captions",
        choices=("txt", "txt_lines", "json"),
        default="txt",
        help="txt: the .txt is the caption; txt_lines: each line is a caption; json: see --json-key (%(default)s)",
    )
    add(
        "--json-key",
        type=types.text,
        nargs="+",
        action="extend",
        metavar="KEY",
        help=types.JSON_KEY_HELP,
    )
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=types.text, help=MODEL_HELP)
    add(
        "--batch-size",
        type=types.batch_size,
        default=256,
        help="images or texts at once; changes no figure (%(default)s)",
    )
    add("--workers", type=types.workers, default=0, help="worker processes that decode images (%(default)s)")
    add("--limit", type=types.count, help="use at most this number of images, evenly spread over the set")
    add(
        "--bad-fraction",
        type=types.share,
        default=0.01,
        help="largest share of unusable images; they are left out (%(default)s)",
    )
    add(
        "--device",
        type=types.text,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, cuda:1, ... (%(default)s)",
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="autocast type (%(default)s)")
    add("--weights", choices=("averaged", "current"), default="averaged", help=types.WEIGHTS_HELP)
    add("--codes", type=types.path, help="keep the ids (safetensors) in this folder")
    add("--depths", action="store_true", help="with 1, 2, ... stages of residual quantizers: accuracy by bits")
    add("--json", type=types.path, help="write the results to this file")


def _zero_shot(options: argparse.Namespace) -> ZeroShotConfig:
    data = _labelled_data(options)
    return ZeroShotConfig(
        name=f"scenes {data.split}" if isinstance(data, ScenesSourceConfig) else options.data.name,
        data=data,
        templates=tuple(options.template or ()),
        batch_size=options.batch_size,
        workers=options.workers,
        limit=options.limit,
        max_bad_fraction=options.bad_fraction,
    )


def _labelled_data(options: argparse.Namespace) -> LabelledData:
    if options.kind == "scenes":
        _refuse_data_for_scenes(options)
        return ScenesSourceConfig(split=options.split or "test")
    if options.data is None:
        raise ConfigError("--data: missing; expected a folder of labelled images, or --kind scenes")
    path = options.data.expanduser().absolute()
    has_shards = (path / "classnames.txt").exists() or any(path.glob("*.tar")) or any(path.glob("*/*.tar"))
    kind = options.kind or ("classes" if has_shards else "folder")
    if kind == "folder":
        return FolderConfig(path=path / (options.split or ""))
    if options.kind is None and not any((folder / "classnames.txt").exists() for folder in (path, path.parent)):
        raise ConfigError(
            f"--data: {path} contains tars but no classnames.txt; expected labelled images. For shards of captioned "
            "images: vqclip evaluate retrieval"
        )
    return ClassShardsConfig(path=path, split="test" if options.split is None else options.split)


def _retrieval(options: argparse.Namespace) -> RetrievalConfig:
    return RetrievalConfig(
        name="scenes val" if options.kind == "scenes" else " ".join(Path(path).name for path in options.data or ()),
        data=_captioned_data(options),
        batch_size=options.batch_size,
        workers=options.workers,
        limit=options.limit,
        max_bad_fraction=options.bad_fraction,
    )


def _captioned_data(options: argparse.Namespace) -> CaptionedData:
    if options.kind == "scenes":
        _refuse_data_for_scenes(options)
        return ScenesSourceConfig(split="val")
    if not options.data:
        raise ConfigError("--data: missing; expected caption shards, or --kind scenes")
    for path in options.data:
        if (Path(path) / "classnames.txt").exists():
            raise ConfigError(
                f"--data: {path} contains labelled images (classnames.txt); expected caption shards. For labelled "
                "images: vqclip evaluate zero-shot"
            )
    keys = tuple(options.json_key or ("caption",))
    return CaptionShardsConfig(path=tuple(options.data), captions=options.captions, json_keys=keys)


def _refuse_data_for_scenes(options: argparse.Namespace) -> None:
    if options.data:
        raise ConfigError("--data: got it with --kind scenes, which is drawn; VQCLIP_CACHE sets the folder")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(f"--device: got {name!r}, which cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _problem(error: ErrorDetails) -> str:
    key, *inner = error["loc"] or ("",)
    place = _OPTIONS.get(str(key), f"--{key}".replace("_", "-")) + "".join(f"[{part}]" for part in inner)
    return f"{place}: {problem_message(error)}"
