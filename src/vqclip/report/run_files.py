"""Files of a run's folder, read for its page; every one may be missing, unfinished, damaged or forged.

The newest evaluation is read from the stored details, or without them from the summary or the metrics.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vqclip.checkpoint import checkpoints, step_of
from vqclip.config.yaml import read_yaml
from vqclip.errors import ConfigError, VqclipError
from vqclip.evaluation import MODES, Details, Result, read_evaluation, stored_files
from vqclip.evaluation.pixels import QUALITY
from vqclip.evaluation.results import FOLDER, PixelResult
from vqclip.evaluation.tables import figure_title
from vqclip.io.files import open_regular, read_bounded
from vqclip.io.json_files import read_json
from vqclip.runlog.metrics import Curves, parse_line, read_curves, read_lines

MAX_RECORDS = 20
"""Events and bad samples that a page lists: the newest."""
MAX_RECORD_BYTES = 32 << 20
"""Bytes at the beginning of their files that are read."""
MAX_CONFIG_BYTES = 1 << 18
MAX_TASKS = 50
MAX_FIGURES = 40
MAX_STORED_BYTES = 64 << 20
"""Bytes of stored evaluations that are read."""
_RESULTS = TypeAdapter(list[Result])


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
        has_all_steps = self.done >= self.steps or self.done == number_at(self.summary, "ended_after")
        return bool(self.summary) and not self.stopped and has_all_steps


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
            if (entry := parse_line(line)) is not None:
                records.total += 1
                if len(records.kinds) < 100:
                    records.kinds[str(entry.get(kind, "other"))[:100]] += 1
                records.first_step = entry["step"] if records.first_step is None else records.first_step
                records.newest.append(entry)
    return records


def _short(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return re.sub(r"\s+", " ", reason)[:300]


@dataclass(frozen=True)
class FigureRow:
    """One figure of a task in three modes."""

    figure: str
    rates: dict[str, float]
    """Mode → rate."""
    intervals: dict[str, tuple[float, float]]
    """Mode → 95 % interval."""
    chance: float | None
    """Rate of random embeddings; None if unknown."""
    samples: int | None
    """Number of images; None if unknown."""

    @property
    def title(self) -> str:
        """Readable name of the figure."""
        return figure_title(self.figure)

    @property
    def used(self) -> tuple[float, tuple[float, float] | None]:
        """Rate and interval of the mode that is nearest to use: codes only, else quantized, else continuous."""
        mode = next(mode for mode in reversed(MODES) if mode in self.rates)
        return self.rates[mode], self.intervals.get(mode)

    @property
    def is_at_chance(self) -> bool:
        """True if no mode is clearly above chance: three standard deviations, where the number of images is known."""
        if self.chance is None:
            return False
        sigma = math.sqrt(self.chance * (1 - self.chance) / self.samples) if self.samples else 0.0
        return max(self.rates.values()) <= self.chance + 3 * sigma


@dataclass
class Task:
    """An evaluation of the newest step."""

    name: str
    samples: int | None = None
    """Number of images."""
    classes: int | None = None
    captions: int | None = None
    chance: dict[str, float] = field(default_factory=dict)
    """Figure → rate of random embeddings."""
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mode → figure → rate."""
    notes: list[str] = field(default_factory=list)
    details: Details | None = None
    pixels: PixelResult | None = None
    """Ways to store an image, with their figures; None for tasks of other kinds than `pixels`."""

    @property
    def rows(self) -> list[FigureRow]:
        """Its figures."""
        names = list(dict.fromkeys(name for rates in self.rates.values() for name in rates))[:MAX_FIGURES]
        intervals = {} if self.details is None else self.details.intervals
        return [
            FigureRow(
                name,
                {mode: rates[name] for mode, rates in self.rates.items() if name in rates},
                {mode: ends[name] for mode, ends in intervals.items() if name in ends},
                self.chance.get(name),
                self.samples,
            )
            for name in names
        ]

    @property
    def size(self) -> str:
        """Number of images, classes and captions in words."""
        parts = [(self.samples, "images"), (self.classes, "classes")]
        parts += [(self.captions, "captions")] if self.classes is None else []
        return ", ".join(f"{number:,} {what}" for number, what in parts if number is not None)


def newest_tasks(run: RunFiles) -> tuple[int, list[Task]]:
    """Return the step of the newest evaluation and its tasks; step 0 and none without one.

    Stored evaluations have details; without them the summary and then the metrics are used.
    """
    stored = _read_stored(run)
    recorded, values = next(reversed(run.curves.evaluations.items()), (0, {}))
    step = max((step for step, _ in stored), default=0)
    final = int(number_at(run.summary, "step") or run.done)
    if stored and step >= (min(final, recorded) if run.is_finished else recorded):
        return step, [task for each, task in stored if each == step]
    try:
        results = _RESULTS.validate_python(list_at(run.summary, "results")[:MAX_TASKS])
    except ValidationError:
        results = []
        run.missing.append("summary.json: its results cannot be read")
    summarised = [_make_task(each) for each in results]
    if run.is_finished and summarised:
        return final, summarised

    known = {task.name: task for task in [*summarised, *(task for _, task in stored)]}
    tasks: dict[str, Task] = {}
    for (name, mode, figure), rate in split_names(values).items():
        if figure in QUALITY or not math.isfinite(rate) or (name not in tasks and len(tasks) >= MAX_TASKS):
            continue
        if name not in tasks:
            tasks[name] = replace(known.get(name, Task(name)), rates={}, notes=[], details=None, pixels=None)
        tasks[name].rates.setdefault(mode, {})[figure] = rate
    return recorded, list(tasks.values())


def split_names(values: Mapping[str, float]) -> dict[tuple[str, str, str], float]:
    """Return the metrics of an evaluation by task, mode and figure; of other names none."""
    split = {tuple(["", "", *name.rsplit("/", 2)][-3:]): value for name, value in values.items()}
    return {(task, mode, figure): value for (task, mode, figure), value in split.items() if mode in MODES}


def _read_stored(run: RunFiles) -> list[tuple[int, Task]]:
    """Return steps and tasks of the files in the folder ``report``."""
    found = []
    remaining = MAX_STORED_BYTES
    for path in stored_files(run.folder)[:MAX_TASKS]:
        with naming(run, f"{FOLDER}/{path.name[:100]}"):
            remaining -= path.stat().st_size
            if remaining < 0:
                run.missing.append(f"{FOLDER}/: more than {MAX_STORED_BYTES:,} bytes; the rest is left out")
                break
            stored = read_evaluation(path)
            found.append((stored.step, _make_task(stored.result)))
    return found


def _make_task(result: Result) -> Task:
    """Return a task whose numbers are possible; those of the result may be forged."""
    counts = {key: getattr(result, key) for key in ("samples", "classes", "captions")}
    return Task(
        result.name,
        chance=_rates(result.chance),
        rates={mode: rates for mode in MODES if (rates := _rates(result.figures.get(mode) or {}))},
        notes=[note[:500] for note in result.notes[:10]],
        details=result.details,
        pixels=result.pixels,
        **{key: count for key, count in counts.items() if count is not None and 0 <= count < 2**53},
    )


def _rates(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: rate for name, rate in figures.items() if 0 <= rate <= 1 and name not in QUALITY}
