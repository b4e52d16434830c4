"""What a finished run leaves outside of its checkpoints: the tokenizer folder with its card, and `summary.json`."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vqclip.files import replace_folder, write_text
from vqclip.model import CLIP
from vqclip.pretrained import CARD_FILE, WEIGHTS_FILE
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
