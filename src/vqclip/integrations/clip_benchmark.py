"""Evaluate vqclip models with clip_benchmark (``pip install 'vqclip[clip-benchmark]'``).

    vqclip clip-benchmark eval --pretrained runs/base --dataset wds/cars --dataset_root cars

or in a program:

    register()
    model, preprocess, tokenizer = clip_benchmark.models.load_clip("vqclip", "codes_only", "runs/base", None, "cpu")

clip_benchmark 1.6 has no entry points. Its registry of models is the dictionary ``clip_benchmark.models.TYPE2FUNC``, to
which its README has authors of models add a function. `register` does so in this process; the console script
``clip_benchmark``, a process of its own, cannot see it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy
import torch

from vqclip.errors import ConfigError, import_extra
from vqclip.evaluation.encode import Mode
from vqclip.integrations.open_clip import OpenCLIPModel, Precision, Preprocess, load
from vqclip.train.ema import Weights

MODEL_TYPE = "vqclip"
"""Name of the kind of model, clip_benchmark's ``--model_type``."""
_UNPICKLING = ("pkl", "pickle", "pyd", "pth")


def register(precision: Precision = "fp32", weights: Weights = "averaged") -> None:
    """Add the model type ``vqclip`` to clip_benchmark's registry, or replace it.

    Its ``model_name`` is a mode (continuous, quantized or codes_only), its ``pretrained`` a folder or hub name; see
    `vqclip.integrations.open_clip.load`.

    Args:
        precision: of the towers. clip_benchmark's own autocast (``amp``) then only concerns its logits.
        weights: of runs and checkpoints with moving averages.

    Raises:
        ConfigError: clip_benchmark is not installed.
    """
    models = _import("models")
    # clip_benchmark 1.6.2 calls float() on arrays of one number, which numpy 2.4 refuses (LAION-AI/CLIP_benchmark#147).
    _import("metrics.zeroshot_classification").float = lambda number: numpy.asarray(number).item()
    models.TYPE2FUNC[MODEL_TYPE] = partial(load_vqclip, precision=precision, weights=weights)
    if MODEL_TYPE not in models.MODEL_TYPES:
        models.MODEL_TYPES.append(MODEL_TYPE)


def load_vqclip(
    model_name: Mode,
    pretrained: str,
    cache_dir: str | None = None,
    device: str | torch.device = "cpu",
    precision: Precision = "fp32",
    weights: Weights = "averaged",
) -> OpenCLIPModel:
    """Load a model with the arguments that clip_benchmark gives to a function of its registry; see `open_clip.load`.

    `preprocess` returns uint8 in 0..255, as in `vqclip.evaluation`: a quarter of the bytes between processes.
    """
    if cache_dir is not None:
        raise ConfigError(f"--model_cache_dir: got {cache_dir!r}; the environment variable HF_HOME sets it for the hub")
    model, preprocess, tokenizer = load(pretrained, model_name, device, precision, weights)
    return OpenCLIPModel(model, _WorkerPreprocess(preprocess.transform, torch.uint8), tokenizer)


def run(arguments: Sequence[str]) -> None:
    """Run clip_benchmark's own command with these arguments in this process; call `register` first.

    Meanwhile webdataset, with which clip_benchmark reads shards, keeps the transparency of images, so that they are
    composited on white as everywhere in vqclip, and decodes no pickles, so that untrusted shards run no code.

    Raises:
        ConfigError: clip_benchmark is not installed.
    """
    cli, arguments_before = _import("cli"), sys.argv
    autodecode = import_module("webdataset.autodecode")
    tables = autodecode.decoders, autodecode.imagespecs
    before = [dict(table) for table in tables]
    try:
        _adapt_webdataset()
        sys.argv = ["clip_benchmark", *arguments]
        cli.main()
    finally:
        sys.argv = arguments_before
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)


class _WorkerPreprocess(Preprocess):
    """A `Preprocess` that adapts webdataset in every worker to which it is sent."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        _adapt_webdataset()
        self.__dict__.update(state)


def _import(module: str) -> Any:
    return import_extra(f"clip_benchmark.{module}", "clip-benchmark", "vqclip clip-benchmark ")


def _adapt_webdataset() -> None:
    autodecode = import_module("webdataset.autodecode")
    for extension in _UNPICKLING:
        autodecode.decoders.pop(extension, None)
    autodecode.imagespecs["pil"] = autodecode.imagespecs["pilrgba"]
