"""Newest evaluation of a run: its figures stored with details, or from the summary or the metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vqclip.evaluation import MODES, Details, read_evaluation, stored_files
from vqclip.evaluation.pixels import QUALITY
from vqclip.evaluation.results import FOLDER, PixelResult
from vqclip.evaluation.tables import figure_title
from vqclip.report.run_files import RunFiles, list_at, naming, number_at, text_at, value_at

MAX_TASKS = 50
MAX_FIGURES = 40
MAX_STORED_BYTES = 64 << 20
"""Bytes of stored evaluations that are read."""


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
    bits: float | None = None
    """Size of the ids of an image."""
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
    summarised = [task for body in list_at(run.summary, "results")[:MAX_TASKS] if (task := _read_task(body))]
    if run.is_finished and summarised:
        return final, summarised
    return recorded, _read_metrics(values, {task.name: task for task in [*summarised, *(task for _, task in stored)]})


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
            if task := _read_task(stored.result.to_json()):
                task.details, task.pixels = stored.result.details, stored.result.pixels
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
            tasks[name] = replace(known.get(name, Task(name)), rates={}, bits=None, notes=[], details=None, pixels=None)
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
    return Task(
        name,
        chance=_rates(value_at(body, "chance")),
        rates={mode: found for mode, found in rates.items() if found},
        bits=number_at(body, "usage.image.bits_per_sample"),
        notes=[str(note)[:500] for note in list_at(body, "notes")[:10]],
        **count,
    )


def _rates(body: Any) -> dict[str, float]:
    items = body.items() if isinstance(body, Mapping) else ()
    return {
        str(name): float(value)
        for name, value in items
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1 and name not in QUALITY
    }
