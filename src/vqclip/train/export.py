"""Models of a run: load one, export its tokenizer with its card and `summary.json`."""

from __future__ import annotations

import errno
import filecmp
import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from vqclip import checkpoint
from vqclip.data import mask_credentials
from vqclip.errors import CheckpointError, ConfigError, VqclipError, printable
from vqclip.evaluation import format_figure
from vqclip.io.atomic import replace_folder, require_replaceable, write_text
from vqclip.model import CLIP, load_pretrained
from vqclip.runlog.metrics import EVALUATION, read_metrics
from vqclip.tokenizer.folder import CARD_FILE, CONFIG_FILE, FILES, WEIGHTS_FILE, find_folder, read_weights
from vqclip.tokenizer.saving import card
from vqclip.train.ema import CURRENT, Weights, read_averages
from vqclip.train.summary import RunSummary, model_card
from vqclip.train.tasks.base import Task
from vqclip.train.tasks.kinds import load_task_config

if TYPE_CHECKING:
    from vqclip.train.config import TaskConfig

logger = logging.getLogger(__name__)

_SUMMARY = "summary.json"
MODEL_HELP = (
    "run folder (its exported tokenizer, else its newest checkpoint), checkpoint folder, exported tokenizer folder, or "
    "hub name (owner/name)"
)


def export_tokenizer(task: Task, folder: Path) -> None:
    """Write the tokenizer folder; keep an existing card if the weights are the same, and files that are not its own."""

    def fill(aside: Path) -> None:
        task.export(aside)
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            try:
                if path.is_dir() and not path.is_symlink():
                    (aside / name).mkdir(exist_ok=True)
                elif name.parts[0] not in FILES:
                    shutil.copyfile(path, aside / name, follow_symlinks=False)
            except OSError as error:  # such as another user's
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                logger.warning("%s cannot be copied, and is removed: %s", path, error)
        card, weights = folder / CARD_FILE, folder / WEIGHTS_FILE
        if card.is_file() and weights.is_file() and filecmp.cmp(weights, aside / WEIGHTS_FILE, shallow=False):
            shutil.copyfile(card, aside / CARD_FILE)

    replace_folder(folder, fill)


def write_summary(summary: RunSummary, config: TaskConfig) -> None:
    """Write the card to the exported folder and the summary to the run's folder."""
    write_text(Path(summary.tokenizer) / CARD_FILE, model_card(summary, config))
    write_text(Path(summary.folder) / _SUMMARY, summary.to_json())


def recorded_speed(folder: Path) -> tuple[dict[str, float], int] | None:
    """Read speed and number of processes from the summary of the run in ``folder``; None without one."""
    try:
        summary = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
        speed = {name: float(summary["speed"][name]) for name in ("images_per_second", "data_wait")}
        return speed, int(summary["processes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_checkpoint_model(path: Path, weights: Weights = "averaged") -> tuple[Any, bool]:
    """Load the model of one checkpoint in evaluation mode, after verifying its checksums.

    Args:
        path: folder of the checkpoint.
        weights: ``averaged``: the moving averages where the checkpoint has them (`train.ema`), and the current weights
            elsewhere; ``current``: those of the step alone.

    Returns:
        The model, and whether the checkpoint has moving averages. It is a `CLIP`; without ``text`` for a pixel decoder
        of a tokenizer of images alone.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    saved = checkpoint.load(path)
    if (saved.model_folder / CONFIG_FILE).is_file():
        whole: nn.Module = CLIP.from_pretrained(saved.model_folder)
        trained = whole
    else:
        task = _load_task(saved)
        whole, trained = task.evaluated, task.model
    averages = read_averages(saved, trained)
    if weights == "averaged":
        with torch.no_grad():
            for name, average in averages.items():
                trained.get_parameter(name).copy_(average)
    return whole, bool(averages)


def _load_task(saved: checkpoint.Checkpoint) -> Task:
    """Load a checkpoint that holds only a part of the model, by the configuration of its run."""
    file = saved.path.parents[1] / "config.yaml"
    try:
        task = load_task_config(file).build_task(torch.device("cpu"))
    except VqclipError as error:
        raise CheckpointError(f"{saved.path}: cannot be used without its run's configuration: {error}") from error
    task.require_own(saved.model_folder)
    task.model.load_state_dict(read_weights(saved.model_folder, task.model.state_dict()), strict=True)
    task.evaluated.eval()
    return task


def export_checkpoint(run: Path, step: int | None, out: Path | None = None, weights: Weights = "averaged") -> Path:
    """Export the tokenizer folder of one checkpoint, after verifying its checksums.

    Args:
        run: folder of the run.
        step: steps done; None for the newest checkpoint.
        out: the folder to write; None for ``tokenizer-step-<step>`` in the run's.
        weights: averaged or current ones, see `load_checkpoint_model`.

    Returns:
        The folder.

    Raises:
        ConfigError: there is no checkpoint of that step, or ``out`` contains other files.
        CheckpointError: the run has no checkpoint, or this one is damaged.
    """
    found = {checkpoint.step_of(path): path for path in checkpoint.checkpoints(run / "checkpoints")}
    if not found:
        raise CheckpointError(f"{run / 'checkpoints'}: no checkpoints; expected the folder of a run, such as runs/base")
    step = max(found) if step is None else step
    if step not in found:
        raise ConfigError(f"{run}: no checkpoint of step {step}; expected one of {', '.join(map(str, found))}")
    out = out or run / f"tokenizer-step-{step}"
    require_replaceable(out, CONFIG_FILE, *FILES)
    if out.resolve().is_relative_to((run / "checkpoints").resolve()):
        raise ConfigError(f"{out}: is among the checkpoints of the run; expected a folder elsewhere")
    model, has_averages = load_checkpoint_model(found[step], weights)
    of_current = weights == "current" and has_averages
    figures = _recorded_figures(run, step, of_current) or "No evaluation was recorded after this step."
    kind = ", without its moving average" if of_current else ""
    what = f"A tokenizer with a joint embedding of images and texts, trained with vqclip: step {step} of a run{kind}."
    model.save_pretrained(out)
    write_text(out / CARD_FILE, card(printable(run.resolve().name, one_line=True), what, f"## Measured\n\n{figures}"))
    return out


def _recorded_figures(run: Path, step: int, of_current: bool) -> str:
    """Return a line for each rate recorded after ``step``, of the averaged or the current weights."""
    metrics = run / "metrics.jsonl"
    lines = [line for line in read_metrics(metrics) if line["step"] == step] if metrics.exists() else []
    rates = {name: rate for line in lines for name, rate in line.items() if name.startswith(EVALUATION)}
    rates = {name.removeprefix(EVALUATION): rate for name, rate in rates.items()}
    chosen = {name: rate for name, rate in rates.items() if name.startswith(CURRENT) == of_current}
    return "\n".join(
        f"- {EVALUATION}{name.removeprefix(CURRENT)}: {format_figure(name, value)}" for name, value in chosen.items()
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
        try:
            folder = find_folder(name)
        except CheckpointError as error:
            raise CheckpointError(
                f"no such run, checkpoint or tokenizer folder here: {error}; expected a {MODEL_HELP}"
            ) from None
        return LoadedModel(load_pretrained(folder), name, "exported")
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
