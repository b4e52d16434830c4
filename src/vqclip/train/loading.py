"""Load the model of a run, a checkpoint, a tokenizer folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from vqclip import checkpoint
from vqclip.data import mask_credentials
from vqclip.errors import CheckpointError, ConfigError
from vqclip.model import CLIP, load_pretrained
from vqclip.tokenizer.folder import CONFIG_FILE, WEIGHTS_FILE, find_folder
from vqclip.train.ema import Weights
from vqclip.train.export import load_checkpoint_model
from vqclip.train.tasks.kinds import load_task_config

MODEL_HELP = (
    "run folder (its exported tokenizer, else its newest checkpoint), checkpoint folder, exported tokenizer folder, or "
    "hub name (owner/name)"
)


class LoadedModel(NamedTuple):
    """A model, and where it comes from."""

    model: Any
    """A `CLIP` in evaluation mode; with ``images_alone`` perhaps an `ImageModel`."""
    place: str
    """Folder or hub name that it was read from."""
    weights: str
    """``averaged`` (by `train.ema`), ``current`` (those of the step), or ``exported`` where this is not recorded."""


def load_model(name: str, weights: Weights = "averaged", *, images_alone: bool = False) -> LoadedModel:
    """Load the model of a run, checkpoint or tokenizer folder, or of a hub name.

    The folder ``model`` of a checkpoint means the checkpoint, so that it too gives the averages.

    Args:
        name: folder or hub name.
        weights: of a run or checkpoint with moving averages (`train.ema`): averaged ones, or those of its step.
        images_alone: allow a tokenizer of images alone.

    Raises:
        CheckpointError: the folder contains no model, a damaged one, or no text tokenizer.
        ConfigError: ``weights`` is "current", and the folder is no run and no checkpoint.
    """
    require_local(name)
    found = _load(name, weights)
    if not images_alone and not isinstance(found.model, CLIP):
        raise CheckpointError(f"{found.place}: contains image tokenizer; expected one of modality 'text' too")
    return found


def _load(name: str, weights: Weights) -> LoadedModel:
    path = Path(name).expanduser()
    if path.is_file():
        raise CheckpointError(f"{path}: got a file, expected a folder: {MODEL_HELP}")
    if not path.is_dir():
        if weights == "current":
            _refuse_current(name)
        return LoadedModel(load_pretrained(_find_on_hub(name)), name, "exported")
    saved = _find_checkpoint(path)
    if saved is None and weights == "averaged":  # a run exports averages if it has them
        for folder in (path, path / "tokenizer"):
            if (folder / CONFIG_FILE).is_file():
                return LoadedModel(load_pretrained(folder), str(folder), _exported_weights(folder))
    newest = saved or checkpoint.latest(path / "checkpoints") or checkpoint.latest(path)
    if newest is None:
        if weights == "current" and (path / CONFIG_FILE).is_file():
            _refuse_current(name)
        raise CheckpointError(
            f"{path}: no model here; expected {CONFIG_FILE}, tokenizer/, model/ or checkpoints/ in it, "
            f"got: {', '.join(sorted(each.name for each in path.iterdir())[:8]) or 'an empty folder'}"
        )
    model, has_averages = load_checkpoint_model(newest, weights)
    return LoadedModel(model, str(newest / "model"), "current" if weights == "current" or not has_averages else weights)


def require_local(name: str) -> None:
    """Refuse a URL in place of a model.

    Raises:
        CheckpointError: it is a URL.
    """
    if "://" in name:
        raise CheckpointError(
            f"{mask_credentials(name)}: models are not read from URLs; `vqclip copy-run URL FOLDER` copies a run"
        )


def _find_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint that ``path`` is, or whose ``model`` it is; None for another folder."""
    path = path.resolve()
    if path.name == "model" and path.parent in checkpoint.checkpoints(path.parent.parent):
        return path.parent
    return path if (path / "model" / WEIGHTS_FILE).is_file() else None


def _exported_weights(folder: Path) -> str:
    """Return the kind of weights that a run exported to ``folder``, by its configuration."""
    config = folder.parent / "config.yaml"
    if folder.name != "tokenizer" or not config.is_file():
        return "exported"
    try:
        return "current" if load_task_config(config).train.ema is None else "averaged"
    except ConfigError:  # of another version; the figures do not depend on this word
        return "exported"


def _refuse_current(name: str) -> None:
    raise ConfigError(f"weights: got 'current' for the tokenizer {name}; expected the folder of a run or checkpoint")


def _find_on_hub(name: str) -> Path:
    try:
        return find_folder(name)
    except CheckpointError as error:
        raise CheckpointError(
            f"no such run, checkpoint or tokenizer folder here: {error}; expected a {MODEL_HELP}"
        ) from None
