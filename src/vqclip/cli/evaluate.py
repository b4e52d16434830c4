"""``vqclip evaluate``: continuous, quantized and codes-only figures of trained models, beside chance."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError

from vqclip import dist
from vqclip.cli import arguments as types
from vqclip.cli.evaluation_tasks import option_error, tasks_of_file, tasks_of_options
from vqclip.data import mask_credentials
from vqclip.errors import ConfigError
from vqclip.evaluation import (
    DetailsConfig,
    EvaluationConfig,
    Prefixes,
    Result,
    evaluate,
    format_results,
    try_all,
    write_csv,
    write_json,
)
from vqclip.io.atomic import write_text
from vqclip.report.frontier import format_points, measure, points_csv, points_page
from vqclip.runlog.console import print_output
from vqclip.train.loading import load_model
from vqclip.train.tasks.kinds import load_task_config

_OVERRIDE = re.compile(r"[a-z_]+(\[\d+\])?(\.[a-z_]+(\[\d+\])?)*=")


def run(options: argparse.Namespace) -> None:
    """Evaluate; under torchrun all processes share the work, and rank 0 prints."""
    try:
        if options.task:
            tasks = tasks_of_options(options)
        else:
            overrides = [each for each in options.models if _OVERRIDE.match(each)]
            options.models = [each for each in options.models if each not in overrides]
            tasks = list(tasks_of_file(options.models[0], options.config, overrides))
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
    except ValidationError as error:
        raise option_error(error) from None
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
