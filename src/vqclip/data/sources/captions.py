"""Read the captions of a sample from its .txt or .json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vqclip.data.sources.reader import ShardReader
from vqclip.errors import DataError

__all__ = [
    "MAX_CAPTION",
    "captions_in_json",
    "captions_in_text",
    "collect_captions",
    "json_captions",
    "require_usable",
    "txt_captions",
]

MAX_CAPTION = 65_536
"""Characters of a caption at most. The whole caption is tokenized before it is cut to the context length, so a few
gigantic captions would delay every process."""


def txt_captions(reader: ShardReader, index: int, one_per_line: bool) -> tuple[str, ...]:
    """Return the .txt as one caption, or every line as one.

    Raises:
        DataError: there is no .txt, or it is empty.
    """
    return captions_in_text(reader.text(index, "txt"), one_per_line, reader.name(index))


def captions_in_text(text: str, one_per_line: bool, name: str) -> tuple[str, ...]:
    """Return a text as one caption, or every line as one; raises DataError if it is empty."""
    lines = text.splitlines() if one_per_line else [text]
    captions = tuple(line.strip() for line in lines if line.strip())
    if not captions:
        raise DataError(f"{name}: the caption (.txt) is empty", "no caption")
    return require_usable(captions, name)


def json_captions(reader: ShardReader, index: int, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the captions under some keys of the .json: strings, or lists of strings.

    Missing, null and empty values are skipped if another key has a caption.

    Raises:
        DataError: there is no .json, it cannot be read, or it has no caption under these keys.
    """
    return captions_in_json(reader.text(index, "json"), keys, reader.name(index))


def captions_in_json(text: str, keys: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the captions under some keys of a JSON object; raises DataError as `json_captions`."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: .json cannot be read: {error}", "damaged JSON") from None
    if not isinstance(facts, dict):
        raise DataError(f"{name}: .json contains a {type(facts).__name__}; expected an object", "damaged JSON")
    return collect_captions(facts, keys, name, "key", "damaged JSON", " in the .json")


def collect_captions(
    values: Mapping[str, Any], keys: tuple[str, ...], name: str, what: str, kind: str, where: str = ""
) -> tuple[str, ...]:
    """Return the captions under some keys of a mapping: strings, or lists of strings.

    Missing, null and empty values are skipped if another key has a caption.

    Args:
        values: the row of a table, or the content of a .json.
        keys: keys of the captions.
        name: name of the sample, for messages.
        what: "key" or "column", for messages.
        kind: kind of the error if a value is no text.
        where: added to the message if there is no caption.

    Raises:
        DataError: a value is no text, too long, or there is no caption.
    """
    captions: list[str] = []
    for key in keys:
        value = values.get(key)
        for caption in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(caption, str):
                raise DataError(
                    f"{name}:{where.replace(' in the', '')} {what} {key!r} contains a {type(caption).__name__}; "
                    "expected text or a list of texts",
                    kind,
                )
            captions += [caption.strip()] if caption.strip() else []
    if not captions:
        raise DataError(
            f"{name}: no caption under {', '.join(map(repr, keys))}{where}; "
            f"its {what}s: {', '.join(map(repr, list(values)[:20]))}",
            "no caption",
        )
    return require_usable(tuple(captions), name)


def require_usable(captions: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the captions of a sample; raise DataError for one that is too long or not UTF-8."""
    for caption in captions:
        if len(caption) > MAX_CAPTION:
            raise DataError(
                f"{name}: caption of {len(caption)} characters; at most {MAX_CAPTION} are read", "caption too long"
            )
        try:
            caption.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a character
            raise DataError(
                f"{name}: caption with a lone surrogate at character {error.start}: {caption[:80]!r}", "not UTF-8"
            ) from None
    return captions
