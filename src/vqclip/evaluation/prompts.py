"""Prompts of zero-shot classification: names of classes and templates, from the data or from files of one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from vqclip.data.sources.class_names import ClassFolder, read_lines
from vqclip.errors import DataError
from vqclip.io.json_files import Strict, validation_problems

Names = tuple[str, ...]
"""Names of one class, at least one."""

_NAMES = "one class name a line, or JSON (.json)"
_JSON: TypeAdapter[list[str | list[str]] | dict[str, str | list[str]]] = TypeAdapter(
    list[str | list[str]] | dict[str, str | list[str]], config=Strict.model_config
)


def read_classes(path: Path, known: Sequence[str]) -> tuple[Names, ...]:
    """Read the names of all classes, in the order of ``known``, the data's own names.

    A ``.json`` contains a list with a name or a list of names for each class, or an object that maps the data's name of
    each class to them. Any other file has one name a line.

    Raises:
        DataError: the file cannot be read, or its classes are not those of the data.
    """
    folder = ClassFolder(path.parent)
    if path.suffix.lower() != ".json":
        found: list[Names] = [(line,) for line in read_lines(folder, path.name, _NAMES)]
    else:
        try:
            content = _JSON.validate_python(json.loads(folder.read(path.name, _NAMES)))
        except ValidationError as error:
            problem = validation_problems(error)[0]
        except (ValueError, RecursionError) as error:
            problem = str(error)
        else:
            found = [_names(path, each) for each in (_in_order(path, content, known))]
            problem = ""
        if problem:
            raise DataError(
                f"{path}: {problem}; expected a list with a name or a list of names for each class, or an object that "
                "maps the data's class names to them"
            )
    if len(found) != len(known):
        raise DataError(f"{path}: got {len(found)} classes; expected {len(known)}, in the order of {_some(known)}")
    return tuple(found)


def fill(templates: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return every template with every name."""
    return [template.replace("{c}", name) for name in names for template in templates]


def _in_order(
    path: Path, content: list[str | list[str]] | dict[str, str | list[str]], known: Sequence[str]
) -> list[str | list[str]]:
    if isinstance(content, list):
        return content
    missing, unknown = sorted({*known} - {*content}), sorted({*content} - {*known})
    if missing or unknown:
        told = [f"{what} {_some(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise DataError(f"{path}: {'; '.join(told)}; expected the data's class names as keys: {_some(known)}")
    return [content[name] for name in known]


def _names(path: Path, names: str | list[str]) -> Names:
    found = (names,) if isinstance(names, str) else tuple(names)
    if not found or not all(name.isprintable() for name in found):
        raise DataError(
            f"{path}: got {list(found)} as names of a class; expected at least one, of characters that can be printed"
        )
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
