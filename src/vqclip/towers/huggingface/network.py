"""Networks of transformers: from the content of ``config.json``, and weights in safetensors, to a module."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from vqclip.config.bounds import MAX_LAYERS, MAX_WIDTH
from vqclip.errors import ConfigError
from vqclip.io.tensors import nonfinite_names, shape_differences
from vqclip.towers.huggingface.library import quiet, require

__all__ = ["Part", "build_network", "network_settings"]

Part = Literal["text", "vision"]
Shapes = Mapping[str, tuple[int, ...]]

_INPUTS = {"text": "text", "vision": "images"}
_MAX_NUMBER = 2**24
"""Largest integer in a configuration; the largest vocabularies have a million tokens."""
_COUNTS = ("layer", "depth", "block", "stage", "expert")
"""Integers whose keys contain one of these are numbers of modules."""
_NOT_THE_NETWORK = frozenset(
    (
        *("architectures", "dtype", "torch_dtype", "transformers_version", "torchscript", "gradient_checkpointing"),
        *("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
        *("finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id", "num_labels"),
    )
)
"""Keys that do not describe the network: how it was trained, stored or is run."""
_FETCHES = ("quantization_config", "use_pretrained_backbone", "use_timm_backbone", "backbone")
"""Keys with which transformers would fetch other weights or code."""


def network_settings(config: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Return the settings of the text or vision network in a ``config.json``, without those that are not its own.

    A model with both, such as CLIP, has a section for each.

    Raises:
        ConfigError: a model that needs code of its own or fetches other weights, or numbers beyond the size limits.
    """
    section = config.get(f"{part}_config")
    if isinstance(section, dict) and "auto_map" not in config:
        config = {"model_type": f"{config.get('model_type')}_{part}_model", **section}
    if config.get("auto_map"):
        raise ConfigError(
            "tower.name: the model needs Python code of its own (auto_map in config.json), which is never executed; "
            "expected an architecture that transformers contains"
        )
    if str(config.get("model_type")).startswith("timm"):
        raise ConfigError("tower.name: got a model of timm; expected kind: timm with its name")
    settings = _select(config)
    _require_bounded(settings, "config.json")
    return settings


def _select(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a section and of the sections in it that describe the network."""
    settings = {}
    for key, value in config.items():
        if key in _FETCHES and value:
            raise ConfigError(
                f"tower.name: config.json has {key}, with which transformers fetches or converts weights; expected a "
                "plain encoder"
            )
        if key not in _NOT_THE_NETWORK and not key.startswith("_") and not key.endswith("_implementation"):
            settings[key] = _select(value) if isinstance(value, dict) else value
    return settings


def build_network(
    settings: Mapping[str, Any], part: Part, weights: Path | None, *, dropout: bool, shapes: Shapes | None = None
) -> tuple[Any, list[str]]:
    """Make a network.

    Args:
        settings: of `network_settings`.
        part: what it reads: tokens or pixels.
        weights: folder with safetensors; None for random weights (torch's global generator).
        dropout: keep dropout and stochastic depth; otherwise their rates are 0.
        shapes: shapes that the weights must have, compared before memory is taken for them; None for any.

    Returns:
        The module in fp32, and the names of its weights that the folder lacks.

    Raises:
        ConfigError: an architecture that is unknown or a decoder, settings that it refuses, or weights that do not fit.
    """
    transformers = require()
    with quiet(), _translate_errors(settings):
        config = _config(transformers, settings)
        if not dropout:
            _set_rates_to_zero(config)
        kind = _class_of(transformers, config, part)
        if shapes is not None:
            _require_shapes(kind, config, shapes)
        if weights is None:
            return kind(config).float(), []
        network, found = kind.from_pretrained(
            weights,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    problems = [
        f"{name}: got shape {tuple(got)}, expected {tuple(want)}"
        for name, got, want in sorted(found["mismatched_keys"])
    ] + list(found["error_msgs"])
    problems += [f"{name}: contains NaN or infinity" for name in nonfinite_names(network.state_dict())]
    if problems:
        raise ConfigError(f"tower.name: the weights in {weights} do not fit: {'; '.join(map(str, problems[:5]))}")
    return network.float(), sorted(found["missing_keys"])


def _config(transformers: Any, settings: Mapping[str, Any]) -> Any:
    kinds, kind = transformers.CONFIG_MAPPING, settings.get("model_type")
    if kind not in kinds:
        raise ConfigError(
            f"tower.name: transformers {transformers.__version__} has no model type {kind!r}; expected one that it "
            "contains, such as bert or vit"
        )
    return kinds[kind].from_dict(dict(settings))


def _class_of(transformers: Any, config: Any, part: Part) -> Any:
    """Return the class of an encoder; refuse decoders."""
    from transformers.models.auto import modeling_auto as auto

    found: Any
    kind = config.model_type
    if part == "text" and kind in auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES:
        found = auto.MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)]
        encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    else:
        if kind not in auto.MODEL_MAPPING_NAMES:
            raise ConfigError(f"tower.name: transformers' AutoModel has no model of type {kind!r}")
        found = transformers.MODEL_MAPPING[type(config)]
        found = found[0] if isinstance(found, tuple) else found
        encoder = not config.is_encoder_decoder and (part == "vision" or kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    takes = inspect.signature(found.forward).parameters
    needed = ("input_ids", "attention_mask") if part == "text" else ("pixel_values",)
    if encoder and not getattr(config, "is_decoder", False) and all(name in takes for name in needed):
        return found
    what = "an encoder-decoder" if config.is_encoder_decoder else f"no encoder of {_INPUTS[part]}"
    expected = (
        "an encoder of text with an attention mask, such as BERT, RoBERTa, MPNet, ModernBERT, T5's encoder or CLIP's "
        "text half"
        if part == "text"
        else "an encoder of images, such as ViT, DINOv2, CLIP's vision half or ConvNeXt"
    )
    raise ConfigError(f"tower.name: got a model of type {kind!r}, which is {what}; expected {expected}")


def _set_rates_to_zero(config: Any) -> None:
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or "drop_path" in key or "layerdrop" in key):
            setattr(config, key, 0.0)


def _require_bounded(value: Any, path: str) -> None:
    """Refuse numbers for which no memory or time would be enough, NaN and infinity."""
    if isinstance(value, dict):
        for key, item in value.items():
            _require_bounded(item, f"{path}.{key}")
    elif isinstance(value, list):
        if len(value) > MAX_WIDTH:
            raise ConfigError(f"tower.name: {path}: got {len(value)} items; expected at most {MAX_WIDTH}")
        for item in value:
            _require_bounded(item, path)
    elif isinstance(value, int):
        key = path.rpartition(".")[2]
        most = MAX_LAYERS if any(part in key for part in _COUNTS) else _MAX_NUMBER
        if abs(value) > most:
            raise ConfigError(f"tower.name: {path}: got {value}; expected at most {most}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"tower.name: {path}: got {value}; expected a finite number")


def _require_shapes(kind: Any, config: Any, shapes: Shapes) -> None:
    with torch.device("meta"):
        outline: nn.Module = kind(config)
    expected = {name: tuple(tensor.shape) for name, tensor in outline.state_dict().items()}
    if problems := shape_differences(expected, shapes):
        raise ConfigError(f"tower.network: does not fit the weights: {'; '.join(problems[:5])}")


@contextmanager
def _translate_errors(settings: Mapping[str, Any]) -> Iterator[None]:
    """Raise the errors of a configuration, a constructor or a damaged file as ConfigError."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # transformers, huggingface_hub and safetensors raise many kinds
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"tower.name: transformers cannot make this model of type {settings.get('model_type')!r}: "
            f"{type(error).__name__}: {reason}"
        ) from error
