"""Train configurations with several seeds, each as an ordinary run in a folder of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from vqclip.config import load_config
from vqclip.data import mask_credentials
from vqclip.errors import ConfigError, StopRequested
from vqclip.io.json_files import describe_differences
from vqclip.train import TrainConfig, run

logger = logging.getLogger(__name__)


def train_seeds(
    configs: Sequence[str | Path],
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    *,
    owns_process: bool = False,
) -> list[Path]:
    """Train every configuration with every seed, one run after the other.

    Each is an ordinary run in ``run.folder/<name of the file>-seed-<seed>``, which resumes exactly where it was
    interrupted. A finished one is not run again. All ranks call this together.

    Args:
        configs: YAML files.
        seeds: values of ``run.seed``; None: that of each configuration.
        overrides: changes of all configurations, such as ``train.steps=100``.
        owns_process: see `vqclip.train.run`.

    Returns:
        The runs' folders, configuration by configuration.

    Raises:
        ConfigError: an invalid configuration, two files of one name, or a finished run with other settings; before
            anything is trained.
        StopRequested: a signal stopped a run, which can be resumed by the same call; or it came at the end of a run,
            and no other was begun.
        VqclipError: a run failed; see `vqclip.train.run`.
    """
    planned = [each for config in configs for each in _plan(Path(config), seeds, overrides)]
    folders = [config.run.path for config in planned]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise ConfigError(f"two runs would have the folder {twice[0]}; expected files of different names, and seeds")
    finished = [_is_finished(config) for config in planned]
    for number, (config, done) in enumerate(zip(planned, finished, strict=True), 1):
        logger.info(
            "run %d of %d: %s%s", number, len(planned), config.run.path, " is finished" if done else ": training"
        )
        if done:
            continue
        result = run(config, owns_process=owns_process)
        if not result.finished or result.late_signal is not None:
            raise StopRequested
    return folders


def _plan(file: Path, seeds: Sequence[int] | None, overrides: Sequence[str]) -> Iterator[TrainConfig]:
    for key in ("run.name", "run.seed"):
        if any(override.split("=")[0] == key for override in overrides):
            raise ConfigError(
                f"{key}: got an override; expected none: names are made from the files, seeds are --seeds"
            )
    config = load_config(TrainConfig, file, overrides)
    for seed in (config.run.seed,) if seeds is None else seeds:
        section = {"name": f"{file.stem}-seed-{seed}", "seed": seed}
        yield config.model_copy(update={"run": type(config.run)(**(config.run.model_dump() | section))})


def _is_finished(config: TrainConfig) -> bool:
    """Return whether the run has its summary; raise ConfigError if its settings are not those of ``config``."""
    folder = config.run.path
    if not (folder / "summary.json").is_file():
        return False
    before, now = (_tree(each) for each in (load_config(TrainConfig, folder / "config.yaml"), config))
    if changed := describe_differences(before, now, "in its config.yaml"):
        shown = "\n".join([*changed.values()][:5])
        raise ConfigError(
            f"{folder}: this run is finished, with other settings; expected the same ones, another run.folder=..., or "
            f"no such folder:\n{shown}"
        )
    return True


def _tree(config: TrainConfig) -> Any:
    """Return the settings as plain data, as in the run's config.yaml, without the sections ``run`` and ``report``."""
    return mask_credentials(to_jsonable_python(config.model_dump(exclude={"run", "report"})))
