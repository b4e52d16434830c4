"""``vqclip evaluate``: continuous, quantized and codes-only figures of trained models, beside chance."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from vqclip.cli.options import (
    DATA,
    MODEL,
    BatchSize,
    Command,
    Device,
    LocalPath,
    Models,
    OutputFile,
    Page,
    Precision,
    Text,
    Weights,
    Workers,
    paths_and_overrides,
)
from vqclip.errors import ConfigError, import_extra
from vqclip.runlog.console import print_output

if TYPE_CHECKING:
    import torch

    from vqclip.evaluation import EvaluationConfig, Prefixes, Result


class _Evaluation(Command, words=("models",)):
    """An evaluation, with the tasks of a file or on data of its own."""

    models: Models
    device: Device = "auto"
    precision: Precision = "fp32"
    """Autocast type."""
    weights: Weights = "averaged"
    codes: LocalPath | None = None
    """Keep the ids (safetensors) in this folder."""
    json_: OutputFile | None = None
    """Write the results to this file."""
    csv: OutputFile | None = None
    """Write a row for each data set, mode and figure to this file."""
    prefixes: Literal["full", "same", "none"] | None = None
    """Accuracy against bits, of prefixes of the images' ids: texts keep all of theirs (full), or the same share (same);
    none: all ids alone, to compare several models."""
    plot: Page | None = None
    """Draw accuracy against bits on this HTML page."""

    def run(self) -> None:
        """Evaluate; under torchrun all processes share the work, and rank 0 prints."""
        from vqclip import dist
        from vqclip.data import mask_credentials

        compares = len(self.models) > 1 or self.prefixes is not None
        if self.plot is not None and not compares:
            raise ConfigError("--plot: got it for all ids of one model; expected several models, or --prefixes full")
        if self.codes is not None and compares:
            raise ConfigError("--codes: got it with several models or --prefixes; expected one model and all its ids")
        if twice := [each for each in self.models if self.models.count(each) > 1]:
            raise ConfigError(f"got {mask_credentials(twice[0])} more than once; expected different models")
        tasks = self._tasks()
        device = dist.choose_device(self.device, "--device")
        try:
            dist.init(device)
            (self._compare if compares else self._evaluate)(tasks, device)
        finally:
            dist.shutdown()

    def _tasks(self) -> Sequence[EvaluationConfig]:
        """Return the tasks that the command is to run; every subclass has its own."""
        raise NotImplementedError

    def _evaluate(self, tasks: Sequence[EvaluationConfig], device: torch.device) -> None:
        """Evaluate one model with all of its ids, and print and write what succeeded if a task fails."""
        from vqclip import dist
        from vqclip.evaluation import format_results, try_all, write_csv, write_json
        from vqclip.train.export import load_model

        model, place, weights = load_model(self.models[0], self.weights, images_alone=True)
        outcome = try_all(model.to(device), tasks, precision=self.precision, codes_folder=self.codes)
        if dist.is_main() and outcome.results:
            about = {"model": place, "weights": weights}
            if self.json_ is not None:
                write_json(self.json_, outcome.results, about)
            if self.csv is not None:
                write_csv(self.csv, outcome.results, about)
            print_output(f"model: {place}\nweights: {weights}\n\n{format_results(outcome.results)}")
        if outcome.failure is not None:
            raise outcome.failure

    def _compare(self, tasks: Sequence[EvaluationConfig], device: torch.device) -> None:
        """Evaluate models with prefixes of their ids; those that differ only in their seed are one group."""
        from vqclip import dist
        from vqclip.data import mask_credentials
        from vqclip.evaluation import Prefixes, evaluate
        from vqclip.io.atomic import write_text
        from vqclip.report.frontier import format_points, measure, points_csv, points_page
        from vqclip.train.export import load_model

        groups: dict[str, dict[str, tuple[Prefixes, list[Result]]]] = {}
        for name in self.models:
            model = load_model(name, self.weights).model.to(device)
            extent = model.image.quantizer.extent
            whole = [extent] if all(extent) else []  # a quantizer without codes has no prefix
            chosen = None if self.prefixes in ("full", "same") else whole
            prefixes = Prefixes.of(model, chosen, "same" if self.prefixes == "same" else "full")
            found = evaluate(model, tasks, precision=self.precision, prefixes=prefixes)
            groups.setdefault(_settings(name), {})[name] = prefixes, found
        if not dist.is_main():
            return
        short = [re.sub(r"[-_.]seed[-_.]?\d+$", "", Path(next(iter(group))).name) for group in groups.values()]
        whole_names = [mask_credentials(next(iter(group))) for group in groups.values()]
        labels = [a if short.count(a) == 1 else b for a, b in zip(short, whole_names, strict=True)]
        labelled = dict(zip(labels, groups.values(), strict=True))
        points = measure({label: [*group.values()] for label, group in labelled.items()})
        models = {label: [*group] for label, group in labelled.items()}
        body = {"models": models, "points": [dataclasses.asdict(each) for each in points]}
        if self.json_ is not None:
            write_text(self.json_, json.dumps(mask_credentials(body), indent=2, allow_nan=False) + "\n")
        if self.csv is not None:
            write_text(self.csv, mask_credentials(points_csv(points)))
        if self.plot is not None:
            write_text(self.plot, points_page(points))
        print_output(format_points(points))


class Evaluate(_Evaluation, reads="changes to the file, such as evaluation[0].limit=1000"):
    """Evaluate a trained model: continuous, quantized and codes-only figures beside chance.

    Without a task before the model: those of a run's own configuration, or of a file with a list `evaluation:` as in
    one, in one table. Accuracy against bits: of prefixes of the ids (the first stages of a residual quantizer, or
    codebooks of a product one), and of several models; those that differ only in their seed are one line. On several
    processes, which share the work: torchrun --standalone --nproc-per-node 8 -m vqclip evaluate ...

    Examples:
      vqclip evaluate runs/base
      vqclip evaluate runs/base --config tasks.yaml --csv figures.csv
      vqclip evaluate runs/base --prefixes full --plot bits.html
      vqclip evaluate zero-shot runs/eurosat --data path/to/cls_eurosat
      vqclip evaluate zero-shot runs/few-seed-* runs/many-seed-* --prefixes none --data test
      vqclip evaluate retrieval runs/base --data val.csv
      vqclip evaluate linear-probe runs/eurosat --data path/to/cls_eurosat
    """

    config: LocalPath | None = None
    """YAML file with a list evaluation:, instead of the first run's config.yaml."""

    def _tasks(self) -> Sequence[EvaluationConfig]:
        """Return the tasks of a YAML file, or of the configuration of the run in the folder of the first model.

        Raises:
            ConfigError: there is no file, it is invalid, or it contains no task.
        """
        from vqclip.config import Config, load_config
        from vqclip.data import mask_credentials
        from vqclip.evaluation import Evaluations
        from vqclip.train.export import require_local

        class File(Config, extra="ignore"):  # a configuration of training has other sections
            evaluation: Evaluations

        if others := [each for each in self.keys if not re.match(r"evaluation[=.[]", each)]:
            raise ConfigError(f"got {others[0]}; expected evaluation[0].key=value: other sections are not read")
        file = self.config
        if file is None:
            require_local(self.models[0])
            folder = Path(self.models[0]).expanduser()
            file = folder / "config.yaml"
            if not file.is_file():
                raise ConfigError(
                    f"--config: missing, and {mask_credentials(str(folder))} has no config.yaml of a run; expected a "
                    "YAML file with evaluation: [...], or a task before the model, such as: vqclip evaluate zero-shot "
                    "RUN"
                )
        tasks = load_config(File, file, self.keys).evaluation
        if not tasks:
            raise ConfigError(f"{file}: evaluation: got an empty list; expected tasks")
        return tasks


class EvaluateTask(_Evaluation, reads="keys of the task"):
    """Run one task on data of its own.

    The keys of a task follow the model, or the data that they are for, as key=value:

    all           batch_size, workers, limit (evenly spread), held_out, max_bad_fraction, timeout_s
    zero-shot     templates (prompts with {c} for the class), templates_file, classes_file
    linear-probe  train (its path, split, ...; the split train of the data), train_limit, features, l2
    knn           train, train_limit, features, neighbours, temperature

    Examples:
      vqclip evaluate zero-shot runs/base --data kind=scenes
      vqclip evaluate zero-shot runs/base templates='["a photo of a {c}"]' --data path/to/classes
      vqclip evaluate retrieval runs/base --data "val/{0..3}.tar" captions=json json_keys=[caption]
      vqclip evaluate knn runs/eurosat neighbours=5 train.path=path/to/others --data path/to/classes
    """

    data: tuple[tuple[Text, ...], ...] = Field((), description=f"{DATA}; repeat the option for several data sets")

    def _tasks(self) -> Sequence[EvaluationConfig]:
        """Return a task for each ``--data``: its paths, and keys of their kind.

        Raises:
            ConfigError, DataError: wrong keys, or data of a kind that is not plain.
        """
        from vqclip import evaluation
        from vqclip.config import parse_config
        from vqclip.data import parse_source
        from vqclip.data.sources.class_names import CLASSNAMES
        from vqclip.data.sources.kinds import is_source_key

        schemas: dict[str, type[EvaluationConfig]] = {
            "zero-shot": evaluation.ZeroShotConfig,
            "retrieval": evaluation.RetrievalConfig,
            "linear-probe": evaluation.LinearProbeConfig,
            "knn": evaluation.KnnConfig,
        }
        if not self.data:
            what = "captioned" if self.task == "retrieval" else "labelled"
            raise ConfigError(f"--data: missing; expected {what} images, or kind=scenes")
        schema = schemas[self.task]
        names = [" ".join(Path(path).name for path in paths_and_overrides(given)[0]) for given in self.data]
        tasks = []
        for given, name in zip(self.data, names, strict=True):
            paths, keys = paths_and_overrides(given)
            own = [key for key in keys if not is_source_key(key) and key.partition("=")[0] in schema.model_fields]
            is_split = len(paths) == 1 and (Path(paths[0]).expanduser().parent / CLASSNAMES).is_file()
            kind = "classes" if is_split and self.task != "retrieval" else None  # its message names the splits
            source = parse_source(paths, [key for key in keys if key not in own], kind=kind)
            title = " ".join(given) if not name or names.count(name) > 1 else name
            values: dict[str, Any] = {"name": title, "data": source}
            if self.task in ("linear-probe", "knn"):
                values["train"] = source.model_dump(exclude_unset=True, exclude={"split"})
            tasks.append(parse_config(schema, values, [*self.keys, *own], f"evaluate {self.task}"))
        return tasks


class EvaluateMteb(Command, words=("models",)):
    """Evaluate models with mteb, on its tasks of images, and of images and texts.

    mteb downloads the data of a task (HF_HOME says where to), and stores a file for each task, which is not computed
    again. Needs pip install 'vqclip[mteb]', and Python 3.11.

    Examples:
      vqclip evaluate mteb runs/base --tasks EuroSATZeroShot Flickr30kI2TRetrieval
      vqclip evaluate mteb runs/small runs/large --tasks "MIEB(lite)" --out results
    """

    models: tuple[Text, ...] = Field(description=f"{MODEL}; for tasks of images, images alone", min_length=1)
    tasks: tuple[Text, ...]
    """Names of mteb's tasks or benchmarks."""
    modes: tuple[Literal["continuous", "quantized", "codes_only"], ...] = ("continuous", "codes_only")
    """Quantizers bypassed, the training path, or embeddings of stored ids."""
    batch_size: BatchSize = 64
    """Inputs in a batch."""
    workers: Workers = 0
    """Worker processes that read and decode the data."""
    device: Device = "auto"
    precision: Precision = "fp32"
    """Autocast type."""
    weights: Weights = "averaged"
    out: LocalPath | None = None
    """Folder of mteb's results, a JSON file for each task; its own cache without it (MTEB_CACHE or ~/.cache/mteb)."""

    def run(self) -> None:
        """Evaluate every model in every mode."""
        from vqclip.evaluation.results import table
        from vqclip.integrations.mteb import load

        mteb = import_extra("mteb", "mteb")

        benchmarks = {each.name: each.tasks for each in mteb.get_benchmarks()}
        try:
            tasks = [task for name in self.tasks for task in benchmarks.get(name) or [mteb.get_task(name)]]
        except KeyError as error:
            raise ConfigError(f"--tasks: {error.args[0].removeprefix('KeyError: ')}") from None
        cache = mteb.ResultCache(None if self.out is None else self.out.expanduser())
        settings = {"encode_kwargs": {"batch_size": self.batch_size}, "num_proc": self.workers or None}
        for name in self.models:
            scores: dict[tuple[str, str], list[float]] = {}
            for mode in self.modes:
                model = load(name, mode=mode, device=self.device, precision=self.precision, weights=self.weights)
                try:
                    found = mteb.evaluate(model, tasks, cache=cache, show_progress_bar=sys.stderr.isatty(), **settings)
                except ValueError as error:  # such as a task of texts for a tokenizer of images
                    raise ConfigError(f"{name}: {error}") from error
                for task, result in zip(tasks, found.task_results, strict=True):
                    scores.setdefault((task.metadata.name, task.metadata.main_score), []).append(result.get_score())
            heads = ["task", "score", *(mode.replace("_", " ") for mode in self.modes)]
            rows = [[*task, *(f"{score:.5f}" for score in each)] for task, each in scores.items()]
            print_output(f"model: {name}\n\n{table(heads, rows, left=2)}\n")


def _settings(name: str) -> str:
    """Return the settings of a run but for the sections ``run`` and ``report``; its name if it has no configuration."""
    from vqclip.train.tasks.kinds import load_task_config

    file = Path(name).expanduser() / "config.yaml"
    if not file.is_file():
        return name
    tree = load_task_config(file).model_dump(mode="json", exclude={"run", "report"})
    return json.dumps(tree, sort_keys=True)
