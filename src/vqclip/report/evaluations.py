"""Newest evaluation of a run: its figures stored with details, or from the summary or the metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vqclip.errors import VqclipError
from vqclip.evaluation import MODES, Details, read_evaluation, stored_files
from vqclip.evaluation.pixel_results import PixelRow
from vqclip.evaluation.pixels import QUALITY
from vqclip.evaluation.stored import FOLDER
from vqclip.evaluation.tables import figure_title
from vqclip.report.run_files import RunFiles, list_at, number_at, text_at, value_at

MAX_TASKS = 50
MAX_FIGURES = 40
MAX_STORED_BYTES = 64 << 20
"""Bytes of stored evaluations that are read."""


@dataclass
class Task:
    """An evaluation of the newest step."""

    name: str
    kind: str = ""
    samples: int | None = None
    """Number of images."""
    classes: int | None = None
    captions: int | None = None
    chance: dict[str, float] = field(default_factory=dict)
    """Figure → rate of random embeddings."""
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mode → figure → rate."""
    intervals: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """Mode → figure → 95 % interval."""
    usage: dict[str, Any] = field(default_factory=dict)
    """Modality → use of its codebooks."""
    notes: list[str] = field(default_factory=list)
    details: Details | None = None
    pixel_rows: list[PixelRow] = field(default_factory=list)
    """Ways to store an image, with their figures; empty for tasks of other kinds than `pixels`."""
    pixels_about: str = ""
    """Set of originals, size, crop and resampling of these."""

    @property
    def rows(self) -> list[FigureRow]:
        """Its figures."""
        names = list(dict.fromkeys(name for rates in self.rates.values() for name in rates))
        return [FigureRow(self, name) for name in names[:MAX_FIGURES]]

    @property
    def size(self) -> str:
        """Number of images, classes and captions in words."""
        parts = [(self.samples, "images"), (self.classes, "classes")]
        parts += [(self.captions, "captions")] if self.classes is None else []
        return ", ".join(f"{number:,} {what}" for number, what in parts if number is not None)


@dataclass(frozen=True)
class FigureRow:
    """One figure in three modes."""

    task: Task
    figure: str

    @property
    def title(self) -> str:
        """Readable name of the figure."""
        return figure_title(self.figure)

    @property
    def chance(self) -> float | None:
        """Rate of random embeddings; None if unknown."""
        return self.task.chance.get(self.figure)

    def rate(self, mode: str) -> float | None:
        """Return the rate of a mode."""
        return self.task.rates.get(mode, {}).get(self.figure)

    def interval(self, mode: str) -> tuple[float, float] | None:
        """Return the 95 % interval of a mode."""
        return self.task.intervals.get(mode, {}).get(self.figure)

    @property
    def best(self) -> float | None:
        """Highest rate of the modes."""
        return max((rate for mode in MODES if (rate := self.rate(mode)) is not None), default=None)

    @property
    def is_at_chance(self) -> bool:
        """True if no mode is clearly above chance: three standard deviations, where the number of images is known."""
        if self.best is None or self.chance is None:
            return False
        sigma = math.sqrt(self.chance * (1 - self.chance) / self.task.samples) if self.task.samples else 0.0
        return self.best <= self.chance + 3 * sigma


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
    summarised = [task for body in list_at(run.summary, "results")[:MAX_TASKS] if (task := _read_task(body))]
    if run.is_finished and summarised:
        return final, summarised
    return recorded, _read_metrics(values, {task.name: task for task in [*summarised, *(task for _, task in stored)]})


def _read_stored(run: RunFiles) -> list[tuple[int, Task]]:
    """Return steps and tasks of the files in the folder ``report``."""
    found = []
    remaining = MAX_STORED_BYTES
    for path in stored_files(run.folder)[:MAX_TASKS]:
        try:
            remaining -= path.stat().st_size
            if remaining < 0:
                run.missing.append(f"{FOLDER}/: more than {MAX_STORED_BYTES:,} bytes; the rest is left out")
                break
            stored = read_evaluation(path)
        except (OSError, VqclipError) as error:
            run.missing.append(f"{FOLDER}/{path.name[:100]}: cannot be read ({str(error)[:300]})")
            continue
        task = _read_task(stored.result.to_json())
        if task is not None:
            task.details = stored.result.details
            if (pixels := stored.result.pixels) is not None:
                task.pixel_rows = pixels.rows[:MAX_FIGURES]
                task.pixels_about = f"{pixels.reference}, {pixels.image_size} pixels: {pixels.preprocessing}"
            task.intervals = {mode: dict(each) for mode, each in task.details.intervals.items()} if task.details else {}
            found.append((stored.step, task))
    return found


def _read_metrics(values: Mapping[str, float], known: Mapping[str, Task]) -> list[Task]:
    """Return the tasks of an evaluation in the metrics, with the sizes and chances of those that are known."""
    tasks: dict[str, Task] = {}
    for key, rate in values.items():
        name, mode, figure = ["", "", *key.rsplit("/", 2)][-3:]
        if (
            mode not in MODES
            or figure in QUALITY
            or not math.isfinite(rate)
            or (name not in tasks and len(tasks) >= MAX_TASKS)
        ):
            continue
        if name not in tasks:
            tasks[name] = replace(known.get(name, Task(name)), rates={}, intervals={}, usage={}, notes=[], details=None)
        tasks[name].rates.setdefault(mode, {})[figure] = rate
    return list(tasks.values())


def _read_task(body: Any) -> Task | None:
    """Read a `vqclip.evaluation.Result` from JSON; None if it has no name."""
    name = text_at(body, "name")
    if not name:
        return None
    count: Any = {
        key: int(number)
        for key in ("samples", "classes", "captions")
        if (number := number_at(body, key)) is not None and number >= 0
    }
    rates = {mode: _rates(value_at(body, f"figures.{mode}")) for mode in MODES}
    usage = value_at(body, "usage")
    notes = [str(note)[:500] for note in list_at(body, "notes")[:10]]
    return Task(
        name,
        text_at(body, "kind"),
        chance=_rates(value_at(body, "chance")),
        rates={mode: found for mode, found in rates.items() if found},
        usage=usage if isinstance(usage, dict) else {},
        notes=notes,
        **count,
    )


def _rates(body: Any) -> dict[str, float]:
    items = body.items() if isinstance(body, Mapping) else ()
    return {
        str(name): float(value)
        for name, value in items
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1 and name not in QUALITY
    }
