"""Checked parts of a model of transformers: settings, safetensors, and an encoder's class.

No code of a model is executed and no pickle is opened. `AutoModel` gets ``use_safetensors=True`` and
``trust_remote_code=False``, and settings with which it would fetch something else are refused or dropped.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from vqclip.config.bounds import MAX_LAYERS
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.json_files import read_json
from vqclip.io.tensors import first_names
from vqclip.towers.weights import explain

logger = logging.getLogger(__name__)

Part = Literal["text", "vision"]

CONFIG_FILE = "config.json"
_MAX_NUMBER = 2**24
"""Largest integer in a configuration; the largest vocabularies have a million tokens."""
_COUNTS = ("layer", "depth", "block", "stage", "expert")
"""Parts of the keys of numbers of modules."""
_NOT_THE_NETWORK = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "torchscript"),
    *("gradient_checkpointing", "output_attentions", "output_hidden_states", "return_dict", "use_cache"),
    *("finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id", "num_labels"),
)
"""Keys that do not describe the network: how it was trained, stored or is run."""
_FETCHES = ("quantization_config", "use_pretrained_backbone", "use_timm_backbone", "backbone", "architecture")
"""Keys with which transformers would fetch other weights or code; the last one is that of its wrapper of timm."""
_ENCODERS = {
    "text": "text with an attention mask, such as BERT, RoBERTa, MPNet, ModernBERT, T5's encoder or CLIP's text half",
    "vision": "images, such as ViT, DINOv2, CLIP's vision half or ConvNeXt",
}


def read_settings(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of a model; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return read_json(path)[0]
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"tower.name: {error}") from error


def network_settings(config: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Return the settings of the text or vision network in a ``config.json``, without those that are not its own.

    A model with both, such as CLIP, has a section for each.
    """
    if "auto_map" in config:
        logger.warning(
            "tower.name: %s names Python code of the model's own (auto_map), which is never executed: the network is "
            "that of transformers for model_type %r, whose features may differ",
            CONFIG_FILE,
            config.get("model_type"),
        )
    section = config.get(f"{part}_config")
    if isinstance(section, dict):
        config = {"model_type": f"{config.get('model_type')}_{part}_model", **section}
    found: dict[str, Any] = _check(config, "")
    return found


def _check(value: Any, key: str) -> Any:
    """Return a setting, and the settings in it that describe the network.

    Refuses numbers for which no memory or time would be enough, and those that are not finite.
    """
    most = MAX_LAYERS if any(part in key for part in _COUNTS) else _MAX_NUMBER
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"tower.name: {CONFIG_FILE}: {key}: got {value}; expected a finite number")
    if isinstance(value, int) and abs(value) > most:
        raise ConfigError(f"tower.name: {CONFIG_FILE}: {key}: got {value}; expected at most {most}")
    if isinstance(value, list):
        _check(len(value), f"{key}: number of items")
        return [_check(each, key) for each in value]
    if not isinstance(value, dict):
        return value
    if found := [name for name in _FETCHES if value.get(name)]:
        raise ConfigError(
            f"tower.name: {CONFIG_FILE} has {found[0]}, with which transformers fetches or converts weights; expected "
            "a plain encoder, or kind: timm for a model of timm"
        )
    return {
        name: _check(each, name)
        for name, each in value.items()
        if name not in _NOT_THE_NETWORK and not name.startswith("_") and not name.endswith("_implementation")
    }


def require_safetensors(folder: Path) -> None:
    """Check that a folder has weights in safetensors, and whole ones: transformers would fetch those under adapters."""
    names = sorted(path.name for path in folder.iterdir())
    if "adapter_config.json" in names:
        raise ConfigError(
            f"tower.name: {folder}: contains adapters (adapter_config.json) of another model; expected whole "
            "weights: merge them with peft's merge_and_unload and save_pretrained"
        )
    if not {"model.safetensors", "model.safetensors.index.json"} & {*names}:
        raise ConfigError(
            f"tower.name: {folder}: contains no model.safetensors, but {first_names(names)}; pickled weights are never "
            "opened, for a pickle can run code: if you trust them, load them with transformers elsewhere and write "
            "them with save_pretrained. pretrained: false gives random weights"
        )


def find_class(transformers: Any, config: Any, part: Part) -> Any:
    """Return the class that makes the encoder; refuse decoders."""
    known, kind, is_text = transformers.models.auto.modeling_auto, config.model_type, part == "text"
    has_encoder = is_text and kind in known.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES  # such as T5
    writes = kind in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_decoder = getattr(config, "is_decoder", False) or (config.is_encoder_decoder and not has_encoder)
    if is_decoder or (is_text and writes):
        raise other_model_error(config, part)
    return transformers.AutoModelForTextEncoding if has_encoder else transformers.AutoModel


def other_model_error(config: Any, part: Part) -> ConfigError:
    """Return the error for a model that does not read what it should."""
    what = f"no encoder of {'text' if part == 'text' else 'images'}"
    return ConfigError(
        f"tower.name: got a model of type {config.model_type!r}, which is "
        f"{'an encoder-decoder' if config.is_encoder_decoder else what}; expected an encoder of {_ENCODERS[part]}"
    )


@contextlib.contextmanager
def calls_to_transformers(kind: str) -> Iterator[None]:
    """Turn off messages and progress bars, and raise the errors of constructors and damaged files as ConfigError."""
    messages = import_module("transformers.utils.logging")
    level, bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # transformers, huggingface_hub and safetensors raise many kinds
        raise ConfigError(
            f"tower.name: transformers cannot make this model of type {kind!r}: {explain(error)}"
        ) from error
    finally:
        messages.set_verbosity(level)
        if bars:
            messages.enable_progress_bar()
