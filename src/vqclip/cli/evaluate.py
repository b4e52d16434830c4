"""Evaluate a trained model: continuous, quantized and codes-only figures beside chance.

vqclip evaluate zero-shot runs/base --kind scenes
vqclip evaluate zero-shot runs/eurosat --data path/to/cls_eurosat
vqclip evaluate zero-shot runs/base --data path/to/folder_of_class_folders --template "a photo of a {c}"
vqclip evaluate retrieval runs/base --data val.csv
vqclip evaluate retrieval runs/captions --data "val/{00000..00003}.tar" captions=json json_keys=[caption]
vqclip evaluate linear-probe runs/eurosat --data path/to/cls_eurosat
vqclip evaluate knn runs/eurosat --data path/to/cls_eurosat
vqclip evaluate sugarcrepe runs/captions --data sugar-crepe/data --images coco/val2017
vqclip evaluate winoground runs/captions --data winoground/test.parquet

Several tasks, in one table: those of a run's own configuration, or of a file with a list `evaluation:` as in one:

vqclip evaluate runs/base
vqclip evaluate runs/base --config tasks.yaml --csv figures.csv

On several processes, which share the work: torchrun --standalone --nproc-per-node 8 -m vqclip evaluate ...
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.cli.evaluation_tasks import tasks_of_file, tasks_of_options
from vqclip.config import did_you_mean
from vqclip.errors import CheckpointError, ConfigError, VqclipError
from vqclip.evaluation import (
    EvaluationConfig,
    Prefixes,
    Result,
    format_prefixes,
    format_results,
    try_all,
    write_csv,
    write_json,
)
from vqclip.io.json_files import problem_message
from vqclip.model import CLIP
from vqclip.runlog.console import print_output
from vqclip.train.loading import MODEL_HELP, load_model

_OPTIONS = {
    "max_bad_fraction": "--bad-fraction",
    "templates": "--template",
    "templates_file": "--templates",
    "classes_file": "--classes",
    "path": "--data",
    "json_keys": "--json-key",
}
"""Configuration keys whose option has another name."""
_TASKS = {
    "zero-shot": "classify labelled images by prompts",
    "retrieval": "find the captions of images, and images by captions",
    "linear-probe": "fit logistic regression to the codes of labelled images",
    "knn": "classify images by the nearest codes of labelled ones",
    "sugarcrepe": "tell captions from near misses, in SugarCrepe's layout",
    "winoground": "tell two images and two captions apart, in Winoground's layout",
}


@command("vqclip evaluate")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; under torchrun all processes share the work, and rank 0 prints."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and given[0] not in _TASKS and not given[0].startswith("-"):
            options = _file_parser(given).parse_intermixed_args(given)
            tasks = list(tasks_of_file(options.model, options.config, options.overrides))
        else:
            options = _parser().parse_args(given)
            tasks = tasks_of_options(options)
        _require_writable(options)
        dist.init(options.device)
        model, place, weights = load_model(options.model, options.weights)
        model.to(_device(options.device))
        results, tables, failure = _run(options, model, tasks)
        if dist.is_main() and results:
            about = {"model": place, "weights": weights}
            if options.json is not None:
                write_json(options.json, results, about)
            if options.csv is not None:
                write_csv(options.csv, results, about)
            print_output(f"model: {place}\nweights: {weights}\n\n{tables}")
        if failure is not None:
            raise failure
    except ValidationError as error:
        raise ConfigError("\n".join(_problem(each) for each in error.errors())) from None
    finally:
        dist.shutdown()


def _run(
    options: argparse.Namespace, model: CLIP, tasks: Sequence[EvaluationConfig]
) -> tuple[list[Result], str, VqclipError | None]:
    prefixes = Prefixes.of(model, text="same") if options.depths else None
    outcome = try_all(model, tasks, precision=options.precision, codes_folder=options.codes, prefixes=prefixes)
    tables = format_results(outcome.results)
    return outcome.results, f"{tables}\n\n{format_prefixes(outcome.results)}" if prefixes else tables, outcome.failure


def _require_writable(options: argparse.Namespace) -> None:
    """Raise ConfigError for files that could not be written after the work."""
    for name in ("json", "csv"):
        path = getattr(options, name)
        if path is not None and path.is_dir():
            raise ConfigError(f"--{name}: got the folder {path}, expected a file")


def _file_parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser for several tasks; raise ConfigError if the first argument is a misspelt task."""
    close = [] if Path(given[0]).exists() else difflib.get_close_matches(given[0], _TASKS, n=1)
    if close:
        raise ConfigError(f"got {given[0]!r}; expected a task or a model{did_you_mean(close)}")
    parser = argparse.ArgumentParser(
        prog="vqclip evaluate",
        description="Run several tasks. For a single one, its name comes first: vqclip evaluate --help",
    )
    parser.add_argument("model", type=types.text, help=MODEL_HELP)
    parser.add_argument("--config", type=types.path, help="YAML file with a list evaluation: (the run's config.yaml)")
    parser.add_argument("overrides", nargs="*", metavar="evaluation[0].key=value", help="changes to the file")
    _add_model_options(parser)
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vqclip evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = parser.add_subparsers(dest="task", required=True)
    for name, description in _TASKS.items():
        task = tasks.add_parser(name, help=description, description=description.capitalize() + ".")
        task.add_argument("model", type=types.text, help=MODEL_HELP)
        (_add_choice_data if name in ("sugarcrepe", "winoground") else _add_data)(task, name)
        if name == "zero-shot":
            _add_prompts(task)
        elif name == "retrieval":
            types.add_captions(task)
        elif name in ("linear-probe", "knn"):
            _add_probe(task, name)
        _add_reading(task)
        _add_model_options(task)
    return parser


def _add_data(parser: argparse.ArgumentParser, task: str) -> None:
    add = parser.add_argument
    add(
        "--data",
        type=types.text,
        nargs="+",
        action="append",
        metavar=("PATH", "key=value"),
        help="file, folder, pattern or URL; others of the same data set may follow, and keys of its kind, such as "
        "kind=csv; repeat the option for several data sets; not for --kind scenes",
    )
    add("--kind", help="kind of the data, such as classes, folder, csv or scenes, the drawn data set (found out)")
    add("--split", help='split, where the data have several; the subfolder of a folder of classes ("test" for classes)')
    add("--limit", type=types.count, help="use at most this number of images, evenly spread over the set")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--template", type=types.text, action="append", help="prompt with {c} for the class; repeat for several")
    add("--templates", type=types.path, metavar="FILE", help="prompts with {c} for the class, one a line")
    add(
        "--classes",
        type=types.path,
        metavar="FILE",
        help="names of the classes in the data's order, one a line; or JSON with a name or a list of names for each",
    )


def _add_probe(parser: argparse.ArgumentParser, task: str) -> None:
    add = parser.add_argument
    add("--train", type=types.text, nargs="+", metavar=("PATH", "key=value"), help="training images (those of --data)")
    add("--train-split", help='split of the training images ("train" for classes)')
    add("--train-limit", type=types.count, help="use at most this number of training images")
    add(
        "--features",
        choices=("embedding", "tokens"),
        default="embedding",
        help="the joint embedding, or the mean of the decoded tokens (%(default)s)",
    )
    if task == "knn":
        add("--neighbours", type=types.count, default=20, help="training images that vote (%(default)s)")
        add("--temperature", type=float, default=0.07, help="of the weights of votes (%(default)s)")
    else:
        add("--l2", type=float, help="strength of the penalty (chosen on a fifth of the training images)")


def _add_choice_data(parser: argparse.ArgumentParser, task: str) -> None:
    add = parser.add_argument
    if task == "winoground":
        add("--data", type=types.path, required=True, help="the .parquet, or the .jsonl beside a folder of images")
        add("--images", type=types.path, help="folder of the images of a .jsonl (images, beside it)")
    else:
        add("--data", type=types.path, required=True, help="folder of JSON files, one for each category, or one file")
        add("--images", type=types.path, required=True, help="folder of the images, such as coco/val2017")


def _add_reading(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--batch-size",
        type=types.batch_size,
        default=256,
        help="images or texts at once; changes no figure (%(default)s)",
    )
    add("--workers", type=types.workers, default=0, help="worker processes that decode images (%(default)s)")
    add(
        "--bad-fraction",
        type=types.share,
        default=0.01,
        help="largest share of unusable images; they are left out (%(default)s)",
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--device",
        type=types.text,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, cuda:1, ... (%(default)s)",
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="autocast type (%(default)s)")
    add("--weights", choices=("averaged", "current"), default="averaged", help=types.WEIGHTS_HELP)
    add("--codes", type=types.path, help="keep the ids (safetensors) in this folder")
    add("--depths", action="store_true", help="with 1, 2, ... stages and codebooks of the ids: accuracy by bits")
    add("--json", type=types.path, help="write the results to this file")
    add("--csv", type=types.path, help="write a row for each data set, mode and figure to this file")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(f"--device: got {name!r}, which cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _problem(error: ErrorDetails) -> str:
    if not error["loc"]:  # several keys together, which the message names
        return problem_message(error)
    key, *inner = error["loc"]
    place = _OPTIONS.get(str(key), f"--{key}".replace("_", "-")) + "".join(f"[{part}]" for part in inner)
    return f"{place}: {problem_message(error)}"
