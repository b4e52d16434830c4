"""Tokenizer folders of a run, with their cards, and `summary.json`; the command ``vqclip export-tokenizer``."""

from __future__ import annotations

import argparse
import filecmp
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vqclip import arguments as types
from vqclip import checkpoint
from vqclip.card import card
from vqclip.data import masked
from vqclip.errors import CheckpointError, ConfigError, VqclipError, printable
from vqclip.files import replace_folder, write_text
from vqclip.logs import put, tell_error, tell_interrupt
from vqclip.model import CLIP
from vqclip.pretrained import CARD_FILE, WEIGHTS_FILE
from vqclip.report.best import PREFIX, read_best
from vqclip.report.log import read_metrics
from vqclip.report.summary import RunSummary, model_card

if TYPE_CHECKING:
    from vqclip.recipe import TrainConfig

_SUMMARY = "summary.json"


def export_tokenizer(model: CLIP, folder: Path) -> None:
    """Write the tokenizer folder; a card that stands there for the very same weights stays."""

    def fill(aside: Path) -> None:
        model.save_pretrained(aside)
        card, weights = folder / CARD_FILE, folder / WEIGHTS_FILE
        if card.is_file() and weights.is_file() and filecmp.cmp(weights, aside / WEIGHTS_FILE, shallow=False):
            shutil.copyfile(card, aside / CARD_FILE)

    replace_folder(folder, fill)


def write_summary(summary: RunSummary, config: TrainConfig) -> None:
    """Write the card into the exported folder and the summary into the run's."""
    write_text(Path(summary.tokenizer) / CARD_FILE, model_card(summary, config))
    write_text(Path(summary.folder) / _SUMMARY, summary.to_json())


def recorded_speed(folder: Path) -> tuple[dict[str, float], int] | None:
    """Speed and number of processes that the summary of the run in ``folder`` tells; None without one."""
    try:
        summary = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
        speed = {name: float(summary["speed"][name]) for name in ("images_per_second", "data_wait")}
        return speed, int(summary["processes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def export_checkpoint(run: Path, step: int | None, out: Path | None = None) -> Path:
    """Write the tokenizer folder of one checkpoint, after comparing the checkpoint's bytes with their hashes.

    Args:
        run: the run's folder.
        step: steps done; None for the newest checkpoint.
        out: the folder to write; None for ``tokenizer-step-<step>`` in the run's.

    Returns:
        The folder.

    Raises:
        ConfigError: there is no checkpoint of that step, or ``out`` holds what would be lost.
        CheckpointError: the run has no checkpoint, or this one is damaged.
    """
    found = {checkpoint.step_of(path): path for path in checkpoint.checkpoints(run / "checkpoints")}
    if not found:
        raise CheckpointError(f"{run / 'checkpoints'}: no checkpoints; expected the folder of a run, such as runs/base")
    step = max(found) if step is None else step
    if step not in found:
        raise ConfigError(f"{run}: no checkpoint of step {step}; expected one of {', '.join(map(str, found))}")
    model = CLIP.from_pretrained(checkpoint.load(found[step]).model_folder)
    out = out or run / f"tokenizer-step-{step}"
    metrics = run / "metrics.jsonl"
    lines = [line for line in read_metrics(metrics) if line["step"] == step] if metrics.exists() else []
    rates = [f"- {name}: {rate:.1%}" for line in lines for name, rate in line.items() if name.startswith(PREFIX)]
    figures = "\n".join(rates) or "No evaluation was recorded after this step."
    what = f"An image and a text tokenizer with one joint embedding, trained with vqclip: step {step} of a run."
    model.save_pretrained(out)
    write_text(out / CARD_FILE, card(printable(run.resolve().name, one_line=True), what, f"## Measured\n\n{figures}"))
    return out


def command_line() -> argparse.ArgumentParser:
    """The options of ``vqclip export-tokenizer``."""
    parser = argparse.ArgumentParser(
        prog="vqclip export-tokenizer", description="Write the tokenizer folder of any checkpoint of a run."
    )
    parser.add_argument("run", type=types.path, help="the run's folder, such as runs/base")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=types.whole(0, 2**63 - 1), help="of the checkpoint; the newest by default")
    which.add_argument("--best", action="store_true", help="the checkpoint that train.keep_best names")
    parser.add_argument("--out", type=types.path, help="folder to write; tokenizer-step-<step> in the run's by default")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 2 for anything that the user can mend, 130 for Ctrl-C.
    """
    options = command_line().parse_args(arguments)
    try:
        step = read_best(options.run) if options.best else options.step
        put(str(export_checkpoint(options.run, step, options.out)))
    except (VqclipError, OSError) as error:
        tell_error("vqclip export-tokenizer", error, masked)
        return 2
    except KeyboardInterrupt:
        return tell_interrupt("vqclip export-tokenizer")
    return 0
