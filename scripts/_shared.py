"""What the evaluation scripts have in common: their options, finding the model, and ending with clear errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vqclip import checkpoint, dist
from vqclip.cli import arguments as types
from vqclip.data import mask_credentials
from vqclip.errors import CheckpointError, VqclipError
from vqclip.evaluation import (
    EvaluationConfig,
    evaluate,
    evaluate_depths,
    format_depths,
    format_results,
    write_json,
)
from vqclip.io.json_files import problem_message
from vqclip.model import CLIP
from vqclip.runlog.console import print_output, unfailing_streams
from vqclip.tokenizer.folder import CONFIG_FILE

MODEL_HELP = """run folder (its exported tokenizer, else its newest checkpoint), checkpoint folder, exported tokenizer
folder, or hub name (owner/name)"""

_OPTIONS = {
    "max_bad_fraction": "--bad-fraction",
    "templates": "--template",
    "path": "--data",
    "json_keys": "--json-key",
}
"""Keys of the configuration that an option of another name sets."""


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown, examples left as they are."""


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that every evaluation has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=_Help)
    parser.add_argument("model", type=types.text, help=MODEL_HELP)
    parser.add_argument(
        "--batch-size", type=types.batch_size, default=256, help="images or texts at once; changes no figure"
    )
    parser.add_argument("--workers", type=types.workers, default=0, help="processes that decode images")
    parser.add_argument("--limit", type=types.count, help="use only so many images, evenly spread over the set")
    parser.add_argument(
        "--bad-fraction",
        type=types.share,
        default=0.01,
        help="largest share of images that may be left out as unusable",
    )
    parser.add_argument(
        "--device",
        type=types.text,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, cuda:1, ...",
    )
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="autocast type")
    parser.add_argument("--codes", type=types.path, help="keep the ids (safetensors) in this folder")
    parser.add_argument(
        "--depths", action="store_true", help="with 1, 2, ... stages of residual quantizers: bits against accuracy"
    )
    parser.add_argument("--json", type=types.path, help="write the results to this file")
    return parser


@unfailing_streams()
def main(arguments: argparse.Namespace, make_task: Callable[[argparse.Namespace], EvaluationConfig]) -> int:
    """Evaluate, print the tables and write the JSON. Runs under torchrun as well, sharing the work.

    Returns:
        The exit code: 2 for anything that the user can mend, which is told on stderr.
    """
    try:
        task = make_task(arguments)
        dist.init(arguments.device)
        model, folder = load_model(arguments.model)
        model.to(_device(arguments.device))
        if arguments.depths:
            depths = evaluate_depths(model, [task], precision=arguments.precision, codes_folder=arguments.codes)
            shown = format_depths(depths)
            results = [
                replace(result, name=f"{result.name}, {n} stages") for n, each in depths.items() for result in each
            ]
        else:
            results = evaluate(model, [task], precision=arguments.precision, codes_folder=arguments.codes)
            shown = format_results(results)
        if dist.is_main():
            if arguments.json is not None:
                write_json(arguments.json, results)
            print_output(f"model: {folder}\n\n{shown}")
    except ValidationError as error:
        return _fail("\n".join(_problem(one) for one in error.errors()))
    except (VqclipError, OSError) as error:
        return _fail(str(error))
    finally:
        dist.shutdown()
    return 0


def load_model(name: str) -> tuple[CLIP, str]:
    """The model that ``name`` stands for, and the folder (or hub name) that it was read from."""
    path = Path(name).expanduser()
    if path.is_file():
        raise CheckpointError(f"{path}: got a file, expected a folder: {MODEL_HELP.replace(chr(10), ' ')}")
    if not path.is_dir():
        return CLIP.from_pretrained(name), name
    for folder in (path, path / "tokenizer", path / "model"):
        if (folder / CONFIG_FILE).is_file():
            return CLIP.from_pretrained(folder), str(folder)
    newest = checkpoint.latest(path / "checkpoints") or checkpoint.latest(path)
    if newest is None:
        raise CheckpointError(
            f"{path}: no model here; expected {CONFIG_FILE}, tokenizer/, model/ or checkpoints/ in it, "
            f"got: {', '.join(sorted(each.name for each in path.iterdir())[:8]) or 'an empty folder'}"
        )
    return CLIP.from_pretrained(newest / "model"), str(newest / "model")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"--device: got {name!r}, which cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    return device


def _problem(error: ErrorDetails) -> str:
    key, *inner = error["loc"] or ("",)
    place = _OPTIONS.get(str(key), f"--{key}".replace("_", "-")) + "".join(f"[{part}]" for part in inner)
    return f"{place}: {problem_message(error)}"


def _fail(message: str) -> int:
    print(f"error: {mask_credentials(message)}", file=sys.stderr)
    return 2
