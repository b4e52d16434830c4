"""Newest evaluation of a run: its figures from the summary or the metrics, with intervals where there are details."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vqclip.evaluation import MODES
from vqclip.evaluation.tables import figure_title
from vqclip.report.run_files import RunFiles, list_at, number_at, text_at, value_at

MAX_TASKS = 50
MAX_FIGURES = 40


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
    """Return the step of the newest evaluation and its tasks; step 0 and none without one."""
    summarised = {task.name: task for body in list_at(run.summary, "results")[:MAX_TASKS] if (task := _read_task(body))}
    evaluated = list(run.curves.evaluations.items())
    if run.is_finished and summarised:
        return int(number_at(run.summary, "step") or run.done), list(summarised.values())
    if not evaluated:
        return 0, []
    step, values = evaluated[-1]
    tasks: dict[str, Task] = {}
    for key, rate in values.items():
        name, mode, figure = ["", "", *key.rsplit("/", 2)][-3:]
        if mode not in MODES or not math.isfinite(rate) or (name not in tasks and len(tasks) >= MAX_TASKS):
            continue
        known = summarised.get(name)
        task = tasks.setdefault(
            name,
            Task(name, known.kind, known.samples, known.classes, known.captions, known.chance) if known else Task(name),
        )
        task.rates.setdefault(mode, {})[figure] = rate
    return step, list(tasks.values())


def _read_task(body: Any) -> Task | None:
    """Read a `vqclip.evaluation.Result` from JSON; None if it has no name."""
    name = text_at(body, "name")
    if not name:
        return None
    count: Any = {
        key: int(number) for key in ("samples", "classes", "captions") if (number := number_at(body, key)) is not None
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
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
    }
