"""``stopped.json``: tells a scheduler that a run was stopped before its end and can be resumed."""

from __future__ import annotations

import json
import signal
from datetime import datetime, timezone
from pathlib import Path

from vqclip.checkpoint import checkpoints
from vqclip.checkpoint.folders import step_of
from vqclip.io.atomic import write_text

_FILE = "stopped.json"
_HOW_TO_RESUME = "run the same command again: it resumes from the newest checkpoint"


def write_stopped(folder: Path, steps: int, reason: str) -> int:
    """Write the file into a run's folder after the last checkpoint; on one rank only.

    Args:
        folder: of the run.
        steps: of the whole run.
        reason: name of the signal, or the reason in words.

    Returns:
        Steps done: those of the newest checkpoint, from which the run resumes.
    """
    saved = checkpoints(folder / "checkpoints")
    done = step_of(saved[-1]) if saved else 0
    facts = {
        "step": done,
        "steps": steps,
        "signal": reason if reason in signal.Signals.__members__ else None,
        "reason": reason,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "checkpoint": str(saved[-1].relative_to(folder)) if saved else None,
        "how_to_resume": _HOW_TO_RESUME,
    }
    write_text(folder / _FILE, json.dumps(facts, indent=2) + "\n")
    return done


def remove_stopped(folder: Path) -> None:
    """Remove ``stopped.json`` when the run resumes; call it on one rank only."""
    (folder / _FILE).unlink(missing_ok=True)
