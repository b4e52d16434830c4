"""Evaluate models with clip_benchmark, on its data sets, by its own command.

vqclip clip-benchmark eval --pretrained runs/eurosat --dataset wds/eurosat --dataset_root data/cls_eurosat
vqclip clip-benchmark build eurosat_*.json --output benchmark.csv

Options that eval does not list are those of clip_benchmark (clip_benchmark eval --help). It is run once for each model,
with --model_type vqclip, and with --no_amp, so that its logits are in fp32 as those of vqclip evaluate.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from vqclip.cli import arguments as types
from vqclip.cli.command import command
from vqclip.errors import ConfigError
from vqclip.evaluation.encode import MODES
from vqclip.integrations.clip_benchmark import MODEL_TYPE, register, run
from vqclip.integrations.open_clip import Precision
from vqclip.train.loading import MODEL_HELP

_REFUSED = {
    "--amp": "expected --precision bf16 or fp16, the autocast of the model; its logits stay in fp32",
    "--pretrained_model": "expected --pretrained with the models and --model with the modes",
}


@command("vqclip clip-benchmark")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options, others = _parser().parse_known_args(arguments)
    if options.task == "build":
        try:
            run(["build", *others])
        except (KeyError, TypeError, ValueError) as error:  # ValueError: not JSON
            reason = f"has no {error}" if isinstance(error, KeyError) else f"cannot be read ({error})"
            raise ConfigError(f"build: a file {reason}; expected results of eval only: {' '.join(others)}") from error
        return
    for name in _REFUSED.keys() & {each.partition("=")[0] for each in others}:
        raise ConfigError(f"{name}: {_REFUSED[name]}")
    if options.kind == "captioning":
        raise ConfigError("--task: got captioning, which needs a model that writes text; expected another task")
    if options.kind == "linear_probe" and not torch.cuda.is_available():
        raise ConfigError("--task: got linear_probe, for which clip_benchmark needs a GPU; torch finds none here")
    register(options.precision, options.weights)
    for model in options.pretrained:
        with tempfile.TemporaryDirectory(prefix="vqclip-features-") as features:
            try:
                run([
                    "eval", "--model_type", MODEL_TYPE, "--no_amp", "--feature_root", features, "--task", options.kind,
                    "--num_workers", str(options.num_workers), "--model", *options.model, "--pretrained", model,
                    "--output", _output(options, model), *others,
                ])  # fmt: skip
            except FileNotFoundError as error:
                raise ConfigError(
                    f"{error.filename}: no such file, which clip_benchmark reads; expected a data set in "
                    "--dataset_root (a webdataset: classnames.txt, and <split>/nshards.txt with the number of tars)"
                ) from error


def _output(options: argparse.Namespace, model: str) -> str:
    """Return the template of the results of one model; clip_benchmark would put its whole path into a file's name."""
    output: str = options.output
    for option in ("model", "pretrained"):
        if len(getattr(options, option)) > 1 and f"{{{option}" not in output:
            raise ConfigError(
                f"--output: got {output!r} and several values of --{option}, whose results would replace each other; "
                f"expected {{{option}}} in it"
            )
    name = model.strip("/").replace("/", "_").replace("{", "{{").replace("}", "}}")
    output = output.replace("{pretrained}", name).replace("{pretrained_full_path}", name)
    folder = Path(output).parent
    if "{" not in str(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return output


def _parser() -> argparse.ArgumentParser:
    parser = types.Parser(
        prog="vqclip clip-benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    tasks = parser.add_subparsers(dest="task", required=True)
    tasks.add_parser("build", add_help=False, help="one table of many results")
    evaluate = tasks.add_parser("eval", allow_abbrev=False, help="evaluate models on data sets")
    add = evaluate.add_argument
    add(
        "--pretrained", type=types.text, nargs="+", required=True, metavar="MODEL", help=f"one or several: {MODEL_HELP}"
    )
    add(
        "--model",
        nargs="+",
        choices=MODES,
        default=["continuous", "codes_only"],
        help="quantizers bypassed, the training path, or embeddings of stored ids (continuous codes_only)",
    )
    add("--precision", choices=get_args(Precision), default="fp32", help="autocast type of the model (%(default)s)")
    add("--weights", choices=("averaged", "current"), default="averaged", help=types.WEIGHTS_HELP)
    add("--model_type", choices=(MODEL_TYPE,), help=argparse.SUPPRESS)
    add(
        "--task",
        dest="kind",
        type=types.text,
        default="auto",
        help="zeroshot_classification, zeroshot_retrieval, image_caption_selection, linear_probe, or auto: by the name "
        "of the data set, classification for unknown ones (%(default)s)",
    )
    add(
        "--num_workers",
        type=types.workers,
        default=1,
        help="worker processes that read data; at most as many as a webdataset has shards (%(default)s)",
    )
    add(
        "--output",
        type=types.text,
        default="{dataset}_{pretrained}_{model}_{language}_{task}.json",
        help="file of the results; names in braces are filled in (%(default)s)",
    )
    return parser
