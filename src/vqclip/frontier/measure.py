"""Evaluate runs with prefixes of their ids, and group those that differ only in their seed."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pydantic_core import to_jsonable_python

from vqclip.config import load_config
from vqclip.data import mask_credentials
from vqclip.errors import ConfigError
from vqclip.evaluation import (
    DetailsConfig,
    EvaluationConfig,
    Prefixes,
    Result,
    evaluate,
    main_figures,
)
from vqclip.evaluation.details import Interval
from vqclip.evaluation.intervals import wilson
from vqclip.evaluation.prefixes import TextPrefix
from vqclip.frontier.points import Frontier, Point
from vqclip.nn.precision import Precision
from vqclip.train import TrainConfig
from vqclip.train.ema import Weights
from vqclip.train.loading import load_model

logger = logging.getLogger(__name__)

_INTERVALS = DetailsConfig(hits=0, misses=0, code_maps=0, gallery_codes=0, bits_images=0)
"""Details that are intervals alone."""


class _Measured(NamedTuple):
    """Results of one run."""

    name: str
    place: str
    settings: str
    results: list[Result]


class _Entry(NamedTuple):
    """Figures of one run with one prefix of its ids; without codes there are no numbers of ids and bits."""

    stages: int | None
    codebooks: int | None
    bits_per_image: float | None
    bits_per_text: float | None
    figures: dict[str, float]
    intervals: Mapping[str, Interval]


def frontier(
    runs: Sequence[str | Path],
    tasks: Sequence[EvaluationConfig] | None = None,
    *,
    overrides: Sequence[str] = (),
    prefixes: bool = True,
    text: TextPrefix = "full",
    weights: Weights = "averaged",
    precision: Precision = "fp32",
    device: str = "cpu",
) -> Frontier:
    """Evaluate runs with the prefixes of their ids, each from one pass of its towers.

    Runs whose configurations differ only in the sections ``run`` (seed, name, folder) and ``report`` are one group. All
    ranks call this together, and all get the points.

    Args:
        runs: run folders, checkpoints, tokenizer folders or hub names, as for ``vqclip evaluate``.
        tasks: evaluations; None: those of each run's own configuration.
        overrides: changes of these configurations, such as ``evaluation[0].batch_size=64``; not with ``tasks``.
        prefixes: False: one point for each group, with all of its ids.
        text: ids of the texts: all of them, or the same share as of the image's ids, rounded up.
        weights: averaged ones (`train.ema`) where there are some, or those of the step.
        precision: autocast type.
        device: device of the models.

    Raises:
        CheckpointError: a run has no model.
        ConfigError: a run is named twice; or ``tasks`` is None, and a run has no configuration or no evaluation, or
            evaluations of one name differ.
        DataError, NonFiniteError: see `vqclip.evaluation.evaluate`.
    """
    if tasks is not None and overrides:
        raise ConfigError(f"overrides: got {overrides[0]!r} with tasks; expected one of the two")
    names = [str(run) for run in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"got {mask_credentials(twice[0])} more than once; expected different runs")
    own = {name: tasks if tasks is not None else _own_tasks(name, overrides) for name in names}
    _require_equal_tasks(own)
    measured = []
    for name in names:
        logger.info("evaluating %s", mask_credentials(name))
        model, place, _ = load_model(name, weights)
        model.to(device)
        whole = [extent] if all(extent := model.image.quantizer.extent) else []
        chosen = Prefixes.of(model, None if prefixes else whole, text)
        results = evaluate(model, own[name], precision=precision, prefixes=chosen, details=_INTERVALS)
        measured.append(_Measured(name, place, _settings(name), results))
    groups: dict[str, list[_Measured]] = {}
    for each in measured:
        groups.setdefault(each.settings, []).append(each)
    named = dict(zip(_labels(list(groups.values())), groups.values(), strict=True))
    points = [point for label, group in named.items() for point in _points(label, group)]
    return Frontier(points, {label: [each.place for each in group] for label, group in named.items()})


def _own_tasks(name: str, overrides: Sequence[str]) -> Sequence[EvaluationConfig]:
    file = Path(name).expanduser() / "config.yaml"
    shown = mask_credentials(name)
    if not file.is_file():
        got = "has no config.yaml of a run" if file.parent.is_dir() else "no such folder"
        raise ConfigError(
            f"{shown}: {got}, and so no evaluation; expected a run's folder, or tasks "
            "(--tasks FILE, or a task before the runs, such as: vqclip frontier zero-shot RUN --data ...)"
        )
    tasks = load_config(TrainConfig, file, overrides).evaluation
    if not tasks:
        raise ConfigError(f"{shown}: its configuration has no evaluation; expected tasks (--tasks FILE)")
    return tasks


def _require_equal_tasks(own: Mapping[str, Sequence[EvaluationConfig]]) -> None:
    """Raise ConfigError if tasks of one name, which would share a table, measure something else in each run."""
    known: dict[tuple[str, str], tuple[str, object]] = {}
    for run, tasks in own.items():
        for task in tasks:
            settings = task.model_dump(exclude={"batch_size", "workers", "timeout_s", "max_bad_fraction"})
            first, before = known.setdefault((task.kind, task.name), (run, settings))
            if settings != before:
                raise ConfigError(
                    f"evaluation {task.name!r} has other settings in {mask_credentials(run)} than in "
                    f"{mask_credentials(first)}; expected the same, or one list for all runs (--tasks FILE)"
                )


def _settings(name: str) -> str:
    """Return the settings of a run but for the sections ``run`` and ``report``; its name if it has no configuration."""
    file = Path(name).expanduser() / "config.yaml"
    if not file.is_file():
        return name
    try:
        tree = to_jsonable_python(load_config(TrainConfig, file).model_dump(exclude={"run", "report"}))
    except ConfigError:  # of another version: it is a group of its own
        return name
    return json.dumps(tree, sort_keys=True)


def _labels(groups: Sequence[Sequence[_Measured]]) -> list[str]:
    """Return a name for each group: that of its first run's folder without the seed, or all of the run's name."""
    short = [re.sub(r"[-_.]seed[-_.]?\d+$", "", Path(group[0].name).name) for group in groups]
    whole = [mask_credentials(group[0].name) for group in groups]
    return [a if short.count(a) == 1 else b for a, b in zip(short, whole, strict=True)]


def _points(label: str, group: Sequence[_Measured]) -> Iterator[Point]:
    for results in zip(*(each.results for each in group), strict=True):
        for same in zip(*(_entries(result) for result in results), strict=True):
            for figure in (name for name in same[0].figures if name in results[0].chance):
                yield _point(label, results[0], figure, same)


def _entries(result: Result) -> list[_Entry]:
    """Return the prefixes of a result, or its continuous figures if there are none."""
    if result.prefixes:
        return [_Entry(**vars(each)) for each in result.prefixes]
    intervals = {} if result.details is None else result.details.intervals.get("continuous", {})
    return [_Entry(None, None, None, None, result.figures["continuous"] or {}, intervals)]


def _point(group: str, result: Result, figure: str, entries: Sequence[_Entry]) -> Point:
    first, rates = entries[0], [each.figures[figure] for each in entries]
    low, high = min(rates), max(rates)
    if len(rates) == 1:  # ranks other than 0 have no details
        low, high = first.intervals.get(figure, wilson(rates[0], result.samples))
    return Point(
        task=result.name,
        figure=figure,
        group=group,
        stages=first.stages,
        codebooks=first.codebooks,
        bits_per_image=_mean([each.bits_per_image for each in entries]),
        bits_per_text=_mean([each.bits_per_text for each in entries]),
        rate=fmean(rates),
        low=low,
        high=high,
        rates=rates,
        chance=result.chance[figure],
        main=result.pixels is not None or figure in main_figures(result)[1],
    )


def _mean(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return fmean(known) if known else None
