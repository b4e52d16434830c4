"""Checkpoints: written to a temporary folder, hashed, synced and renamed; read back bit for bit or refused. No pickle.

After `vqclip.io`, which writes the files; before `vqclip.train`, which decides what a checkpoint contains.

    checkpoints/step-00001000/
      model/                   tensors of the model and its other files; such as a tokenizer folder
      optimizer.safetensors    every tensor of the optimizer's state, named ``<parameter>/<key>``
      state.json               the caller's JSON-able state
      state.safetensors        its tensors
      manifest.json            size and SHA-256 of each file, and of itself

One process writes, if it likes in a background thread, or several their parts of the tensors (`vqclip.io.parts`); any
number may read. The manifest detects any flipped byte. `vqclip.checkpoint.optimizer` writes and reads the optimizer.
"""

from __future__ import annotations

import logging
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import JsonValue
from torch import Tensor

from vqclip.errors import CheckpointError, OtherRunError
from vqclip.io.atomic import (
    REPLACED,
    TEMPORARY,
    FileDigest,
    digest_file,
    remove_folder,
    replace_folder,
    restore_folder,
    verify_file,
)
from vqclip.io.files import OF_SYSTEMS, sync_folder
from vqclip.io.json_files import Strict, add_checksum, read_checked, read_plain, write_plain
from vqclip.io.tensors import map_tensors

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MODEL = "model"
"""Folder of the model in a checkpoint."""
OPTIMIZER_FILE = "optimizer.safetensors"
"""File of the optimizer's tensors in a checkpoint."""
STATE_FILE = "state.safetensors"
"""File of the tensors of the caller's state in a checkpoint."""
MANIFEST = "manifest.json"
"""File of a checkpoint with the sizes and hashes of the others."""
VERSIONS = {"format": "vqclip-checkpoint", "version": 4}
"""Format of a checkpoint."""
_STATE = "state.json"
_STEP = re.compile(rf"(?:{re.escape(REPLACED)})?step-(\d{{8,}})")


class _Manifest(Strict):
    step: int
    files: dict[str, FileDigest]


class _Content(Strict):
    state: dict[str, JsonValue]


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint opened for reading."""

    path: Path
    """Folder of the checkpoint."""
    step: int
    """Number of optimizer steps done when it was saved."""
    state: dict[str, Any]
    """The caller's state, as given to `save`, with tuples as lists."""

    @property
    def model_folder(self) -> Path:
        """Folder of the model."""
        return self.path / MODEL

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the caller's state, if it has any, mapped from the file.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = self.path / STATE_FILE
        return map_tensors(path) if path.exists() else {}


def save(
    folder: Path,
    step: int,
    fill: Callable[[Path], object],
    state: Mapping[str, Any],
    keep_last: int,
    keep: Callable[[int], bool] = lambda step: False,
) -> Path:
    """Save a checkpoint of ``step``, then remove old ones.

    Returns when the checkpoint is on the disk, not only in the page cache. A process that dies at any moment leaves
    either the complete new checkpoint or nothing of it, and all older ones intact. A checkpoint of the same step is
    replaced; until then, the old one is found.

    Args:
        folder: of the checkpoints of one run; made if necessary. One process at a time may write to it.
        step: optimizer steps done.
        fill: called with the unfinished checkpoint's folder (`unfinished_path`), which has an empty folder `MODEL`, to
            write all files but the state and the manifest.
        state: JSON values, such as data position, fingerprints, gradient scaler, configuration.
        keep_last: number of checkpoints to keep, this one included; at least 1.
        keep: whether to keep an older checkpoint, by its step.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it could not be written (disk full, ...); older checkpoints are untouched.
    """
    path = folder / checkpoint_name(step)

    def fill_and_describe(aside: Path) -> None:
        (aside / MODEL).mkdir()
        fill(aside)
        write_plain(aside / _STATE, {"state": dict(state)})
        write_manifest(aside, step)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        for left in list(folder.iterdir()):  # by a killed save of any step
            if left.name.startswith(TEMPORARY):
                shutil.rmtree(left, ignore_errors=True)
            elif left.name.startswith(REPLACED):
                restore_folder(folder / left.name.removeprefix(REPLACED))
        replace_folder(path, fill_and_describe)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the checkpoint could not be written ({error}); older checkpoints are untouched"
        ) from error
    for old in find_old(checkpoints(folder), path, keep_last, keep):
        remove_folder(old)
    return path


def load(path: Path) -> Checkpoint:
    """Open the checkpoint ``path``, after comparing every byte with its manifest.

    Args:
        path: a folder ``step-...``.

    Raises:
        CheckpointError: missing, incomplete or damaged; the message names the file.
    """
    path = verify(Path(path))
    return Checkpoint(path, step_of(path), dict(read_plain(path / _STATE, _Content).state))


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in ``folder``, intact or damaged, oldest first. Opens no file."""
    if not folder.is_dir():
        return []
    # A save that was killed while it replaced a checkpoint of the same step leaves the old one under ".replaced-";
    # it sorts before ("." < "s") a folder of the same step, so it is tried last.
    return sort_checkpoints(folder.iterdir())


def sort_checkpoints(paths: Iterable[Path]) -> list[Path]:
    """Return the paths with names of checkpoints, oldest first."""
    found = [path for path in paths if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: (step_of(path), path.name))


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def unfinished_path(folder: Path, step: int) -> Path:
    """Return the folder that a checkpoint is written to before it is renamed."""
    return folder / f"{TEMPORARY}{checkpoint_name(step)}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    match = _STEP.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path}: not a checkpoint folder; expected a name like step-00001000")
    return int(match.group(1))


def write_manifest(folder: Path, step: int) -> None:
    """Write the size and hash of every file in ``folder`` to its ``manifest.json``."""
    files = {name: digest_file(path).model_dump() for name, path in _files(folder).items()}
    body = {**VERSIONS, "step": step, "files": files}
    (folder / MANIFEST).write_bytes(add_checksum(body))


def verify(path: Path) -> Path:
    """Read the whole checkpoint ``path``, compare it with its manifest, and return the path.

    Raises:
        CheckpointError: a file is missing, added, of another size, or differs in a bit; the message names it.
    """
    manifest = read_checked(
        path / MANIFEST, _Manifest, VERSIONS, "use the vqclip that wrote it", ": not a complete checkpoint"
    )
    expected, found = manifest.files, _files(path)
    missing, added = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or added:
        raise CheckpointError(f"{path}: missing files: {missing or 'none'}; files not in {MANIFEST}: {added or 'none'}")
    for name, digest in expected.items():
        verify_file(found[name], digest, MANIFEST)
    if manifest.step != step_of(path):
        raise CheckpointError(f"{path}: the manifest is of step {manifest.step}: the folder was renamed")
    return path


def _files(folder: Path) -> dict[str, Path]:
    """Return every file under ``folder`` but the manifest, by relative name; refuse links, sockets and the like.

    Hidden files and folders, and those of systems, are left out: file managers and NFS write some.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        if path == folder / MANIFEST or any(name[0] == "." or name in OF_SYSTEMS for name in names):
            continue
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path}: neither a plain file nor a folder; a checkpoint contains nothing else")
        found[path.relative_to(folder).as_posix()] = path
    return found


def latest(folder: Path) -> Path | None:
    """Return the newest intact checkpoint in ``folder``; None without any checkpoint. See `use_latest`.

    Raises:
        CheckpointError: there are checkpoints, but none is intact.
    """
    return use_latest(folder, verify)


def use_latest(folder: Path, use: Callable[[Path], _T], paths: Sequence[Path] | None = None) -> _T | None:
    """Return the result of ``use`` on the newest checkpoint in ``folder`` that it accepts; None if there is none.

    Args:
        folder: of the checkpoints.
        use: raises CheckpointError for a checkpoint that cannot be used; the error is logged, and the next older one
            is tried. An OtherRunError is raised at once.
        paths: of the checkpoints, oldest first; None for those that are in ``folder``.

    Raises:
        CheckpointError: there are checkpoints, but none can be used. (To start over, use another folder.)
        OtherRunError: raised by ``use``.
    """
    problems: list[str] = []
    for path in reversed(checkpoints(folder) if paths is None else paths):
        try:
            return use(path)
        except OtherRunError:
            raise
        except CheckpointError as error:
            _logger.error("damaged checkpoint, trying the one before it: %s", error)
            problems.append(str(error))
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"{folder}: none of its {len(problems)} checkpoints can be used; "
            f"restore one, or train in another folder to start over:\n{listed}"
        )
    return None


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints newer than ``step`` to ``set-aside-step-...``, so that nothing resumes from them later.

    Call it on resume from ``step``: newer checkpoints are damaged, or of steps that the run will repeat.
    """
    if newer := [path for path in checkpoints(folder) if step_of(path) > step]:
        for path in newer:
            set_aside(path, f"is newer than step {step}, from which the run resumes")
        sync_folder(folder)


def set_aside(path: Path, why: str) -> None:
    """Rename a checkpoint to ``set-aside-step-...``, and log why."""
    name, number = f"set-aside-{path.name.lstrip('.')}", 1
    while (target := path.with_name(name)).exists():
        number += 1
        name = f"set-aside-{path.name.lstrip('.')}-{number}"
    path.rename(target)
    _logger.warning("%s %s: renamed to %s", path, why, target.name)


def find_old(paths: Iterable[Path], newest: Path, keep_last: int, keep: Callable[[int], bool]) -> list[Path]:
    """Return the checkpoints that a save of ``newest`` removes, of those before the last ``keep_last`` up to it."""
    older = [path for path in paths if step_of(path) <= step_of(newest)]
    return [path for path in older[: max(0, len(older) - keep_last)] if not keep(step_of(path))]
