"""Checks of what a job assumes about its machines, before any work is done."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import torch
from pydantic_core import to_jsonable_python

import vqclip
from vqclip import checkpoint, dist
from vqclip.checkpoint.optimizer import state_bytes
from vqclip.data import mask_credentials
from vqclip.data.work_folder import require_room
from vqclip.errors import ConfigError
from vqclip.io.json_files import describe_differences, flatten
from vqclip.train.config import TaskConfig
from vqclip.train.step import TrainStep

_LOCAL = ("folder", "path", "workers", "trackers")
"""Last parts of the names of settings that may differ between machines: they change nothing that is computed."""
_SHOWN = 10


def compare_machines(config: TaskConfig) -> None:
    """Check that all ranks run the same versions and settings, and that rank 0 has the newest checkpoint. A collective.

    A run folder that the other machines do not see is no error: rank 0 alone needs it.

    Raises:
        ConfigError: versions or settings differ, or another machine has newer checkpoints of this run in its own
            folder; on every rank.
    """
    if not dist.is_distributed():
        return
    leaves = flatten(mask_credentials(to_jsonable_python(config.model_dump())))
    is_local = {name: any(part.split("[")[0] in _LOCAL for part in name.split(".")) for name in leaves}
    settings = {name: value for name, value in leaves.items() if not is_local[name]} | {"versions": _versions()}
    folder, newest = config.run.path, -1
    with contextlib.suppress(OSError):  # this rank need not see the folder
        newest = max(map(checkpoint.step_of, checkpoint.checkpoints(folder / "checkpoints")), default=-1)
    mine = {"host": socket.gethostname(), "folder": str(folder), "newest": newest}
    found = dist.gather_json({**mine, "settings": settings})
    names = [f"rank {rank} on {each['host']}" for rank, each in enumerate(found)]
    for name, each in zip(names, found, strict=True):
        if differing := describe_differences(found[0]["settings"], each["settings"], "on rank 0").values():
            lines = [line.removesuffix(" now") + f" on {name}" for line in differing]
            more = [f"  ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            told = "the ranks of this job differ; expected the same versions, configuration and overrides:"
            raise ConfigError("\n".join([told, *lines[:_SHOWN], *more]))
    if config.run.url is not None:
        return
    rank = max(range(len(found)), key=lambda each: found[each]["newest"])
    if (step := found[rank]["newest"]) > found[0]["newest"]:
        has = f"step {found[0]['newest']}" if found[0]["newest"] >= 0 else "none"
        raise ConfigError(
            f"run.folder: {names[rank]} has a checkpoint of step {step} in {found[rank]['folder']}, and {names[0]}, "
            f"which reads and writes checkpoints, has {has}: the machines do not share the folder, and another one has "
            f"become the first. Copy the folder to {found[0]['host']}, or start the job so that {found[rank]['host']} "
            "has rank 0; a run.folder on shared storage avoids this"
        )


def _versions() -> str:
    return f"vqclip {vqclip.__version__}, torch {torch.__version__}"


def require_space(folder: Path, step: TrainStep) -> None:
    """Check that the disk of the run folder has room for one more checkpoint; on rank 0.

    Raises:
        DataError: it has not, by an estimate from the sizes of the tensors.
    """
    averages = {} if step.ema is None else step.ema.tensors()
    state = state_bytes(step.optimizer, step.weights.shapes)
    tensors = [*step.model.state_dict().values(), *averages.values()]
    needed = sum(each.numel() * each.element_size() for each in tensors) + state
    require_room(folder, needed, "for one checkpoint: free some space, or choose a run.folder on another disk")
