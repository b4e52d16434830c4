"""Options of `vqclip evaluate`: tasks, their data, device and precision."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vqclip.cli import arguments as types
from vqclip.config import did_you_mean
from vqclip.errors import ConfigError
from vqclip.evaluation.images import ImagesConfig
from vqclip.io.json_files import problem_message

__all__ = ["TASKS", "add_model_options", "option_error", "require_task_or_model", "task_parser"]

_OPTIONS = {
    "max_bad_fraction": "--bad-fraction",
    "templates": "--template",
    "templates_file": "--templates",
    "classes_file": "--classes",
    "path": "--data",
    "json_keys": "--json-key",
}
"""Configuration keys whose option has another name."""
TASKS = {
    "zero-shot": "classify labelled images by prompts",
    "retrieval": "find the captions of images, and images by captions",
    "linear-probe": "fit logistic regression to the codes of labelled images",
    "knn": "classify images by the nearest codes of labelled ones",
    "pixels": "decode stored ids to images, and compare these with the originals, WebP and JPEG",
}
"""Name of each task on the command line, and what it does."""


def task_parser(
    program: str, description: str | None, add: Callable[[argparse.ArgumentParser], None]
) -> argparse.ArgumentParser:
    """Return a parser with a subcommand for each task, whose options `tasks_of_options` understands.

    Args:
        program: name of the command.
        description: help of the command.
        add: function that adds the command's own arguments, such as the model, to a subcommand.
    """
    parser = types.Parser(prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    for name, summary in TASKS.items():
        task = tasks.add_parser(name, help=summary, description=summary.capitalize() + ".")
        add(task)
        _add_data(task)
        if name == "zero-shot":
            _add_prompts(task)
        elif name in ("retrieval", "pixels"):
            types.add_captions(task)
        elif name in ("linear-probe", "knn"):
            _add_probe(task, name)
        _add_reading(task)
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, ``--precision`` and ``--weights``."""
    add = parser.add_argument
    add(
        "--device",
        type=types.text,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, cuda:1, ... (%(default)s)",
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="autocast type (%(default)s)")
    add("--weights", choices=("averaged", "current"), default="averaged", help=types.WEIGHTS_HELP)


def require_task_or_model(given: str) -> None:
    """Raise ConfigError if the first argument is a misspelt task."""
    close = [] if Path(given).exists() else difflib.get_close_matches(given, TASKS, n=1)
    if close:
        raise ConfigError(f"got {given!r}; expected a task or a model{did_you_mean(close)}")


def option_error(error: ValidationError) -> ConfigError:
    """Return the error of a task's settings with the names of the options that set them."""
    return ConfigError("\n".join(_problem(each) for each in error.errors()))


def _add_data(parser: argparse.ArgumentParser) -> None:
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


def _add_reading(parser: argparse.ArgumentParser) -> None:
    types.add_fields(parser, ImagesConfig, "batch_size", "workers")
    parser.add_argument(
        "--bad-fraction",
        type=types.share,
        default=0.01,
        help="largest share of unusable images; they are left out (%(default)s)",
    )


def _problem(error: ErrorDetails) -> str:
    if not error["loc"]:  # several keys together, which the message names
        return problem_message(error)
    key, *inner = error["loc"]
    place = _OPTIONS.get(str(key), f"--{key}".replace("_", "-")) + "".join(f"[{part}]" for part in inner)
    return f"{place}: {problem_message(error)}"
