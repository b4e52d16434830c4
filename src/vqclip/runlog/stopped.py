"""``stopped.json``: what tells a scheduler that a run was asked to stop before its end, and can go on."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

from vqclip.checkpoint import checkpoints
from vqclip.checkpoint.folders import step_of
from vqclip.io.atomic import write_text

_FILE = "stopped.json"
_GO_ON = "give the same command again: it goes on from the newest checkpoint"


def write_stopped(folder: Path, steps: int, signal: str | None) -> int:
    """Write the marker into a run's folder, once the last checkpoint is on the disk; for one process only.

    Args:
        folder: the run's.
        steps: of the whole run.
        signal: name of the signal that asked.

    Returns:
        Steps done: those of the newest checkpoint, from which the run goes on.
    """
    saved = checkpoints(folder / "checkpoints")
    done = step_of(saved[-1]) if saved else 0
    facts = {
        "step": done,
        "steps": steps,
        "signal": signal,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "checkpoint": str(saved[-1].relative_to(folder)) if saved else None,
        "go_on": _GO_ON,
    }
    write_text(folder / _FILE, json.dumps(facts, indent=2) + "\n")
    return done


def remove_stopped(folder: Path) -> None:
    """Remove the marker, as the run goes on; for one process only."""
    (folder / _FILE).unlink(missing_ok=True)
