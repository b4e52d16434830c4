"""``vqclip clip-benchmark``: evaluate models with clip_benchmark, on its data sets, by its own command."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from vqclip.errors import ConfigError
from vqclip.integrations import clip_benchmark

_REFUSED = {
    "--amp": "expected --precision bf16 or fp16, the autocast of the model; its logits stay in fp32",
    "--pretrained_model": "expected --pretrained with the models and --model with the modes",
}


def run(options: argparse.Namespace) -> None:
    """Run clip_benchmark's own command."""
    others: list[str] = options.others
    if options.task == "build":
        try:
            clip_benchmark.run(["build", *options.files, *others])
        except (KeyError, TypeError, ValueError) as error:  # ValueError: not JSON
            reason = f"has no {error}" if isinstance(error, KeyError) else f"cannot be read ({error})"
            raise ConfigError(
                f"build: a file {reason}; expected results of eval only: {' '.join(options.files)}"
            ) from error
        return
    for name in _REFUSED.keys() & {each.partition("=")[0] for each in others}:
        raise ConfigError(f"{name}: {_REFUSED[name]}")
    if options.kind == "captioning":
        raise ConfigError("--task: got captioning, which needs a model that writes text; expected another task")
    if options.kind == "linear_probe" and not torch.cuda.is_available():
        raise ConfigError("--task: got linear_probe, for which clip_benchmark needs a GPU; torch finds none here")
    clip_benchmark.register(options.precision, options.weights)
    for model in options.pretrained:
        with tempfile.TemporaryDirectory(prefix="vqclip-features-") as features:
            try:
                clip_benchmark.run([
                    "eval", "--model_type", clip_benchmark.MODEL_TYPE, "--no_amp", "--feature_root", features,
                    "--task", options.kind, "--num_workers", str(options.num_workers),
                    "--model", *options.model, "--pretrained", model,
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
