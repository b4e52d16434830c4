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

from vqclip.errors import ConfigError
from vqclip.evaluation.encode import Mode
from vqclip.integrations.open_clip import OpenCLIPModel, Precision, Preprocess, load
from vqclip.train.ema import Weights

__all__ = ["MODEL_TYPE", "load_vqclip", "register", "run"]

MODEL_TYPE = "vqclip"
"""Name of the kind of model, clip_benchmark's ``--model_type``."""
_UNPICKLING = ("pkl", "pickle", "pyd", "pth")


def register(precision: Precision = "fp32", weights: Weights = "averaged") -> None:
    """Add the model type ``vqclip`` to clip_benchmark's registry, or replace it.

    Its ``model_name`` is a mode (continuous, quantized or codes_only), its ``pretrained`` a folder or hub name; see
    `vqclip.integrations.open_clip.load`. clip_benchmark reads shards with webdataset, which would unpickle members of
    some names: its decoders for them are removed, so that untrusted shards run no code.

    Args:
        precision: of the towers. clip_benchmark's own ``--no_amp`` only concerns its logits.
        weights: of runs and checkpoints with moving averages.

    Raises:
        ConfigError: clip_benchmark is not installed.
    """
    models = _require("clip_benchmark.models")
    # clip_benchmark 1.6.2 calls float() on arrays of one number, which numpy 2.4 refuses (LAION-AI/CLIP_benchmark#147).
    _require("clip_benchmark.metrics.zeroshot_classification").float = _to_float
    _remove_unpickling()
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
    """Load a model with the arguments that clip_benchmark gives to a function of its registry.

    Pixels stay uint8, as in `vqclip.evaluation`, so that the embeddings are the same on every device.

    Raises:
        CheckpointError, ConfigError: see `vqclip.integrations.open_clip.load`.
    """
    if cache_dir is not None:
        raise ConfigError(f"--model_cache_dir: got {cache_dir!r}; the environment variable HF_HOME sets it for the hub")
    model, preprocess, tokenizer = load(pretrained, model_name, device, precision, weights)
    return OpenCLIPModel(model, _SafePreprocess(preprocess.transform, torch.uint8), tokenizer)


def run(arguments: Sequence[str]) -> None:
    """Run clip_benchmark's own command with these arguments in this process; call `register` first.

    Raises:
        ConfigError: clip_benchmark is not installed.
    """
    cli, before = _require("clip_benchmark.cli"), sys.argv
    sys.argv = ["clip_benchmark", *arguments]
    try:
        cli.main()
    finally:
        sys.argv = before


class _SafePreprocess(Preprocess):
    """A `Preprocess` that removes webdataset's unpickling in every worker to which it is sent."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        _remove_unpickling()
        self.__dict__.update(state)


def _require(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"clip_benchmark cannot be imported ({error}); pip install 'vqclip[clip-benchmark]'"
        ) from error


def _to_float(number: Any) -> float:
    return float(numpy.asarray(number).item())


def _remove_unpickling() -> None:
    from webdataset.autodecode import decoders

    for extension in _UNPICKLING:
        decoders.pop(extension, None)
