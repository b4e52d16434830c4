"""Results with their details as files in a run's folder: one for each task, of the newest evaluation only."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from vqclip.data import mask_credentials
from vqclip.errors import CheckpointError, encodable
from vqclip.evaluation.details import Part
from vqclip.evaluation.results import Result
from vqclip.io.atomic import write_file
from vqclip.io.json_files import MAX_PLAIN_BYTES, read_plain

FOLDER = "report"
"""Name of their folder in a run's folder."""


class StoredEvaluation(Part):
    """Content of a file: the result of one task."""

    step: int = Field(ge=0, lt=2**53)
    """Steps of training that the evaluated weights have."""
    result: Result
    """The result, with its details."""


def stored_files(run: Path) -> list[Path]:
    """Return the files of a run's folder in the order of the tasks, for `read_evaluation`."""
    return sorted((run / FOLDER).glob("[0-9]*.json"))


def read_evaluation(path: Path) -> StoredEvaluation:
    """Read a file that `write_evaluations` wrote.

    Raises:
        CheckpointError: it cannot be read, is too large, or contains unknown keys or values.
    """
    return read_plain(path, StoredEvaluation)


def write_evaluations(run: Path, step: int, results: Sequence[Result]) -> list[Path]:
    """Write results into a run's folder, and remove those of former evaluations. Each file is written atomically.

    Args:
        run: the folder.
        step: steps of training of the evaluated weights.
        results: one for each task.

    Returns:
        The files, as `stored_files` does.

    Raises:
        CheckpointError: a file would be too large to be read, or a figure is NaN.
        OSError: a file cannot be written.
    """
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    paths = []
    for number, result in enumerate(results):
        notes = [encodable(mask_credentials(note)) for note in result.notes]
        result = dataclasses.replace(result, name=encodable(result.name), notes=notes)
        content = StoredEvaluation(step=step, result=result).model_dump_json().encode()
        path = run / FOLDER / f"{number:02d}-{_file_name(result)}.json"
        if len(content) > MAX_PLAIN_BYTES:
            raise CheckpointError(f"{path}: would have {len(content)} bytes; at most {MAX_PLAIN_BYTES} are read back")
        write_file(path, content)
        paths.append(path)
    for former in set(stored_files(run)) - set(paths):
        former.unlink(missing_ok=True)
    return paths


def _file_name(result: Result) -> str:
    """Return a name of plain characters; a task's name may contain any."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", result.name).strip("-")[:40].lower()
    digest = hashlib.sha256(f"{result.kind}\0{result.name}".encode("utf-8", "surrogateescape")).hexdigest()
    return f"{plain}-{digest[:8]}" if plain else digest[:8]
