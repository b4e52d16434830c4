"""Load the model of a run, a checkpoint, a tokenizer folder or a hub name."""

from __future__ import annotations

from pathlib import Path

from vqclip import checkpoint
from vqclip.errors import CheckpointError, ConfigError
from vqclip.model import CLIP
from vqclip.tokenizer.folder import CONFIG_FILE
from vqclip.tokenizer.hub import find_folder
from vqclip.train.ema import Weights
from vqclip.train.export import load_checkpoint_model

MODEL_HELP = (
    "run folder (its exported tokenizer, else its newest checkpoint), checkpoint folder, exported tokenizer folder, or "
    "hub name (owner/name)"
)


def load_model(name: str, weights: Weights = "averaged") -> tuple[CLIP, str]:
    """Load the model of a run, checkpoint or tokenizer folder, or of a hub name.

    Args:
        name: folder or hub name.
        weights: of a run or checkpoint with moving averages (`train.ema`): averaged ones, or those of its step.

    Returns:
        The model, and the folder (or hub name) that it was read from.

    Raises:
        CheckpointError: the folder contains no model, or a damaged one.
        ConfigError: ``weights`` is "current", and the folder is no run and no checkpoint.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise CheckpointError(f"{path}: got a file, expected a folder: {MODEL_HELP}")
    exported = (path, path / "tokenizer") if weights == "averaged" else ()  # a run exports averages if it has them
    if not path.is_dir():
        if not exported:
            _refuse_current(name)
        return CLIP.from_pretrained(_find_on_hub(name)), name
    for folder in exported:
        if (folder / CONFIG_FILE).is_file():
            return CLIP.from_pretrained(folder), str(folder)
    if (path / "model" / CONFIG_FILE).is_file():
        return load_checkpoint_model(path, weights), str(path / "model")
    newest = checkpoint.latest(path / "checkpoints") or checkpoint.latest(path)
    if newest is None:
        if not exported and (path / CONFIG_FILE).is_file():
            _refuse_current(name)
        raise CheckpointError(
            f"{path}: no model here; expected {CONFIG_FILE}, tokenizer/, model/ or checkpoints/ in it, "
            f"got: {', '.join(sorted(each.name for each in path.iterdir())[:8]) or 'an empty folder'}"
        )
    return load_checkpoint_model(newest, weights), str(newest / "model")


def _refuse_current(name: str) -> None:
    raise ConfigError(f"weights: got 'current' for the tokenizer {name}; expected the folder of a run or checkpoint")


def _find_on_hub(name: str) -> Path:
    problem = "no such run, checkpoint or tokenizer folder here"
    try:
        folder = find_folder(name)
    except CheckpointError as error:
        raise CheckpointError(f"{problem}: {error}") from None
    if not folder.is_dir():
        raise CheckpointError(f"{problem}: {name}; expected a {MODEL_HELP}")
    return folder
