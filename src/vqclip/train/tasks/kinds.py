"""All training tasks, by the key `task` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from vqclip.config import Config, load_config
from vqclip.errors import ConfigError
from vqclip.train.config import TaskConfig
from vqclip.train.tasks.contrastive import TrainConfig
from vqclip.train.tasks.pixels import PixelTrainConfig

TASKS: dict[str, type[TaskConfig]] = {"contrastive": TrainConfig, "pixels": PixelTrainConfig}
"""Configuration of each task."""


class _Choice(Config):
    model_config = ConfigDict(extra="ignore")

    task: str = "contrastive"


def load_task_config(
    source: TaskConfig | Mapping[str, Any] | str | Path | None = None, overrides: Sequence[str] = ()
) -> TaskConfig:
    """Read the configuration of a run of any task; see `load_config`.

    Raises:
        ConfigError: an unknown task, or a line for every problem found.
    """
    if isinstance(source, TaskConfig):
        return load_config(type(source), source, overrides)
    chosen = [] if isinstance(overrides, str) else [each for each in overrides if each.startswith("task=")]
    task = load_config(_Choice, source, chosen).task
    if task not in TASKS:
        raise ConfigError(f"task: got {task!r}; expected one of {', '.join(TASKS)}")
    return load_config(TASKS[task], source, overrides)
