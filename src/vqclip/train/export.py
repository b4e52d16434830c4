"""Tokenizer folders of a run with their cards, `summary.json`, and the command ``vqclip export-tokenizer``."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vqclip import checkpoint
from vqclip.errors import CheckpointError, ConfigError, printable
from vqclip.io.atomic import replace_folder, require_replaceable, write_text
from vqclip.model import CLIP
from vqclip.runlog.best import PREFIX
from vqclip.runlog.metrics import read_metrics
from vqclip.tokenizer.card import card
from vqclip.tokenizer.folder import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE
from vqclip.train.summary import RunSummary, model_card

if TYPE_CHECKING:
    from vqclip.train.config import TrainConfig

_SUMMARY = "summary.json"


def export_tokenizer(model: CLIP, folder: Path) -> None:
    """Write the tokenizer folder; keep an existing card if the weights are the same."""

    def fill(aside: Path) -> None:
        model.save_pretrained(aside)
        card, weights = folder / CARD_FILE, folder / WEIGHTS_FILE
        if card.is_file() and weights.is_file() and filecmp.cmp(weights, aside / WEIGHTS_FILE, shallow=False):
            shutil.copyfile(card, aside / CARD_FILE)

    replace_folder(folder, fill)


def write_summary(summary: RunSummary, config: TrainConfig) -> None:
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


def export_checkpoint(run: Path, step: int | None, out: Path | None = None) -> Path:
    """Export the tokenizer folder of one checkpoint, after verifying its checksums.

    Args:
        run: folder of the run.
        step: steps done; None for the newest checkpoint.
        out: the folder to write; None for ``tokenizer-step-<step>`` in the run's.

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
    model = CLIP.from_pretrained(checkpoint.load(found[step]).model_folder)
    metrics = run / "metrics.jsonl"
    lines = [line for line in read_metrics(metrics) if line["step"] == step] if metrics.exists() else []
    rates = [f"- {name}: {rate:.1%}" for line in lines for name, rate in line.items() if name.startswith(PREFIX)]
    figures = "\n".join(rates) or "No evaluation was recorded after this step."
    what = f"An image and a text tokenizer with one joint embedding, trained with vqclip: step {step} of a run."
    model.save_pretrained(out)
    write_text(out / CARD_FILE, card(printable(run.resolve().name, one_line=True), what, f"## Measured\n\n{figures}"))
    return out
