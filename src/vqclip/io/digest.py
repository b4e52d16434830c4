"""Size and SHA-256 of a file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import Field

from vqclip.errors import CheckpointError
from vqclip.io.files import open_regular
from vqclip.io.json_files import Strict

_CHUNK = 1 << 20


class FileDigest(Strict):
    """Size and SHA-256 of a file."""

    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the whole file, in hexadecimal digits."""


def digest_file(path: Path, limit: int | None = None) -> FileDigest:
    """Return the digest of a file, or of its first ``limit + 1`` bytes.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK if limit is None else min(_CHUNK, limit + 1 - size)):
            digest.update(chunk)
            size += len(chunk)
    return FileDigest(size=size, sha256=digest.hexdigest())


def verify_file(path: Path, expected: FileDigest, source: str) -> None:
    """Compare a file with its digest in the file `source`.

    Raises:
        CheckpointError: it is missing, has another size, or differs in a single bit.
    """
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise CheckpointError(
                f"{path}: {size} bytes; {source} says {expected.size}: the file is damaged or cut short"
            )
        actual = digest_file(path, limit=expected.size).sha256  # no further, should it grow meanwhile
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if actual != expected.sha256:
        raise CheckpointError(f"{path}: SHA-256 {actual}; {source} says {expected.sha256}: the file is damaged")
