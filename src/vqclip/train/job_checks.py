"""Checks of what a job assumes about its machines, before any work is done."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_jsonable_python

import vqclip
from vqclip import checkpoint, dist
from vqclip.data import mask_credentials
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.files import format_bytes
from vqclip.io.json_files import describe_differences, flatten
from vqclip.process.lock import LOCK_FILE
from vqclip.train.config import TaskConfig
from vqclip.train.step import TrainStep

__all__ = ["compare_machines", "require_space"]

logger = logging.getLogger(__name__)

_LOCAL = ("folder", "path", "workers", "trackers")
"""Last parts of the names of settings that may differ between machines: they change nothing that is computed."""
_SKEW_S = 30.0
"""Difference between the clocks of two machines that is worth a warning."""
_SHOWN = 10


def compare_machines(config: TaskConfig) -> None:
    """Check that all ranks run the same versions and settings, and that rank 0 has the newest checkpoint. A collective.

    A run folder that the other machines do not see is no error: rank 0 alone needs it. Clocks are compared as well, for
    a warning.

    Raises:
        ConfigError: versions or settings differ, or another machine has newer checkpoints of this run in its own
            folder; on every rank.
    """
    if not dist.is_distributed():
        return
    settings, versions, run = _settings(config), _versions(), _describe_run(config)
    found = dist.gather_json({"host": socket.gethostname(), "versions": versions, "run": run})
    _require_same_versions(found)
    if dist.differing_ranks(hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()):
        _refuse_settings(dist.gather_json(settings), found)
    if config.run.url is None:
        _require_newest_on_main(found)
    dist.barrier()
    _compare_clocks(found, dist.gather_json(time.time()))


def require_space(folder: Path, step: TrainStep[Any]) -> None:
    """Check that the disk of the run folder has room for one more checkpoint; on rank 0.

    Raises:
        CheckpointError: it has not, by an estimate from the sizes of the tensors.
    """
    trained = [each for each in step.model.parameters() if each.requires_grad]
    averages = {} if step.ema is None else step.ema.tensors()
    tensors = [*step.model.state_dict().values(), *trained, *trained, *averages.values()]  # two moments of AdamW
    needed = sum(each.numel() * each.element_size() for each in tensors)
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < needed:
        raise CheckpointError(
            f"{folder}: {format_bytes(disk.free)} are free, and one checkpoint takes about {format_bytes(needed)}; "
            "free some space, or choose a run.folder on another disk"
        )


def _versions() -> dict[str, str]:
    return {"vqclip": vqclip.__version__, "torch": torch.__version__}


def _settings(config: TaskConfig) -> dict[str, Any]:
    """Return the settings that must be equal on all machines, without credentials."""
    leaves = flatten(mask_credentials(to_jsonable_python(config.model_dump())))
    return {
        name: value
        for name, value in leaves.items()
        if not any(part.split("[")[0] in _LOCAL for part in name.split("."))
    }


def _describe_run(config: TaskConfig) -> dict[str, Any]:
    """Return what this rank sees of the run: the newest checkpoint's step, and the text that rank 0 put in its lock."""
    folder, newest, lock = config.run.path, -1, None
    with contextlib.suppress(OSError):  # this rank need not see the folder
        newest = max(map(checkpoint.step_of, checkpoint.checkpoints(folder / "checkpoints")), default=-1)
        lock = (folder / LOCK_FILE).read_text(encoding="utf-8", errors="replace")[:200]
    return {"folder": str(folder), "newest": newest, "lock": lock}


def _require_same_versions(found: list[dict[str, Any]]) -> None:
    others = [rank for rank, each in enumerate(found) if each["versions"] != found[0]["versions"]]
    if others:
        shown = [f"{_name(found, rank)} has {_show(found[rank]['versions'])}" for rank in (0, *others[:_SHOWN])]
        raise ConfigError(f"{'; '.join(shown)}: expected the same versions on every machine")


def _refuse_settings(settings: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    rank = next(rank for rank, each in enumerate(settings) if each != settings[0])
    lines = list(describe_differences(settings[0], settings[rank], "on rank 0").values())
    lines = [line.removesuffix(" now") + f" on {_name(found, rank)}" for line in lines]
    shown = "\n".join(lines[:_SHOWN]) + (f"\n  ... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
    raise ConfigError(f"the ranks of this job have different settings; expected the same file and overrides:\n{shown}")


def _require_newest_on_main(found: list[dict[str, Any]]) -> None:
    runs = [each["run"] for each in found]
    rank = max(range(len(runs)), key=lambda each: runs[each]["newest"])
    if runs[rank]["newest"] > runs[0]["newest"]:
        newest, mine = runs[rank], runs[0]["newest"]
        raise ConfigError(
            f"run.folder: {_name(found, rank)} has a checkpoint of step {newest['newest']} in {newest['folder']}, and "
            f"{_name(found, 0)}, which reads and writes checkpoints, has {f'step {mine}' if mine >= 0 else 'none'}: "
            "the machines do not share the folder, and another one has become the first. Copy the folder to "
            f"{found[0]['host']}, or start the job so that {found[rank]['host']} has rank 0; a run.folder on shared "
            "storage avoids this"
        )
    apart = [f"{rank} ({found[rank]['host']})" for rank, run in enumerate(runs) if run["lock"] != runs[0]["lock"]]
    if apart and dist.is_main():
        logger.info(
            "%s: not the folder that rank %s sees; logs and stacks of these ranks stay on their machines",
            runs[0]["folder"],
            ", ".join(apart[:_SHOWN]) + (f" and {len(apart) - _SHOWN} more" if len(apart) > _SHOWN else ""),
        )


def _compare_clocks(found: list[dict[str, Any]], clocks: list[float]) -> None:
    slow, fast = (choose(range(len(clocks)), key=clocks.__getitem__) for choose in (min, max))
    if clocks[fast] - clocks[slow] > _SKEW_S and dist.is_main():
        logger.warning(
            "the clock of %s is %.0f s ahead of that of %s. No result depends on it, but the times in logs do, and "
            "object stores refuse requests from clocks that are 15 minutes off",
            _name(found, fast),
            clocks[fast] - clocks[slow],
            _name(found, slow),
        )


def _name(found: list[dict[str, Any]], rank: int) -> str:
    return f"rank {rank} on {found[rank]['host']}"


def _show(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
