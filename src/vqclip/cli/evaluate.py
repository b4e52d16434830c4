"""``vqclip evaluate``: continuous, quantized and codes-only figures of trained models, beside chance."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.config import Config, load_config, parse_config
from vqclip.data import SourceConfigBase, mask_credentials, parse_source
from vqclip.data.sources.class_names import CLASSNAMES
from vqclip.data.sources.kinds import find_kind
from vqclip.errors import ConfigError
from vqclip.evaluation import (
    DetailsConfig,
    EvaluationConfig,
    Evaluations,
    KnnConfig,
    LinearProbeConfig,
    PixelQualityConfig,
    Prefixes,
    Result,
    RetrievalConfig,
    ZeroShotConfig,
    evaluate,
    format_results,
    try_all,
    write_csv,
    write_json,
)
from vqclip.io.atomic import write_text
from vqclip.report.frontier import format_points, measure, points_csv, points_page
from vqclip.runlog.console import print_output
from vqclip.train.loading import load_model, require_local
from vqclip.train.tasks.kinds import load_task_config

_SCHEMAS: dict[str, type[EvaluationConfig]] = {
    "zero-shot": ZeroShotConfig,
    "retrieval": RetrievalConfig,
    "linear-probe": LinearProbeConfig,
    "knn": KnnConfig,
    "pixels": PixelQualityConfig,
}
"""Tasks by their words on the command line."""


class EvaluationFile(Config):
    """A YAML file with tasks; that of a whole training too."""

    evaluation: Evaluations
    """Tasks, as in a training configuration."""
    task: Any = None
    """Section of a training, which is not read, like the following ones."""
    run: Any = None
    data: Any = None
    model: Any = None
    loss: Any = None
    distillation: Any = None
    optim: Any = None
    train: Any = None
    guards: Any = None
    report: Any = None
    tokenizer: Any = None
    decoder: Any = None
    detail: Any = None
    losses: Any = None


def run(options: argparse.Namespace) -> None:
    """Evaluate; under torchrun all processes share the work, and rank 0 prints."""
    try:
        options.models, overrides = types.paths_and_overrides(options.models)
        if not options.models:
            raise ConfigError(f"MODEL: missing, got {' '.join(overrides)}; expected a model before it")
        if options.task:
            tasks = _tasks_of_data(options.task, options.data or (), options.split, overrides)
        else:
            tasks = [*_tasks_of_file(options.models[0], options.config, overrides)]
        if options.device == "auto":
            options.device = "cuda" if torch.cuda.is_available() else "cpu"
        _require_writable(options)
        if twice := [each for each in options.models if options.models.count(each) > 1]:
            raise ConfigError(f"got {mask_credentials(twice[0])} more than once; expected different models")
        dist.init(options.device)
        if len(options.models) > 1 or options.prefixes is not None:
            _compare(options, tasks)
        else:
            _evaluate(options, tasks)
    finally:
        dist.shutdown()


def _evaluate(options: argparse.Namespace, tasks: Sequence[EvaluationConfig]) -> None:
    """Evaluate one model with all of its ids, and print and write what succeeded if a task fails."""
    model, place, weights = load_model(options.models[0], options.weights, images_alone=True)
    model.to(dist.choose_device(options.device, "--device"))
    outcome = try_all(model, tasks, precision=options.precision, codes_folder=options.codes)
    if dist.is_main() and outcome.results:
        about = {"model": place, "weights": weights}
        if options.json is not None:
            write_json(options.json, outcome.results, about)
        if options.csv is not None:
            write_csv(options.csv, outcome.results, about)
        print_output(f"model: {place}\nweights: {weights}\n\n{format_results(outcome.results)}")
    if outcome.failure is not None:
        raise outcome.failure


def _compare(options: argparse.Namespace, tasks: Sequence[EvaluationConfig]) -> None:
    """Evaluate models with prefixes of their ids; those that differ only in their seed are one group."""
    groups: dict[str, dict[str, list[Result]]] = {}
    intervals = DetailsConfig(hits=0, misses=0, code_maps=0, gallery_codes=0, bits_images=0)
    for name in options.models:
        model = load_model(name, options.weights).model
        model.to(dist.choose_device(options.device, "--device"))
        extent = model.image.quantizer.extent
        whole = [extent] if all(extent) else []  # a quantizer without codes has no prefix
        chosen = None if options.prefixes in ("full", "same") else whole
        prefixes = Prefixes.of(model, chosen, "same" if options.prefixes == "same" else "full")
        found = evaluate(model, tasks, precision=options.precision, prefixes=prefixes, details=intervals)
        groups.setdefault(_settings(name), {})[name] = found
    short = [re.sub(r"[-_.]seed[-_.]?\d+$", "", Path(next(iter(group))).name) for group in groups.values()]
    whole_names = [mask_credentials(next(iter(group))) for group in groups.values()]
    labels = [a if short.count(a) == 1 else b for a, b in zip(short, whole_names, strict=True)]
    points = measure({label: [*group.values()] for label, group in zip(labels, groups.values(), strict=True)})
    if dist.is_main():
        models = {label: [*group] for label, group in zip(labels, groups.values(), strict=True)}
        body = {"models": models, "points": [dataclasses.asdict(each) for each in points]}
        if options.json is not None:
            write_text(options.json, json.dumps(mask_credentials(body), indent=2, allow_nan=False) + "\n")
        if options.csv is not None:
            write_text(options.csv, mask_credentials(points_csv(points)))
        if options.plot is not None:
            write_text(options.plot, points_page(points))
        print_output(format_points(points))


def _settings(name: str) -> str:
    """Return the settings of a run but for the sections ``run`` and ``report``; its name if it has no configuration."""
    file = Path(name).expanduser() / "config.yaml"
    if not file.is_file():
        return name
    tree = load_task_config(file).model_dump(mode="json", exclude={"run", "report"})
    return json.dumps(tree, sort_keys=True)


def _require_writable(options: argparse.Namespace) -> None:
    """Raise ConfigError for files that could not be written after the work."""
    for name in ("json", "csv"):
        path = getattr(options, name)
        if path is not None and path.is_dir():
            raise ConfigError(f"--{name}: got the folder {path}, expected a file")
    if options.plot is not None:
        types.require_page("--plot", options.plot)
        if len(options.models) == 1 and options.prefixes is None:
            raise ConfigError("--plot: got it for all ids of one model; expected several models, or --prefixes full")
    if options.codes is not None and (len(options.models) > 1 or options.prefixes is not None):
        raise ConfigError("--codes: got it with several models or --prefixes; expected one model and all of its ids")


def _tasks_of_file(model: str, file: Path | None, overrides: Sequence[str]) -> Evaluations:
    """Return the tasks of a YAML file, or of the configuration of the run in the folder ``model``.

    Raises:
        ConfigError: there is no file, it is invalid, or it contains no task.
    """
    if file is None:
        require_local(model)
        folder = Path(model).expanduser()
        file = folder / "config.yaml"
        if not file.is_file():
            raise ConfigError(
                f"--config: missing, and {mask_credentials(str(folder))} has no config.yaml of a run; expected a YAML "
                "file with evaluation: [...], or a task before the model, such as: vqclip evaluate zero-shot RUN"
            )
    tasks = load_config(EvaluationFile, file, overrides).evaluation
    if not tasks:
        raise ConfigError(f"{file}: evaluation: got an empty list; expected tasks")
    return tasks


def _tasks_of_data(
    task: str, data: Sequence[Sequence[str]], split: str | None, overrides: Sequence[str]
) -> list[EvaluationConfig]:
    """Return a task for each ``--data``: its paths, and keys of their kind.

    Args:
        task: word of the task.
        data: values of each ``--data``.
        split: of all data.
        overrides: keys of the task.

    Raises:
        ConfigError, DataError: wrong keys, or data of a kind that is not plain.
    """
    if not data:
        what = {"retrieval": "captioned", "pixels": "labelled or captioned"}.get(task, "labelled")
        raise ConfigError(f"--data: missing; expected {what} images, or kind=scenes")
    sources = [_source(task, given, split) for given in data]
    names = [" ".join(Path(path).name for path in types.paths_and_overrides(given)[0]) for given in data]
    tasks = []
    for given, source, name in zip(data, sources, names, strict=True):
        title = " ".join(given) if not name or names.count(name) > 1 else name
        values: dict[str, Any] = {"name": title, "data": source}
        if task in ("linear-probe", "knn"):
            values["train"] = source.model_dump(exclude_unset=True, exclude={"split"})
        tasks.append(parse_config(_SCHEMAS[task], values, overrides, f"evaluate {task}"))
    return tasks


def _source(task: str, given: Sequence[str], split: str | None) -> SourceConfigBase:
    paths, overrides = types.paths_and_overrides(given)
    paths = [path if "://" in path else str(Path(path).expanduser()) for path in paths]
    kind = None
    if not any(each.startswith("kind=") for each in overrides) and paths:
        if len(paths) == 1 and task not in ("retrieval", "pixels"):
            _refuse_captioned(Path(paths[0]))
        if len(paths) == 1 and task != "retrieval" and (Path(paths[0]).parent / CLASSNAMES).is_file():
            kind = "classes"  # a split: its message names them
        kind = kind or find_kind(paths)
    if kind == "folder" and split:
        paths, split = [str(Path(path) / split) for path in paths], None
    return parse_source(paths, overrides, kind=kind, split=split)


def _refuse_captioned(path: Path) -> None:
    has_shards = any(path.glob("*.tar")) or any(path.glob("*/*.tar"))
    if has_shards and not any((folder / CLASSNAMES).exists() for folder in (path, path.parent)):
        raise ConfigError(
            f"--data: {path} contains tars but no {CLASSNAMES}; expected labelled images. For shards of captioned "
            "images: vqclip evaluate retrieval"
        )
