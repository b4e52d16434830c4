"""Manifest of a folder: size and SHA-256 of each file in it, which detect any flipped byte."""

from __future__ import annotations

import stat
from pathlib import Path

from vqclip.errors import CheckpointError
from vqclip.io.digest import FileDigest, digest_file, verify_file
from vqclip.io.json_files import Strict, add_checksum, read_versioned, validate

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
    step, expected = _read_manifest(folder)
    found = _files(folder)
    missing, added = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or added:
        raise CheckpointError(
            f"{folder}: missing files: {missing or 'none'}; files not in {MANIFEST}: {added or 'none'}"
        )
    for name, facts in expected.items():
        verify_file(found[name], facts, MANIFEST)
    return step


def _read_manifest(folder: Path) -> tuple[int, dict[str, FileDigest]]:
    """The step, and what each file should be by its relative name."""
    path = folder / MANIFEST
    try:
        body = read_versioned(path, VERSIONS, "use the vqclip that wrote it")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}): not a complete checkpoint") from error
    manifest = validate(path, _Manifest, body)
    return manifest.step, manifest.files


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
