"""Checkpoints of weights in shards: every rank writes its own rows into the files that one process would write.

    every rank, in the training        copy its rows to host memory
    every rank, in the background      rank 0 makes the files -> all write their rows -> all compare them with the disk
    rank 0, in the background          hashes the files, writes the manifest last, renames the folder

The ranks must see one run folder, see `is_shared`. Nothing of a save counts before its manifest: a rank that dies
leaves a folder that the next save removes.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from vqclip import checkpoint, dist
from vqclip.errors import CheckpointError
from vqclip.io import parts
from vqclip.io.atomic import TEMPORARY
from vqclip.io.parts import Part


def is_shared(folder: Path) -> bool:
    """Return whether all ranks see the folder of rank 0 under the path that each of them was given. A collective."""
    name = dist.broadcast_json(f"{TEMPORARY}shared-{secrets.token_hex(8)}")

    def create() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    dist.run_on_main(create)
    lacking = dist.any_rank(not (folder / name).exists())
    dist.run_on_main((folder / name).unlink)
    return not lacking


class ShardCopy(NamedTuple):
    """Copy of what this rank writes to a checkpoint."""

    name: str
    """Random name of the save; a rank left over from a killed job does not find the files of another one."""
    files: dict[str, dict[str, Part]]
    """File in the checkpoint's folder → name of each tensor → this rank's rows."""


class ShardFiles:
    """Writes the tensors of checkpoints on all ranks together. Its making is a collective.

    Args:
        shards: the weights in shards.
        timeout_s: longest wait for another rank's disk, in seconds.
    """

    def __init__(self, shards: dist.Shards, timeout_s: float):
        self._shards, self._group, self._staging = shards, dist.BackgroundGroup(timeout_s), checkpoint.Staging()

    def copy(self, files: Mapping[str, Mapping[str, tuple[str, Tensor]]]) -> ShardCopy:
        """Copy this rank's rows to host memory, which the next call overwrites. A collective.

        Args:
            files: file → name of each tensor → the parameter whose shape it has, and this rank's rows or the whole of
                it; the same names on every rank.
        """
        found = {
            file: {name: self._shards.part(parameter, rows) for name, (parameter, rows) in tensors.items()}
            for file, tensors in files.items()
        }
        held = {
            f"{file} {name}": part.rows
            for file, every in found.items()
            for name, part in every.items()
            if part.rows is not None
        }
        copies = self._staging.copy(held)
        own = {
            file: {name: part._replace(rows=copies.get(f"{file} {name}")) for name, part in every.items()}
            for file, every in found.items()
        }
        return ShardCopy(dist.broadcast_json(secrets.token_hex(8)), own)

    def write(self, copied: ShardCopy, folder: Path) -> None:
        """Write and compare the files, in a background thread of every rank.

        Args:
            copied: result of `copy`.
            folder: unfinished folder of the checkpoint, which rank 0 has made.

        Raises:
            CheckpointError: on every rank, if one could not write or does not find what it has written.
            DistributedError: a rank died.
        """
        paths = {folder / f"{file}.{copied.name}": each for file, each in copied.files.items()}
        what = f"{folder}: writing this rank's part of the checkpoint"
        for work in (parts.create, parts.write, parts.require_equal):
            with self._group.raise_on_all_ranks(what):
                try:
                    for path, each in paths.items():
                        if dist.is_main() or work is not parts.create:
                            work(path, each)
                except OSError as error:
                    raise CheckpointError(f"{what}: {error}; older checkpoints are untouched") from error
        if dist.is_main():
            for path in paths:
                path.rename(path.with_suffix(""))

    def close(self) -> None:
        """End the connections between the ranks' threads."""
        self._group.close()
