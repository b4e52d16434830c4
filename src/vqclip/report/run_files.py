"""Files of a run's folder, read for its page; every one may be missing, unfinished, damaged or forged."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vqclip.checkpoint import checkpoints, step_of
from vqclip.config.yaml import read_yaml
from vqclip.errors import ConfigError, VqclipError
from vqclip.io.files import open_regular, read_bounded
from vqclip.io.json_files import read_json
from vqclip.runlog.curves import MAX_LINE, Curves, read_curves, read_lines
from vqclip.runlog.metrics import parse_line

MAX_RECORDS = 20
"""Events and bad samples that a page lists: the newest."""
MAX_RECORD_BYTES = 32 << 20
"""Bytes at the beginning of their files that are read."""
MAX_CONFIG_BYTES = 1 << 18


@dataclass
class Records:
    """Lines of ``events.jsonl`` or ``bad_samples.jsonl``."""

    total: int = 0
    """Lines that could be read."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Kind → lines."""
    first_step: int | None = None
    newest: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))


@dataclass
class RunFiles:
    """Content of a run's folder."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    curves: Curves = field(default_factory=Curves)
    events: Records = field(default_factory=Records)
    bad_samples: Records = field(default_factory=Records)
    summary: dict[str, Any] = field(default_factory=dict)
    """Empty before the end of the run."""
    best: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the checkpoints."""
    missing: list[str] = field(default_factory=list)
    """Parts that are absent or cannot be read, in words."""

    @property
    def name(self) -> str:
        """Name of the run: that of its configuration, or of its folder."""
        return text_at(self.config, "run.name") or self.folder.resolve().name

    @property
    def steps(self) -> int:
        """Steps of the whole run; 0 if unknown."""
        return max(0, int(number_at(self.config, "train.steps") or 0))

    @property
    def done(self) -> int:
        """Steps done, as far as the files show."""
        return max([self.curves.last_step, *self.checkpoints])

    @property
    def batch_size(self) -> int:
        """Samples of a step; 0 if unknown."""
        return max(0, int(number_at(self.config, "train.batch_size") or 0))

    @property
    def is_finished(self) -> bool:
        """True if the run has reached its end, its last evaluation included."""
        return bool(self.summary) and not self.stopped and self.done >= self.steps


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl"))


def _near(folder: Path) -> str:
    """Return the end of a message that suggests the run below a folder, or above it."""
    try:
        below = sorted(each for each in itertools.islice(folder.iterdir(), 1000) if _is_run(each))
    except OSError:
        below = []
    near = [*below, *(each for each in folder.absolute().parents[:2] if _is_run(each))]
    return f"; did you mean {near[0]}?" if near else ""


def read_run(folder: Path) -> RunFiles:
    """Read the folder of a run.

    Raises:
        ConfigError: there is no such folder, or it contains neither a configuration nor metrics.
    """
    if not folder.is_dir():
        got = "not a folder" if folder.exists() else "no such folder"
        raise ConfigError(f"{folder}: {got}; expected the folder of a run, such as runs/base{_near(folder)}")
    if not _is_run(folder):
        raise ConfigError(
            f"{folder}: contains neither config.yaml nor metrics.jsonl; expected the folder of a run, such as "
            f"runs/base{_near(folder)}"
        )
    run = RunFiles(folder)
    with naming(run, "config.yaml", "the settings are unknown"):
        run.config_text = read_bounded(folder / "config.yaml", MAX_CONFIG_BYTES).decode("utf-8", "replace")
        tree = read_yaml(run.config_text, "config.yaml", []).plain()
        run.config = tree if isinstance(tree, dict) else {}
    with naming(run, "metrics.jsonl", "there are no curves yet"):
        run.curves = read_curves(folder / "metrics.jsonl")
    if run.curves.damaged:
        run.missing.append(f"metrics.jsonl: {run.curves.damaged:,} lines cannot be read and are left out")
    for name in ("summary", "best", "stopped"):
        with naming(run, f"{name}.json"):
            setattr(run, name, read_json(folder / f"{name}.json")[0])
    with naming(run, "events.jsonl"):
        run.events = _read_records(folder / "events.jsonl", "event")
    with naming(run, "bad_samples.jsonl"):
        run.bad_samples = _read_records(folder / "bad_samples.jsonl", "kind")
    with naming(run, "checkpoints"):
        run.checkpoints = sorted(step_of(path) for path in checkpoints(folder / "checkpoints"))
    return run


def value_at(tree: Any, path: str) -> Any:
    """Return a value of nested mappings by its dotted path; None if a part is missing or of another type."""
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def number_at(tree: Any, path: str) -> float | None:
    """Return a finite number by its dotted path, or None."""
    value = value_at(tree, path)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e18 or not math.isfinite(value):
        return None
    return value


def text_at(tree: Any, path: str) -> str:
    """Return a text by its dotted path; empty if there is none."""
    value = value_at(tree, path)
    return value if isinstance(value, str) else ""


def list_at(tree: Any, path: str) -> list[Any]:
    """Return a list by its dotted path; empty if there is none."""
    value = value_at(tree, path)
    return value if isinstance(value, list) else []


@contextlib.contextmanager
def naming(run: RunFiles, name: str, if_absent: str = "") -> Iterator[None]:
    """Add a part that cannot be read to `RunFiles.missing`.

    Args:
        run: its files.
        name: name of the part.
        if_absent: what the absence of its file means; empty if there need not be one.
    """
    try:
        yield
    except FileNotFoundError:
        if if_absent:
            run.missing.append(f"{name}: no such file, so {if_absent}")
    except (OSError, VqclipError) as error:
        run.missing.append(f"{name}: cannot be read ({_short(error)})")


def _read_records(path: Path, kind: str) -> Records:
    records = Records()
    with open_regular(path) as file:
        for line in read_lines(file, 0, min(file.seek(0, 2), MAX_RECORD_BYTES)):
            entry = parse_line(line) if len(line) <= MAX_LINE else None
            if entry is None:
                continue
            records.total += 1
            if len(records.kinds) < 100:
                records.kinds[str(entry.get(kind, "other"))[:100]] += 1
            records.first_step = entry["step"] if records.first_step is None else records.first_step
            records.newest.append(entry)
    return records


def _short(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return re.sub(r"\s+", " ", reason)[:300]
