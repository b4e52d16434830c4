"""Accuracy against bits per image: prefixes of the ids of runs, or configurations that are trained with several seeds.

vqclip frontier runs/base --out figures
vqclip frontier runs/residual runs/product --tasks tasks.yaml
vqclip frontier zero-shot runs/base --data path/to/cls_eurosat --split test
vqclip frontier --config few.yaml --config many.yaml --seeds 0,1,2 train.steps=500 --out figures

A prefix has the first stages of residual quantizers and the first codebooks of product ones. Runs that differ only in
their seed are one line. Configurations are trained as ordinary runs: an interrupted command continues when it is
repeated, and finished runs are not run again.

On several processes, which share the work: torchrun --standalone --nproc-per-node 8 -m vqclip frontier ...
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

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
from vqclip.data import mask_credentials
from vqclip.errors import ConfigError, StopRequested
from vqclip.evaluation import EvaluationConfig
from vqclip.frontier import frontier, save, train_seeds
from vqclip.frontier.plot import require_matplotlib
from vqclip.runlog.console import log_to_stderr, print_output
from vqclip.train.loading import MODEL_HELP

_OVERRIDE = re.compile(r"[a-z_]+(\[\d+\])?(\.[a-z_]+(\[\d+\])?)*=")


@command("vqclip frontier", after_interrupt="run the same command again to continue")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; under torchrun all processes share the work, and rank 0 prints and writes."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and given[0] in TASKS:
            options = task_parser("vqclip frontier", __doc__, _add_runs_and_options).parse_args(given)
            options.config, options.seeds, overrides = [], None, []
            tasks: Sequence[EvaluationConfig] | None = tasks_of_options(options)
        elif given and not Path(given[0]).exists() and (close := difflib.get_close_matches(given[0], TASKS, n=1)):
            raise ConfigError(f'got {given[0]!r}, which is neither a run nor a task; did you mean "{close[0]}"?')
        else:
            options = _parser().parse_intermixed_args(given)
            overrides = [each for each in options.runs if _OVERRIDE.match(each)]
            options.runs = [each for each in options.runs if each not in overrides]
            _require_runs_or_configs(options, overrides)
            tasks = None
            if options.tasks is not None:
                tasks = tasks_of_file("", options.tasks, [] if options.config else overrides)
        _require_folder(options.out)
        dist.init(options.device)
        require_device(options.device)
        if options.config:
            log_to_stderr(mask_credentials)
            options.runs = train_seeds(options.config, options.seeds, overrides, owns_process=True)
            overrides = []  # the runs' configurations contain them
        found = frontier(
            options.runs,
            tasks,
            overrides=overrides if tasks is None else (),
            prefixes=not options.whole,
            text=options.text,
            weights=options.weights,
            precision=options.precision,
            device=options.device,
        )
        if dist.is_main():
            files = [] if options.out is None else save(found, options.out)
            print_output("\n\n".join([str(found), *(["\n".join(map(str, files))] if files else [])]))
    except ValidationError as error:
        raise option_error(error) from None
    except StopRequested:
        if dist.is_main():
            print_output("stopped; run the same command again to continue")
    finally:
        dist.shutdown()


def _require_runs_or_configs(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Raise ConfigError unless there are either runs or configurations, with overrides that change something."""
    if options.config and options.runs and options.runs[0].endswith((".yaml", ".yml")):
        raise ConfigError(f"got {options.runs[0]} after another configuration; write --config before each")
    if options.runs and options.config:
        raise ConfigError(f"got --config and the run {options.runs[0]}; expected runs, or configurations to train")
    if options.runs and options.runs[0].endswith((".yaml", ".yml")):
        raise ConfigError(
            f"got the configuration {options.runs[0]} in place of a run; write --config {options.runs[0]}"
        )
    if options.runs:
        require_task_or_model(options.runs[0])
        if options.seeds is not None:
            raise ConfigError("--seeds: got it without --config; expected it with configurations to train")
        if others := [each for each in overrides if not each.startswith("evaluation")]:
            raise ConfigError(f"got {others[0]!r}; expected evaluation[0].key=value, since runs are not trained again")
    elif not options.config:
        raise ConfigError("got no run and no --config; expected the folders of runs, or configurations to train")


def _require_folder(folder: Path | None) -> None:
    """Raise ConfigError for files that could not be written after the work."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out: got the file {folder}, expected a folder")
    require_matplotlib()


def _parser() -> argparse.ArgumentParser:
    parser = types.Parser(
        prog="vqclip frontier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    help_text = f"{MODEL_HELP}; then changes of their evaluations, or of the configurations"
    add("runs", nargs="*", type=types.text, metavar="RUN | section.key=value", help=help_text)
    add("--config", type=types.path, action="append", default=[], help="YAML file to train; repeat it for several")
    add("--seeds", type=_seeds, metavar="0,1,2", help="seeds of each configuration (its own run.seed)")
    add("--tasks", type=types.path, help="YAML file with a list evaluation: (that of each run)")
    _add_options(parser)
    return parser


def _add_runs_and_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=types.text, metavar="RUN", help=MODEL_HELP)
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=types.path, metavar="FOLDER", help="write frontier.json, .csv, .svg and .png to this folder")
    add("--whole", action="store_true", help="all ids alone: one point for each line, without prefixes")
    help_text = "ids of the texts: all of them, or the same share as of the image's (%(default)s)"
    add("--text", choices=("full", "same"), default="full", help=help_text)
    add_model_options(parser)


def _seeds(given: str) -> list[int]:
    try:
        seeds = [int(each) for each in given.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"got {given!r}, expected different whole numbers from 0 on, such as 0,1,2")
    return seeds
