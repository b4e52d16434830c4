"""Manifest of a folder: size and SHA-256 of each file in it, which detect any flipped byte."""

from __future__ import annotations

import stat
from pathlib import Path

from vqclip.errors import CheckpointError
from vqclip.io.atomic import FileDigest, digest_file, verify_file
from vqclip.io.json_files import Strict, add_checksum, read_checked

MANIFEST = "manifest.json"
VERSIONS = {"format": "vqclip-checkpoint", "version": 2}


class _Manifest(Strict):
    step: int
    files: dict[str, FileDigest]


def write_manifest(folder: Path, step: int) -> None:
    """Write the size and hash of every file in ``folder`` to its ``manifest.json``."""
    files = {name: digest_file(path).model_dump() for name, path in _files(folder).items()}
    body = {**VERSIONS, "step": step, "files": files}
    (folder / MANIFEST).write_bytes(add_checksum(body))


def verify(folder: Path) -> int:
    """Read the whole checkpoint ``folder`` and compare it with its manifest.

    Returns:
        The step in the manifest.

    Raises:
        CheckpointError: a file is missing, added, of another size, or differs in a bit; the message names it.
    """
    manifest = read_checked(
        folder / MANIFEST, _Manifest, VERSIONS, "use the vqclip that wrote it", ": not a complete checkpoint"
    )
    expected, found = manifest.files, _files(folder)
    missing, added = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or added:
        raise CheckpointError(
            f"{folder}: missing files: {missing or 'none'}; files not in {MANIFEST}: {added or 'none'}"
        )
    for name, facts in expected.items():
        verify_file(found[name], facts, MANIFEST)
    return manifest.step


def _files(folder: Path) -> dict[str, Path]:
    """Return every file under ``folder`` but the manifest, by relative name; refuse links, sockets and the like."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) or path == folder / MANIFEST:
            continue
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path}: neither a plain file nor a folder; a checkpoint contains nothing else")
        found[path.relative_to(folder).as_posix()] = path
    return found
