"""JSON files, checked against a schema; some contain a checksum of themselves; and differences between their trees."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from vqclip.errors import CheckpointError
from vqclip.io.files import read_bounded

MAX_BYTES = 64 << 20
"""Larger files are not read; the manifest of a thousand files has 150 kB."""
MAX_PLAIN_BYTES = 16 << 20
"""Larger files without a checksum are neither written nor read; the layout of ten thousand parameters takes 2 MB."""
_MAX_PROBLEMS = 10
_MAX_SHOWN = 60
"""Characters of a wrong value in a message."""


class Strict(BaseModel):
    """Base of the schemas of JSON files: refuses unknown keys, other types, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


SchemaT = TypeVar("SchemaT", bound=BaseModel)


def add_checksum(body: dict[str, Any]) -> bytes:
    """Return a JSON object (without a key ``sha256``) as bytes that contain their own checksum."""
    assert "sha256" not in body
    return _dump({**body, "sha256": hashlib.sha256(_dump(body)).hexdigest()})


def verify_checksum(path: Path, body: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Verify the embedded checksum of a file that `read_json` has read, and return the body without it.

    Raises:
        CheckpointError: a byte of the file differs from what `add_checksum` returned.
    """
    body = {key: value for key, value in body.items() if key != "sha256"}
    try:
        intact = add_checksum(body) == data  # every byte, spaces included
    except (ValueError, RecursionError):  # lone surrogates, numbers of thousands of digits
        intact = False
    if not intact:
        raise CheckpointError(f"{path}: does not match its own checksum: the file is damaged, or was edited")
    return body


def read_json(path: Path, limit: int = MAX_BYTES) -> tuple[dict[str, Any], bytes]:
    """Return the JSON object in a file, with or without a checksum, and the file's bytes, for `verify_checksum`.

    Raises:
        CheckpointError: it has more than ``limit`` bytes, or is not a JSON object.
        OSError: it cannot be read.
    """
    data = read_bounded(path, limit)
    if len(data) > limit:
        raise CheckpointError(f"{path}: more than {limit} bytes, which are not read")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}: the file is damaged") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{path}: contains a {type(body).__name__}; expected a JSON object")
    return body, data


def read_versioned(path: Path, versions: Mapping[str, object], remedy: str) -> dict[str, Any]:
    """Read a file that `add_checksum` made, verify it, and return its body without the keys of ``versions``.

    Args:
        path: the file.
        versions: keys for format and versions, with the values that this vqclip reads. They are compared before the
            checksum, so that a newer file is not called damaged.
        remedy: how to mend a file of another version, for the error.

    Raises:
        CheckpointError: another format or version, or a byte of the file differs from what `add_checksum` returned.
        OSError: it cannot be read.
    """
    body, data = read_json(path)
    for key, value in versions.items():
        if body.get(key) != value:
            raise CheckpointError(f"{path}: {key} is {body.get(key)!r}, this vqclip reads {value!r}; {remedy}")
    return {key: value for key, value in verify_checksum(path, body, data).items() if key not in versions}


def read_checked(
    path: Path, schema: type[SchemaT], versions: Mapping[str, object], remedy: str, hint: str = ""
) -> SchemaT:
    """Read a file as `read_versioned` does, and check it against a schema; ``hint`` ends the error for no such file.

    Raises:
        CheckpointError: it cannot be read, is of another version or damaged, or does not fit the schema.
    """
    try:
        return validate(path, schema, read_versioned(path, versions, remedy))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}){hint}") from error


def write_plain(path: Path, value: object) -> None:
    """Write a JSON file without a checksum, for `read_plain`.

    Raises:
        CheckpointError: it contains other values than JSON has, or would be too large to be read.
    """
    try:
        data = (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be stored: {error}") from error
    if len(data) > MAX_PLAIN_BYTES:
        raise CheckpointError(f"{path}: would have {len(data)} bytes; at most {MAX_PLAIN_BYTES} are read back")
    path.write_bytes(data)


def read_plain(path: Path, schema: type[SchemaT]) -> SchemaT:
    """Read a JSON file without a checksum and check it against a schema.

    Raises:
        CheckpointError: it cannot be read, is too large, or does not fit the schema.
    """
    try:
        return validate(path, schema, read_json(path, MAX_PLAIN_BYTES)[1])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def validate(path: Path, schema: type[SchemaT], content: bytes | dict[str, Any], section: str = "") -> SchemaT:
    """Check JSON text, or the object read from it, against a schema.

    Args:
        path: the file, for the error.
        schema: what it must fit.
        content: JSON text, or the object in it.
        section: key of the object in the file, for the error.

    Raises:
        CheckpointError: it does not fit; the message lists the first ten problems with their keys.
    """
    try:
        if isinstance(content, bytes):
            return schema.model_validate_json(content)
        return schema.model_validate(content)
    except ValidationError as error:
        problems = validation_problems(error, (section,) if section else ())
        raise CheckpointError(f"{path}: " + "; ".join(problems)) from error


def validation_problems(error: ValidationError, section: tuple[str, ...] = ()) -> list[str]:
    """Return a line for each of the first problems: key path, the value if it is a short one, what is expected."""
    return [
        ": ".join(filter(None, (".".join(map(str, (*section, *each["loc"]))), problem_message(each))))
        for each in error.errors(include_url=False)[:_MAX_PROBLEMS]
    ]


def problem_message(problem: Mapping[str, Any]) -> str:
    """Return the value that was got, if it is a scalar, and what is expected instead."""
    message = str(problem["msg"]).removeprefix("Value error, ")
    shown = repr(problem["input"])
    if isinstance(problem["input"], dict | list | tuple | BaseModel) or len(shown) > _MAX_SHOWN:
        return message
    return f"got {shown}; {message}"


def describe_differences(before: Mapping[str, Any], after: Mapping[str, Any], place: str) -> dict[str, str]:
    """Return a line for each key path whose values differ.

    Args:
        before: a tree of dictionaries and lists, such as the one in a file.
        after: the tree of this run.
        place: where ``before`` comes from, in words, such as "in the checkpoint".

    Returns:
        Key path → line, sorted; empty if the trees are equal. A value of None equals an absent one: a setting that is
        off need not be in a tree from before it existed.
    """
    old, new = flatten(before), flatten(after)
    return {
        path: f"  {path}: {_show(old, path)} {place}, {_show(new, path)} now"
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    }


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by key path, such as ``data.shards[0].name``."""
    if isinstance(tree, Mapping):
        items = [(f"{path}.{key}" if path else str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(f"{path}[{index}]", value) for index, value in enumerate(tree)]
    else:
        return {path: tree}
    return {name: leaf for key, value in items for name, leaf in flatten(value, key).items()} or {path: tree}


def _show(leaves: Mapping[str, Any], path: str) -> str:
    return repr(leaves[path]) if path in leaves else "absent"


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
