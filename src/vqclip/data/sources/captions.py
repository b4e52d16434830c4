"""Read the captions of a sample from its .txt or .json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vqclip.errors import DataError, quote_names

__all__ = ["MAX_CAPTION", "CaptionFiles", "collect_captions", "require_usable"]

MAX_CAPTION = 65_536
"""Characters of a caption at most. The whole caption is tokenized before it is cut to the context length, so a few
gigantic captions would delay every process."""


@dataclass(frozen=True)
class CaptionFiles:
    """Captions in the .txt or .json of a sample, in a shard or beside an image."""

    mode: Literal["txt", "txt_lines", "json"]
    """See `vqclip.data.CaptionShardsConfig.captions`."""
    json_keys: tuple[str, ...] = ()
    """Keys of the .json with a caption or a list of captions."""

    @property
    def kind(self) -> Literal["txt", "json"]:
        """Ending of the file's name."""
        return "json" if self.mode == "json" else "txt"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Settings that change captions."""
        return {"captions": self.mode, "json_keys": list(self.json_keys) if self.mode == "json" else []}

    def parse(self, text: str, name: str) -> tuple[str, ...]:
        """Return the captions in the content of a file.

        Missing, null and empty values of a .json are skipped if another key has a caption.

        Raises:
            DataError: the file cannot be read, or has no caption.
        """
        if self.mode == "json":
            return self._parse_json(text, name)
        lines = text.splitlines() if self.mode == "txt_lines" else [text]
        captions = tuple(line.strip() for line in lines if line.strip())
        if not captions:
            raise DataError(f"{name}: the caption (.txt) is empty", "no caption")
        return require_usable(captions, name)

    def _parse_json(self, text: str, name: str) -> tuple[str, ...]:
        try:
            facts = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}: .json cannot be read: {error}", "damaged JSON") from None
        if not isinstance(facts, dict):
            raise DataError(f"{name}: .json contains a {type(facts).__name__}; expected an object", "damaged JSON")
        return collect_captions(facts, self.json_keys, name, "key", "damaged JSON", " in the .json")


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
            f"{name}: no caption under {', '.join(map(repr, keys))}{where}; its {what}s: {quote_names(values)}",
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
