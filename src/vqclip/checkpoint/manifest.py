"""The manifest of a folder: size and SHA-256 of each file in it, so that any flipped byte is noticed."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

from vqclip.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "vqclip-checkpoint"
VERSION = 2
_CHUNK = 1 << 20


def write_manifest(folder: Path, step: int) -> None:
    """Describe every file now in ``folder`` in its ``manifest.json``."""
    files = {name: {"size": path.stat().st_size, "sha256": _sha256(path)} for name, path in _files(folder).items()}
    body = {"format": FORMAT, "version": VERSION, "step": step, "files": files}
    (folder / MANIFEST).write_bytes(_render(body))


def verify(folder: Path) -> int:
    """Read the whole checkpoint ``folder`` and compare it with its manifest.

    Returns:
        The step the manifest gives.

    Raises:
        CheckpointError: A file is missing, added, of another size, or differs in a single bit; it is named.
    """
    step, expected = _read_manifest(folder)
    found = _files(folder)
    missing, added = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or added:
        raise CheckpointError(
            f"{folder}: missing files: {missing or 'none'}; files not in {MANIFEST}: {added or 'none'}"
        )
    for name, (size, digest) in expected.items():
        path = found[name]
        if (actual_size := path.stat().st_size) != size:
            raise CheckpointError(f"{path}: {actual_size} bytes; {MANIFEST} says {size}: the file is damaged")
        if (actual := _sha256(path)) != digest:
            raise CheckpointError(f"{path}: SHA-256 {actual}; {MANIFEST} says {digest}: the file is damaged")
    return step


def _read_manifest(folder: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """The step, and the size and hash of each file by its relative name."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}): not a complete checkpoint") from error
    try:
        body = json.loads(text)
        del body["sha256"]
        intact = _render(body) == text  # the manifest's own hash and every byte of its spelling
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest ({error}): the file is damaged") from error
    if not intact:
        raise CheckpointError(f"{path}: does not match its own hash: the file is damaged")
    if body.get("format") != FORMAT or body.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: format {body.get('format')!r} version {body.get('version')!r}; "
            f"this vqclip reads {FORMAT!r} version {VERSION}: use the vqclip that wrote it"
        )
    try:
        return int(body["step"]), {name: (int(f["size"]), str(f["sha256"])) for name, f in body["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a manifest of a checkpoint ({error})") from error


def _render(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(_dump(body)).hexdigest()
    return _dump({**body, "sha256": digest})


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _files(folder: Path) -> dict[str, Path]:
    """Every file under ``folder`` but the manifest, by its relative name; anything that is no plain file is refused."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) or path == folder / MANIFEST:
            continue
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path}: neither a plain file nor a folder; a checkpoint holds nothing else")
        found[path.relative_to(folder).as_posix()] = path
    return found


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
