"""Tokenizer folders of a run with their cards, `summary.json`, and the command ``vqclip export-tokenizer``."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vqclip import checkpoint
from vqclip.errors import CheckpointError, ConfigError, printable
from vqclip.io.atomic import replace_folder, require_replaceable, write_text
from vqclip.model import CLIP
from vqclip.runlog.best import PREFIX
from vqclip.runlog.metrics import read_metrics
from vqclip.tokenizer.card import card
from vqclip.tokenizer.folder import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE
from vqclip.train.ema import CURRENT, Weights, read_averages, use_averages
from vqclip.train.summary import RunSummary, model_card
from vqclip.train.tasks.base import Task

if TYPE_CHECKING:
    from vqclip.train.config import TaskConfig

_SUMMARY = "summary.json"


def export_tokenizer(task: Task[Any], folder: Path) -> None:
    """Write the tokenizer folder; keep an existing card if the weights are the same."""

    def fill(aside: Path) -> None:
        task.export(aside)
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


def load_checkpoint_model(path: Path, weights: Weights = "averaged") -> tuple[CLIP, bool]:
    """Load the model of one checkpoint in evaluation mode, after verifying its checksums.

    Args:
        path: folder of the checkpoint.
        weights: ``averaged``: the moving averages where the checkpoint has them (`train.ema`), and the current weights
            elsewhere; ``current``: those of the step alone.

    Returns:
        The model, and whether the checkpoint has moving averages.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    saved = checkpoint.load(path)
    model = CLIP.from_pretrained(saved.model_folder)
    averages = read_averages(saved, model)
    if weights == "averaged":
        use_averages(model, averages)
    return model, bool(averages)


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
    require_replaceable(out, CONFIG_FILE)
    if out.resolve().is_relative_to((run / "checkpoints").resolve()):
        raise ConfigError(f"{out}: is among the checkpoints of the run; expected a folder elsewhere")
    model, has_averages = load_checkpoint_model(found[step], weights)
    of_current = weights == "current" and has_averages
    figures = _recorded_figures(run, step, of_current) or "No evaluation was recorded after this step."
    kind = ", without its moving average" if of_current else ""
    what = f"An image and a text tokenizer with one joint embedding, trained with vqclip: step {step} of a run{kind}."
    model.save_pretrained(out)
    write_text(out / CARD_FILE, card(printable(run.resolve().name, one_line=True), what, f"## Measured\n\n{figures}"))
    return out


def _recorded_figures(run: Path, step: int, of_current: bool) -> str:
    """Return a line for each rate recorded after ``step``, of the averaged or the current weights."""
    metrics = run / "metrics.jsonl"
    lines = [line for line in read_metrics(metrics) if line["step"] == step] if metrics.exists() else []
    rates = {
        name.removeprefix(PREFIX): rate for line in lines for name, rate in line.items() if name.startswith(PREFIX)
    }
    chosen = {name: rate for name, rate in rates.items() if name.startswith(CURRENT) == of_current}
    return "\n".join(f"- {PREFIX}{name.removeprefix(CURRENT)}: {rate:.1%}" for name, rate in chosen.items())
