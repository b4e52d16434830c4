"""Files of a run's folder, read for its page, and what they say of it in words.

Every one may be missing, unfinished, damaged or forged.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field
from tqdm import tqdm

from vqclip.checkpoint import checkpoints, step_of
from vqclip.config.yaml import read_yaml
from vqclip.errors import ConfigError, VqclipError
from vqclip.evaluation import MODES, Result, read_evaluation, stored_files
from vqclip.evaluation.pixels import QUALITY
from vqclip.evaluation.results import FOLDER, figure_title
from vqclip.io.files import read_bounded
from vqclip.io.json_files import Strict, read_json, validate
from vqclip.runlog.health import HealthSettings
from vqclip.runlog.metrics import Curves, parse_line, read_curves

ABOUT_FILE = "about.json"
MAX_RECORD_BYTES = 32 << 20
"""Bytes at the beginning of the files of events and bad samples that are read."""
MAX_CONFIG_BYTES = 1 << 18
MAX_TASKS = 50
MAX_FIGURES = 40
MAX_STORED_BYTES = 64 << 20
"""Bytes of stored evaluations that are read."""
_SHOWN = ("step", "event", "kind", "reason", "applied")
"""Keys of events and bad samples that a page shows."""


class About(Strict):
    """Content of ``about.json``: facts about a run when it starts, for its page."""

    model: list[str]
    """A line for each tokenizer, and for a pixel decoder."""
    sources: list[str]
    """Sources of data."""
    processes: int = Field(ge=1, le=2**31)
    health: HealthSettings


@dataclass
class RunFiles:
    """Content of a run's folder."""

    folder: Path
    about: About | None = None
    """None if it cannot be read."""
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    curves: Curves = field(default_factory=Curves)
    events: list[dict[str, Any]] = field(default_factory=list)
    """Lines of ``events.jsonl``, without the samples."""
    bad_samples: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    """Empty before the end of the run."""
    best: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the checkpoints."""
    missing: list[str] = field(default_factory=list)
    """Parts that are absent or cannot be read, in words."""
    evaluated: int = 0
    """Step of the newest evaluation; 0 without one."""
    results: list[Result] = field(default_factory=list)
    """The newest evaluation."""

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
        has_all_steps = self.done >= self.steps or self.done == number_at(self.summary, "ended_after")
        return bool(self.summary) and not self.stopped and has_all_steps

    @property
    def state(self) -> str:
        """State in words: finished, stopped or in progress."""
        if self.stopped:
            reason = text_at(self.stopped, "reason")[:200]
            at = f"stopped at step {number_at(self.stopped, 'step') or 0:,.0f}"
            return f"{at}{f' ({reason})' if reason else ''}; the same command resumes it"
        return "finished" if self.is_finished else "not finished: still running, or ended by an error (see train.log)"


def read_run(folder: Path) -> RunFiles:
    """Read the folder of a run.

    Raises:
        ConfigError: there is no such folder, or it contains neither a configuration nor metrics.
    """
    if not _is_run(folder):
        got = "no such folder"
        if folder.exists():
            got = "contains neither config.yaml nor metrics.jsonl" if folder.is_dir() else "not a folder"
        near: list[Path] = []
        with contextlib.suppress(OSError):
            near += sorted(each for each in itertools.islice(folder.iterdir(), 1000) if _is_run(each))
        near += [each for each in folder.absolute().parents[:2] if _is_run(each)]
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{folder}: {got}; expected the folder of a run, such as runs/base{meant}")
    run = RunFiles(folder)
    with naming(run, "config.yaml", "the settings are unknown"):
        run.config_text = read_bounded(folder / "config.yaml", MAX_CONFIG_BYTES).decode("utf-8", "replace")
        tree, _ = read_yaml(run.config_text, "config.yaml", [])
        run.config = tree if isinstance(tree, dict) else {}
    with naming(run, ABOUT_FILE, "the model is not described, and the health is unknown"):
        run.about = validate(folder / ABOUT_FILE, About, read_bounded(folder / ABOUT_FILE, MAX_CONFIG_BYTES))
    with naming(run, "metrics.jsonl", "there are no curves yet"):
        run.curves = read_curves(folder / "metrics.jsonl")
    if run.curves.damaged:
        run.missing.append(f"metrics.jsonl: {run.curves.damaged:,} lines cannot be read and are left out")
    for name in ("summary", "best", "stopped"):
        with naming(run, f"{name}.json"):
            setattr(run, name, read_json(folder / f"{name}.json")[0])
    for name in ("events", "bad_samples"):
        with naming(run, f"{name}.jsonl"):
            lines = map(parse_line, io.BytesIO(read_bounded(folder / f"{name}.jsonl", MAX_RECORD_BYTES)))
            setattr(run, name, [{key: each.get(key, "") for key in _SHOWN} for each in lines if each is not None])
    with naming(run, "checkpoints"):
        run.checkpoints = sorted(step_of(path) for path in checkpoints(folder / "checkpoints"))
    stored = _read_stored(run)
    run.evaluated = max((step for step, _ in stored), default=0)
    run.results = [result for step, result in stored if step == run.evaluated]
    return run


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl"))


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


def _short(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return re.sub(r"\s+", " ", reason)[:300]


@dataclass(frozen=True)
class FigureRow:
    """One figure of a task in three modes."""

    title: str
    """Readable name of the figure."""
    rates: dict[str, float]
    """Mode → rate."""
    intervals: dict[str, tuple[float, float]]
    """Mode → 95 % interval."""
    chance: float | None
    """Rate of random embeddings; None if unknown."""

    @property
    def used(self) -> tuple[float, tuple[float, float] | None]:
        """Rate and interval of the mode that is nearest to use: codes only where there are codes."""
        mode = [*self.rates][-1]
        return self.rates[mode], self.intervals.get(mode)


def figure_rows(result: Result) -> list[FigureRow]:
    """Return the rates of an evaluation whose numbers are possible; those of the result may be forged."""
    rows: dict[str, FigureRow] = {}
    for mode, figure, rate in ((m, name, x) for m in MODES for name, x in (result.figures.get(m) or {}).items()):
        if not 0 <= rate <= 1 or figure in QUALITY or (figure not in rows and len(rows) >= MAX_FIGURES):
            continue
        chance = result.chance.get(figure, math.nan)
        row = rows.setdefault(figure, FigureRow(figure_title(figure), {}, {}, chance if 0 <= chance <= 1 else None))
        row.rates[mode] = rate
        if ends := result.intervals.get(mode, {}).get(figure):
            row.intervals[mode] = ends
    return list(rows.values())


def _read_stored(run: RunFiles) -> list[tuple[int, Result]]:
    """Return steps and results of the files in the folder ``report``."""
    found = []
    remaining = MAX_STORED_BYTES
    for path in stored_files(run.folder)[:MAX_TASKS]:
        with naming(run, f"{FOLDER}/{path.name[:100]}"):
            remaining -= path.stat().st_size
            if remaining < 0:
                run.missing.append(f"{FOLDER}/: more than {MAX_STORED_BYTES:,} bytes; the rest is left out")
                break
            stored = read_evaluation(path)
            found.append((stored.step, stored.result))
    return found


def describe_data(run: RunFiles) -> str:
    """Return the sources, and how many samples were shown."""
    sources = run.about.sources if run.about else []
    named = ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
    coverage = text_at(run.summary, "coverage")[:200]
    shown = coverage or f"{run.done * run.batch_size:,} samples shown"
    return f"{named or 'unknown data'} · {shown} · batches of {run.batch_size:,}"


def describe_progress(run: RunFiles) -> str:
    """Return steps, processes, speed and state."""
    parts = [f"step {run.done:,}{f' of {run.steps:,}' if run.steps else ''}"]
    if run.about:
        parts.append(f"{run.about.processes:,} process{'es' if run.about.processes > 1 else ''}")
    speeds = [each for each in run.curves.get("images_per_second")[1] if math.isfinite(each) and each > 0]
    speed = number_at(run.summary, "speed.images_per_second") or (sum(speeds) / len(speeds) if speeds else None)
    if speed:
        parts.append(f"{speed:,.0f} images/s")
        seconds = min(run.done * run.batch_size / speed, 1e12)
        parts.append(f"about {tqdm.format_interval(seconds)} of training")
    return " · ".join(parts)
