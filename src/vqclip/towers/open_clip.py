"""Creation of open_clip models, with errors that name the setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from torch import Tensor

from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names, nonfinite_names
from vqclip.towers.weights import explain, read_state, require_plain_size


@dataclass
class SharedModels:
    """The open_clip models that were made in a `share_models` block."""

    models: dict[tuple[str, str | None], Any] = field(default_factory=dict)
    """By name and pretrained weights."""
    tensors: dict[tuple[str, str | None], dict[str, Tensor]] = field(default_factory=dict)
    """All tensors of each by their names, before towers removed what they do not use."""

    def tensors_of(self, model: str, weights: str | None) -> dict[str, Tensor]:
        """Return the tensors of a model with pretrained weights; none without such weights."""
        return {} if weights is None else self.tensors[model, weights]


_SHARED: ContextVar[SharedModels | None] = ContextVar("shared open_clip models", default=None)


_FAILURES = (
    *(RuntimeError, OSError, ValueError, ImportError, UnpicklingError, SafetensorError, BadZipFile),
    *(AssertionError, AttributeError, EOFError, LookupError, StopIteration, TypeError),  # from files of other content
)


@contextmanager
def share_models() -> Iterator[SharedModels]:
    """Make each open_clip model once in the block, so that both towers take their halves of the same one."""
    shared = SharedModels()
    token = _SHARED.set(shared)
    try:
        yield shared
    finally:
        _SHARED.reset(token)


def create_open_clip(model: str, pretrained: str | None) -> Any:
    """Make an open_clip model with separate halves ``.visual`` and ``.text``; in `share_models`, return the same again.

    Args:
        model: name of an open_clip model configuration.
        pretrained: tag of pretrained weights, path of a local file, or None for random weights.

    Raises:
        ConfigError: a model or tag that open_clip does not know, or weights that cannot be loaded.
    """
    shared = _SHARED.get()
    if shared is None:
        return _create(model, pretrained)
    key = (model, pretrained)
    if key not in shared.models:
        shared.models[key] = _create(model, pretrained)
        shared.tensors[key] = dict(shared.models[key].state_dict(keep_vars=True))
    return shared.models[key]


def _create(model: str, pretrained: str | None) -> Any:
    import open_clip

    # Only names of this list: open_clip also accepts "local-dir:..." and "hf-hub:...", which would download weights.
    if model not in open_clip.list_models():
        raise unknown_model_error("tower.model", "open_clip", model, open_clip.list_models())
    config = open_clip.get_model_config(model)
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained is not None and pretrained not in tags and not Path(pretrained).is_file():
        raise ConfigError(
            f"tower.pretrained: got {pretrained!r}, which is neither a file nor one of the tags of {model}: "
            f"{', '.join(tags) or 'none'}"
        )
    if pretrained in tags:
        activation = bool(open_clip.get_pretrained_cfg(model, pretrained).get("quick_gelu", False))
        if activation != bool(config.get("quick_gelu", False)):
            raise ConfigError(
                f"tower.pretrained: the weights {pretrained!r} were trained {'with' if activation else 'without'} "
                f"QuickGELU, {model} is built {'without' if activation else 'with'} it; expected "
                f"{model + '-quickgelu' if activation else model.removesuffix('-quickgelu')} as the model"
            )
    with TemporaryDirectory(prefix="vqclip-weights-") as folder:
        source = pretrained
        if pretrained is not None and pretrained not in tags and not pretrained.endswith((".npz", ".npy")):
            state, prefix = read_state(Path(pretrained), "tower.pretrained")
            if prefix or not pretrained.endswith(".safetensors"):  # open_clip knows fewer layouts
                torch.save(state, source := f"{folder}/weights.pt")
        try:
            if source is not None and source.endswith(".npz"):
                require_plain_size(Path(source))
            made = open_clip.create_model(
                model,
                pretrained=source,
                device=torch.get_default_device(),  # `meta` for the shapes alone, as for a plan
                force_custom_text=True,
                weights_only=True,
                pretrained_text=False,
            )
        except _FAILURES as error:
            if pretrained is None:
                raise ConfigError(
                    f"tower.model: open_clip cannot make {model}: {type(error).__name__}: {error}; a model of "
                    "open_clip's own parts, such as ViT-B-16, needs neither the network nor other packages"
                ) from error
            raise ConfigError(
                f"tower.pretrained: {pretrained!r} cannot be loaded as weights of {model}: {explain(error)}; expected "
                "a state dict of this model, saved by torch or safetensors"
            ) from error
    if pretrained is not None and (bad := nonfinite_names(made.state_dict())):
        raise ConfigError(
            f"tower.pretrained: the weights {pretrained!r} contain NaN or infinity: {first_names(bad)}; expected an "
            "intact copy of them"
        )
    return made


def unknown_model_error(key: str, library: str, name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a model that `library` does not have; `key` is the setting, `known` the valid names."""
    close = get_close_matches(name, known, n=5)
    hint = f"did you mean one of: {', '.join(close)}?" if close else f"{library}.list_models() gives the names"
    return ConfigError(f"{key}: {library} has no model {name!r}; {hint}")
