"""Options of ``vqclip evaluate`` to tasks."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vqclip.cli import arguments as types
from vqclip.config import Config, load_config
from vqclip.data import ScenesSourceConfig, SourceConfigBase, mask_credentials, parse_source
from vqclip.data.sources.class_names import CLASSNAMES
from vqclip.data.sources.kinds import find_kind
from vqclip.errors import ConfigError
from vqclip.evaluation import (
    EvaluationConfig,
    Evaluations,
    KnnConfig,
    LinearProbeConfig,
    PixelQualityConfig,
    RetrievalConfig,
    ZeroShotConfig,
)
from vqclip.io.json_files import problem_message
from vqclip.train.loading import require_local

__all__ = ["EvaluationFile", "option_error", "tasks_of_file", "tasks_of_options"]


_OPTIONS = {
    "max_bad_fraction": "--bad-fraction",
    "templates": "--template",
    "templates_file": "--templates",
    "classes_file": "--classes",
    "path": "--data",
    "json_keys": "--json-key",
}
"""Configuration keys whose option has another name."""


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


def tasks_of_file(model: str, file: Path | None, overrides: Sequence[str]) -> Evaluations:
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


def tasks_of_options(options: argparse.Namespace) -> list[EvaluationConfig]:
    """Return a task for each data set.

    Raises:
        ConfigError, DataError: wrong options, or data of a kind that is not plain.
    """
    groups = [_Group(given) for given in options.data or ()]
    if getattr(options, "kind", None) == "scenes":
        if groups:
            raise ConfigError("--data: got it with --kind scenes, which is drawn; VQCLIP_CACHE sets the folder")
        if options.task in ("linear-probe", "knn"):
            raise ConfigError(f"--kind: got scenes, whose classes have no training images; {options.task} needs --data")
        default = "val" if options.task == "retrieval" else "test"
        scenes = ScenesSourceConfig.model_validate({"split": options.split or default})
        return [_task(options, scenes, None, f"scenes {scenes.split}")]
    if not groups:
        what = {"retrieval": "captioned", "pixels": "labelled or captioned"}.get(options.task, "labelled")
        raise ConfigError(f"--data: missing; expected {what} images, or --kind scenes")
    names = [" ".join(Path(path).name for path in group.paths) for group in groups]
    twice = {name for name, count in Counter(names).items() if count > 1}
    names = [" ".join(group.given) if name in twice else name for group, name in zip(groups, names, strict=True)]
    return [_task(options, *_data(options, group), name) for group, name in zip(groups, names, strict=True)]


class _Group:
    """The values of one --data or --train: paths, and ``key=value`` of their kind."""

    def __init__(self, given: Sequence[str]):
        self.given = given
        paths, self.overrides = types.paths_and_overrides(given)
        self.paths = [str(Path(path).expanduser()) if "://" not in path else path for path in paths]
        if not self.paths:
            raise ConfigError(f"--data: got {' '.join(given)!r}; expected a path before it")


def _data(options: argparse.Namespace, group: _Group) -> tuple[SourceConfigBase, SourceConfigBase | None]:
    """Return the data to test on, and those to fit a probe to."""
    test = _source(options, group, options.split)
    if options.task in ("zero-shot", "retrieval", "pixels"):
        return test, None
    return test, _source(options, _Group(options.train) if options.train else group, options.train_split)


def _source(options: argparse.Namespace, group: _Group, split: str | None) -> SourceConfigBase:
    kinds = [text.removeprefix("kind=") for text in group.overrides if text.startswith("kind=")]
    kind = kinds[-1] if kinds else options.kind
    if kind is None and len(group.paths) == 1:
        path = Path(group.paths[0])
        if options.task not in ("retrieval", "pixels"):
            _refuse_captioned(path)
        if options.task != "retrieval":
            kind = "classes" if (path.parent / CLASSNAMES).is_file() else None  # a split: its message names them
    kind = kind or find_kind(group.paths)
    paths = group.paths
    if kind == "folder" and split:
        paths, split = [str(Path(path) / split) for path in paths], None
    captions, keys = getattr(options, "captions", None), getattr(options, "json_key", None)
    return parse_source(paths, group.overrides, kind=kind, split=split, captions=captions, json_keys=keys)


def _refuse_captioned(path: Path) -> None:
    has_shards = any(path.glob("*.tar")) or any(path.glob("*/*.tar"))
    if has_shards and not any((folder / CLASSNAMES).exists() for folder in (path, path.parent)):
        raise ConfigError(
            f"--data: {path} contains tars but no {CLASSNAMES}; expected labelled images. For shards of captioned "
            "images: vqclip evaluate retrieval"
        )


def _task(
    options: argparse.Namespace, data: SourceConfigBase, train: SourceConfigBase | None, name: str
) -> EvaluationConfig:
    settings = _settings(options) | {"data": data, "limit": options.limit}
    if options.task == "retrieval":
        return RetrievalConfig(**settings, name=name)
    if options.task == "pixels":
        return PixelQualityConfig(**settings, name=name)
    if options.task == "zero-shot":
        files = {"templates_file": options.templates, "classes_file": options.classes}
        return ZeroShotConfig(**settings, **files, name=name, templates=tuple(options.template or ()))
    settings |= {"train": train, "train_limit": options.train_limit, "features": options.features, "name": name}
    if options.task == "knn":
        return KnnConfig(**settings, neighbours=options.neighbours, temperature=options.temperature)
    return LinearProbeConfig(**settings, l2=options.l2)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "batch_size": options.batch_size,
        "workers": options.workers,
        "max_bad_fraction": options.bad_fraction,
    }


def option_error(error: ValidationError) -> ConfigError:
    """Return the error of a task's settings with the names of the options that set them."""
    return ConfigError("\n".join(_problem(each) for each in error.errors()))


def _problem(error: ErrorDetails) -> str:
    if not error["loc"]:  # several keys together, which the message names
        return problem_message(error)
    key, *inner = error["loc"]
    place = _OPTIONS.get(str(key), f"--{key}".replace("_", "-")) + "".join(f"[{part}]" for part in inner)
    return f"{place}: {problem_message(error)}"
