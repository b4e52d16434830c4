"""Encoders of transformers: a folder read as data, and the network that its settings describe.

    folder or hub name ─> config.json (checked), tokenizer.json, preprocessor_config.json ─> network with its weights

No code of a model is executed and no pickle is opened: `AutoModel` gets ``use_safetensors=True`` and
``trust_remote_code=False``, and settings with which it would fetch something else are refused or dropped.
`transformers` is imported when a tower is built.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from vqclip.config.bounds import MAX_LAYERS
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.files import find_folder
from vqclip.io.json_files import read_json
from vqclip.io.tensors import first_names, nonfinite_names, shape_differences
from vqclip.towers.vocabulary import VOCABULARY_FILE, require_library

logger = logging.getLogger(__name__)

Part = Literal["text", "vision"]

CONFIG_FILE = "config.json"
_FETCHED = ("*.json", "*.safetensors")
_NOT_FETCHED = ("onnx/*", "openvino/*", "coreml/*", "*/onnx/*", "*/openvino/*")
_MAX_NUMBER = 2**24
"""Largest integer in a configuration; the largest vocabularies have a million tokens."""
_COUNTS = ("layer", "depth", "block", "stage", "expert")
"""Integers whose keys contain one of these are numbers of modules."""
_RANDOM = ("dropout", "drop_path", "layerdrop")
"""Parts of the keys of rates at which activations are dropped in training."""
_NOT_THE_NETWORK = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "torchscript"),
    *("gradient_checkpointing", "output_attentions", "output_hidden_states", "return_dict", "use_cache"),
    *("finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id", "num_labels"),
)
"""Keys that do not describe the network: how it was trained, stored or is run."""
_FETCHES = ("quantization_config", "use_pretrained_backbone", "use_timm_backbone", "backbone", "architecture")
"""Keys with which transformers would fetch other weights or code; the last one is that of its wrapper of timm."""
_EXPECTED = {
    "text": "text with an attention mask, such as BERT, RoBERTa, MPNet, ModernBERT, T5's encoder or CLIP's text half",
    "vision": "images, such as ViT, DINOv2, CLIP's vision half or ConvNeXt",
}


def find_encoder(name: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a network; a model on the hub is fetched into the hub's cache: JSON and safetensors only.

    Args:
        name: folder that transformers or sentence-transformers wrote, or hub name ``owner/name``; a folder goes first.
        revision: branch, tag or commit on the hub; None for the newest.

    Raises:
        ConfigError: neither exists, the hub cannot be reached, or ``config.json`` is missing.
    """
    try:
        root = find_folder(name, revision, _FETCHED, _NOT_FETCHED)
    except CheckpointError as error:
        raise ConfigError(f"tower.name: {error}") from error
    if (root / CONFIG_FILE).is_file():
        return root
    for path in sorted(root.glob(f"0_*/{CONFIG_FILE}")):  # the first module of a folder of sentence-transformers
        return path.parent
    raise ConfigError(
        f"tower.name: {root}: expected {CONFIG_FILE}, model.safetensors and, for text, {VOCABULARY_FILE}; "
        f"got: {first_names(sorted(path.name for path in root.iterdir())) or 'an empty folder'}"
    )


def read_settings(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of a model; None if there is no such file.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    if not path.is_file():
        return None
    try:
        return read_json(path)[0]
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"tower.name: {error}") from error


def network_settings(config: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Return the settings of the text or vision network in a ``config.json``, without those that are not its own.

    A model with both, such as CLIP, has a section for each.

    Raises:
        ConfigError: a model that fetches other weights, or numbers beyond the size limits.
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


def build_network(
    settings: Mapping[str, Any],
    part: Part,
    weights: Path | None,
    *,
    dropout: bool,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
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
    transformers, kind = require_library("transformers"), str(settings.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"tower.name: transformers {transformers.__version__} has no model type {kind!r}; expected one that it "
            "contains, such as bert or vit: a model's own code is never executed"
        )
    if weights is not None:
        _require_weights(weights)
    with _calls_to_transformers(kind):
        config = transformers.CONFIG_MAPPING[kind].from_dict(dict(settings))
        for key, value in config.to_dict().items():
            if not dropout and isinstance(value, float) and any(part in key for part in _RANDOM):
                setattr(config, key, 0.0)
        auto = _auto_class(transformers, config, part)
        if shapes is not None:
            with torch.device("meta"):
                outline = auto.from_config(config, trust_remote_code=False).state_dict()
            expected = {name: tuple(tensor.shape) for name, tensor in outline.items()}
            if problems := shape_differences(expected, shapes):
                raise ConfigError(f"tower.network: does not fit the weights: {'; '.join(problems[:5])}")
        if weights is None:
            network, found = auto.from_config(config, trust_remote_code=False), {}
        else:
            network, found = auto.from_pretrained(
                weights,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    if network.main_input_name != ("input_ids" if part == "text" else "pixel_values"):
        raise _other_model_error(config, part)
    mismatched = sorted(found.get("mismatched_keys", ()))
    problems = [f"{name}: got shape {tuple(got)}, expected {tuple(want)}" for name, got, want in mismatched]
    problems += [str(each) for each in found.get("error_msgs", ())]
    loaded = {} if weights is None else network.state_dict()
    problems += [f"{name}: contains NaN or infinity" for name in nonfinite_names(loaded)]
    if problems:
        raise ConfigError(f"tower.name: the weights in {weights} do not fit: {'; '.join(problems[:5])}")
    return network.float(), sorted(found.get("missing_keys", ()))


def _require_weights(folder: Path) -> None:
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


def _auto_class(transformers: Any, config: Any, part: Part) -> Any:
    """Return the class that makes the encoder; refuse decoders."""
    known, kind, is_text = transformers.models.auto.modeling_auto, config.model_type, part == "text"
    has_encoder = is_text and kind in known.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES  # such as T5
    writes = kind in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_decoder = getattr(config, "is_decoder", False) or (config.is_encoder_decoder and not has_encoder)
    if is_decoder or (is_text and writes):
        raise _other_model_error(config, part)
    return transformers.AutoModelForTextEncoding if has_encoder else transformers.AutoModel


def _other_model_error(config: Any, part: Part) -> ConfigError:
    what = f"no encoder of {'text' if part == 'text' else 'images'}"
    return ConfigError(
        f"tower.name: got a model of type {config.model_type!r}, which is "
        f"{'an encoder-decoder' if config.is_encoder_decoder else what}; expected an encoder of {_EXPECTED[part]}"
    )


@contextlib.contextmanager
def _calls_to_transformers(kind: str) -> Iterator[None]:
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
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"tower.name: transformers cannot make this model of type {kind!r}: {type(error).__name__}: {reason}"
        ) from error
    finally:
        messages.set_verbosity(level)
        if bars:
            messages.enable_progress_bar()
