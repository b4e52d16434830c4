"""Evaluate a trained model: continuous, quantized and codes-only figures beside chance.

vqclip evaluate zero-shot runs/base --kind scenes
vqclip evaluate zero-shot runs/eurosat --data path/to/cls_eurosat
vqclip evaluate zero-shot runs/base --data path/to/folder_of_class_folders --template "a photo of a {c}"
vqclip evaluate retrieval runs/base --data val.csv
vqclip evaluate retrieval runs/captions --data "val/{00000..00003}.tar" captions=json json_keys=[caption]
vqclip evaluate linear-probe runs/eurosat --data path/to/cls_eurosat
vqclip evaluate knn runs/eurosat --data path/to/cls_eurosat
vqclip evaluate pixels runs/pixels --kind scenes

Several tasks, in one table: those of a run's own configuration, or of a file with a list `evaluation:` as in one:

vqclip evaluate runs/base
vqclip evaluate runs/base --config tasks.yaml --csv figures.csv

On several processes, which share the work: torchrun --standalone --nproc-per-node 8 -m vqclip evaluate ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.cli.evaluation_options import (
    TASKS,
    add_model_options,
    option_error,
    require_device,
    require_task_or_model,
    task_parser,
)
from vqclip.cli.evaluation_tasks import tasks_of_file, tasks_of_options
from vqclip.errors import ConfigError, VqclipError
from vqclip.evaluation import (
    EvaluationConfig,
    Result,
    format_results,
    try_all,
    write_csv,
    write_json,
)
from vqclip.model import CLIP
from vqclip.runlog.console import print_output
from vqclip.train.loading import MODEL_HELP, load_model


@command("vqclip evaluate")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; under torchrun all processes share the work, and rank 0 prints."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and given[0] not in TASKS and not given[0].startswith("-"):
            require_task_or_model(given[0])
            options = _file_parser().parse_intermixed_args(given)
            tasks = list(tasks_of_file(options.model, options.config, options.overrides))
        else:
            options = task_parser("vqclip evaluate", __doc__, _add_model_and_options).parse_args(given)
            tasks = tasks_of_options(options)
        _require_writable(options)
        dist.init(options.device)
        model, place, weights = load_model(options.model, options.weights, images_alone=True)
        model.to(require_device(options.device))
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
        raise option_error(error) from None
    finally:
        dist.shutdown()


def _run(
    options: argparse.Namespace, model: CLIP, tasks: Sequence[EvaluationConfig]
) -> tuple[list[Result], str, VqclipError | None]:
    outcome = try_all(model, tasks, precision=options.precision, codes_folder=options.codes)
    return outcome.results, format_results(outcome.results), outcome.failure


def _require_writable(options: argparse.Namespace) -> None:
    """Raise ConfigError for files that could not be written after the work."""
    for name in ("json", "csv"):
        path = getattr(options, name)
        if path is not None and path.is_dir():
            raise ConfigError(f"--{name}: got the folder {path}, expected a file")


def _file_parser() -> argparse.ArgumentParser:
    """Return the parser for several tasks."""
    parser = types.Parser(
        prog="vqclip evaluate",
        description="Run several tasks. For a single one, its name comes first: vqclip evaluate --help",
    )
    parser.add_argument("model", type=types.text, help=MODEL_HELP)
    parser.add_argument("--config", type=types.path, help="YAML file with a list evaluation: (the run's config.yaml)")
    parser.add_argument("overrides", nargs="*", metavar="evaluation[0].key=value", help="changes to the file")
    _add_options(parser)
    return parser


def _add_model_and_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=types.text, help=MODEL_HELP)
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add = parser.add_argument
    add("--codes", type=types.path, help="keep the ids (safetensors) in this folder")
    add("--json", type=types.path, help="write the results to this file")
    add("--csv", type=types.path, help="write a row for each data set, mode and figure to this file")
