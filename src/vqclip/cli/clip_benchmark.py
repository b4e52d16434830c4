"""``vqclip clip-benchmark``: evaluate models with clip_benchmark, on its data sets, by its own command."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

from pydantic import Field

from vqclip.cli.options import MODEL, Command, Precision, Text, Weights, Workers
from vqclip.errors import ConfigError

_REFUSED = {
    "--amp": "expected --precision bf16 or fp16, the autocast of the model; its logits stay in fp32",
    "--pretrained_model": "expected --pretrained with the models and --model with the modes",
}


class Eval(Command, takes_others=True):
    """Evaluate models with clip_benchmark, on its data sets, by its own command.

    Options that are not listed are those of clip_benchmark (clip_benchmark eval --help). It is run once for each model,
    with --model_type vqclip, and with --no_amp, so that its logits are in fp32 as those of vqclip evaluate.

    Examples:
      vqclip clip-benchmark eval --pretrained runs/eurosat --dataset wds/eurosat --dataset_root data
      vqclip clip-benchmark build eurosat_*.json --output benchmark.csv
    """

    pretrained: tuple[Text, ...] = Field(description=f"One or several: {MODEL}")
    model: tuple[Literal["continuous", "quantized", "codes_only"], ...] = ("continuous", "codes_only")
    """continuous: quantizers bypassed; quantized: the training path; codes_only: embeddings of stored ids."""
    precision: Precision = "fp32"
    """Autocast type of the model."""
    weights: Weights = "averaged"
    model_type: Literal["vqclip"] = "vqclip"
    """Kind of the models."""
    task_: Text = "auto"
    """zeroshot_classification, zeroshot_retrieval, image_caption_selection, linear_probe, or auto: by the name of the
    data set, classification for unknown ones."""
    num_workers: Workers = 1
    """Worker processes that read data; at most as many as a webdataset has shards."""
    output: Text = "{dataset}_{pretrained}_{model}_{language}_{task}.json"
    """File of the results; names in braces are filled in."""

    def run(self) -> None:
        """Run clip_benchmark's own command."""
        import torch

        from vqclip.integrations import clip_benchmark

        for name in _REFUSED.keys() & {each.partition("=")[0] for each in self.others}:
            raise ConfigError(f"{name}: {_REFUSED[name]}")
        if self.task_ == "captioning":
            raise ConfigError("--task: got captioning, which needs a model that writes text; expected another task")
        if self.task_ == "linear_probe" and not torch.cuda.is_available():
            raise ConfigError("--task: got linear_probe, for which clip_benchmark needs a GPU; torch finds none here")
        clip_benchmark.register(self.precision, self.weights)
        for model in self.pretrained:
            with tempfile.TemporaryDirectory(prefix="vqclip-features-") as features:
                try:
                    clip_benchmark.run([
                        "eval", "--model_type", clip_benchmark.MODEL_TYPE, "--no_amp", "--feature_root", features,
                        "--task", self.task_, "--num_workers", str(self.num_workers),
                        "--model", *self.model, "--pretrained", model,
                        "--output", self._output(model), *self.others,
                    ])  # fmt: skip
                except FileNotFoundError as error:
                    raise ConfigError(
                        f"{error.filename}: no such file, which clip_benchmark reads; expected a data set in "
                        "--dataset_root (a webdataset: classnames.txt, and <split>/nshards.txt with the number of tars)"
                    ) from error

    def _output(self, model: str) -> str:
        """Return the template of the results of one model; clip_benchmark would put a whole path into a file's name."""
        output = self.output
        for option in ("model", "pretrained"):
            if len(getattr(self, option)) > 1 and f"{{{option}" not in output:
                raise ConfigError(
                    f"--output: got {output!r} and several values of --{option}, whose results would replace each "
                    f"other; expected {{{option}}} in it"
                )
        name = model.strip("/").replace("/", "_").replace("{", "{{").replace("}", "}}")
        output = output.replace("{pretrained}", name).replace("{pretrained_full_path}", name)
        folder = Path(output).parent
        if "{" not in str(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return output


class Build(Command, words=("files",), takes_others=True):
    """Make one table of the results of eval, by clip_benchmark's own command."""

    files: tuple[Text, ...]
    """Results of eval."""

    def run(self) -> None:
        """Run clip_benchmark's own command."""
        from vqclip.integrations import clip_benchmark

        try:
            clip_benchmark.run(["build", *self.files, *self.others])
        except (KeyError, TypeError, ValueError) as error:  # ValueError: not JSON
            reason = f"has no {error}" if isinstance(error, KeyError) else f"cannot be read ({error})"
            raise ConfigError(
                f"build: a file {reason}; expected results of eval only: {' '.join(self.files)}"
            ) from error
