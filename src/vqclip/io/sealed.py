"""JSON files that vouch for every byte of themselves and of the files that they describe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from vqclip.errors import CheckpointError
from vqclip.io.files import open_regular, read_bounded

MAX_BYTES = 64 << 20
"""Larger ones are not read; the manifest of a thousand files has 150 kB."""
MAX_PLAIN_BYTES = 16 << 20
"""Larger plain JSON files are neither written nor read; the layout of ten thousand parameters takes 2 MB."""
_CHUNK = 1 << 20


class Strict(BaseModel):
    """Base of the schemas of JSON files: unknown keys, other types, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


SchemaT = TypeVar("SchemaT", bound=BaseModel)


class Facts(NamedTuple):
    """What a file is described by."""

    size: int
    """Bytes."""
    sha256: str
    """Hash of all of them, in hexadecimal digits."""


def facts_of(path: Path, limit: int | None = None) -> Facts:
    """Read a whole file, or no more than ``limit + 1`` bytes of it.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK if limit is None else min(_CHUNK, limit + 1 - size)):
            digest.update(chunk)
            size += len(chunk)
    return Facts(size, digest.hexdigest())


def require_facts(path: Path, expected: Facts, source: str) -> None:
    """Compare a file with what `source` says of it.

    Raises:
        CheckpointError: it is missing, of another size, or differs in a single bit.
    """
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise CheckpointError(
                f"{path}: {size} bytes; {source} says {expected.size}: the file is damaged or cut short"
            )
        actual = facts_of(path, limit=expected.size).sha256  # no further, should it grow meanwhile
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if actual != expected.sha256:
        raise CheckpointError(f"{path}: SHA-256 {actual}; {source} says {expected.sha256}: the file is damaged")


def seal(body: dict[str, Any]) -> bytes:
    """A JSON object (without a key ``sha256``) as bytes that hold their own hash."""
    assert "sha256" not in body
    return _dump({**body, "sha256": hashlib.sha256(_dump(body)).hexdigest()})


def read_json(path: Path) -> tuple[dict[str, Any], bytes]:
    """The JSON object in a file, whether it is sealed or not, and the file's bytes, for `unsealed`.

    Raises:
        CheckpointError: it is too large, or no JSON object.
        OSError: it cannot be read.
    """
    data = read_bounded(path, MAX_BYTES)
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{path}: more than {MAX_BYTES} bytes, which are not read")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}: the file is damaged") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{path}: holds a {type(body).__name__}; expected a JSON object")
    return body, data


def unsealed(path: Path, body: dict[str, Any], data: bytes) -> dict[str, Any]:
    """What `seal` was given.

    Raises:
        CheckpointError: a byte of the file differs from what `seal` made.
    """
    body = {key: value for key, value in body.items() if key != "sha256"}
    try:
        intact = seal(body) == data  # its own hash, and every byte of its spelling
    except (ValueError, RecursionError):  # lone surrogates, numbers of thousands of digits
        intact = False
    if not intact:
        raise CheckpointError(f"{path}: does not match its own hash: the file is damaged, or was edited")
    return body


def read_versioned(path: Path, versions: Mapping[str, object], remedy: str) -> dict[str, Any]:
    """What `seal` was given, without the keys that say whose file it is and of which version.

    Args:
        path: the file.
        versions: those keys, and what they must be; compared before the hash, so that a newer file is no damaged one.
        remedy: what to do about a file of another version, in words.

    Raises:
        CheckpointError: another format or version, or a byte of the file differs from what `seal` made.
        OSError: it cannot be read.
    """
    body, data = read_json(path)
    for key, value in versions.items():
        if body.get(key) != value:
            raise CheckpointError(f"{path}: {key} is {body.get(key)!r}, this vqclip reads {value!r}; {remedy}")
    return {key: value for key, value in unsealed(path, body, data).items() if key not in versions}


def write_plain(path: Path, value: object) -> None:
    """Write a JSON file without a hash of its own, for `read_plain`.

    Raises:
        CheckpointError: it would be too large to be read.
    """
    data = (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    if len(data) > MAX_PLAIN_BYTES:
        raise CheckpointError(f"{path}: would have {len(data)} bytes; at most {MAX_PLAIN_BYTES} are read back")
    path.write_bytes(data)


def read_plain(path: Path, schema: type[SchemaT]) -> SchemaT:
    """Read and check a JSON file.

    Raises:
        CheckpointError: it cannot be read, is too large, or does not fit the schema.
    """
    try:
        data = read_bounded(path, MAX_PLAIN_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > MAX_PLAIN_BYTES:
        raise CheckpointError(f"{path}: more than {MAX_PLAIN_BYTES} bytes, which are not read")
    return validated(path, schema, data)


def validated(path: Path, schema: type[SchemaT], content: bytes | dict[str, Any], section: str = "") -> SchemaT:
    """Check JSON bytes, or the object in them, against a schema.

    Args:
        path: whose content it is, for the error.
        schema: what it must fit.
        content: JSON text, or what was read from it.
        section: key of the object in the file, for the error.

    Raises:
        CheckpointError: it does not fit; the message lists every problem with its key.
    """
    try:
        if isinstance(content, bytes):
            return schema.model_validate_json(content)
        return schema.model_validate(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)[:10]
        where = [".".join(map(str, ([section] if section else []) + list(each["loc"]))) for each in found]
        problems = (f"{at}: {each['msg']}" if at else each["msg"] for at, each in zip(where, found, strict=True))
        raise CheckpointError(f"{path}: " + "; ".join(problems)) from error


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
