"""Captions of a sample: from its .txt or .json, or from the values of a table."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from vqclip.errors import DataError, quote_names

MAX_CAPTION = 65_536
"""Characters of a caption at most. The whole caption is tokenized before it is cut to the context length, so a few
gigantic captions would delay every process."""
TEXT_KEYS = ("raw", "caption", "captions", "text", "value", "content", "sentence", "sentences", "title")
"""Keys of an object that is given instead of a caption."""
Weighted = Annotated[
    dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]],
    Field(min_length=1),
    AfterValidator(lambda given: dict(sorted(given.items()))),  # caches number the keys, however they were written
]
"""Key or column of captions → its weight among those of a sample, when one is drawn."""
_ANSWERERS = ("gpt", "assistant", "model", "bot", "chatbot")
_MAX_DEPTH = 8


@dataclass(frozen=True)
class CaptionFiles:
    """Captions in the .txt or .json of a sample, in a shard or beside an image."""

    mode: Literal["txt", "txt_lines", "json"]
    """See `vqclip.data.CaptionShardsConfig.captions`."""
    json_keys: tuple[str, ...] = ()
    """Keys of the .json with captions; see `collect_captions`."""
    ending: str = ""
    """Ending of the file's name beside an image, such as .txt; see `caption_path`."""

    @property
    def kind(self) -> Literal["txt", "json"]:
        """Ending of the file's name."""
        return "json" if self.mode == "json" else "txt"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Settings that change captions."""
        return {"captions": self.mode, "json_keys": list(self.json_keys) if self.mode == "json" else []}

    def parse(self, data: bytes, name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the captions in the content of a file, and the number of the key of each in a .json.

        Missing, null and empty values of a .json are skipped if another key has a caption.

        Raises:
            DataError: the file cannot be read, or has no caption.
        """
        text = decode_text(data, name, self.kind)
        if self.mode == "json":
            try:
                facts = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{name}: .json cannot be read: {error}", "damaged JSON") from None
            if not isinstance(facts, dict):
                what = f".json contains a {type(facts).__name__}; expected an object"
                raise DataError(f"{name}: {what}", "damaged JSON")
            return collect_captions(facts, self.json_keys, f"{name}: .json", "key", "damaged JSON")
        return require_usable(text.splitlines() if self.mode == "txt_lines" else [text], name, "the caption (.txt)"), ()


def decode_text(data: bytes, name: str, ending: str) -> str:
    """Return the content of a file without white space or a byte order mark around it; raises DataError: not UTF-8."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: .{ending} is not UTF-8: {error.reason} at byte {error.start}", "not UTF-8") from None


def caption_path(image: str, ending: str) -> str:
    """Return the file of an image's captions: ``a/0.txt`` for ``a/0.jpg``; of ``captions/.txt``, ``captions/0.txt``."""
    folder, _, ending = ending.rpartition("/")
    stem = os.path.splitext(image)[0]
    return f"{folder}/{stem.partition('/')[2] or stem}{ending}" if folder else f"{stem}{ending}"


def collect_captions(
    values: Mapping[str, Any], keys: Sequence[str], name: str, what: str, kind: str
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the captions under some keys of a mapping, and the number of the key of each.

    See `find_texts` for what they may be. Missing, null and empty values are skipped if another key has a caption.

    Args:
        values: the row of a table, or the content of a .json.
        keys: keys of the captions; see `look_up`.
        name: name of the sample, for messages.
        what: "key" or "column", for messages.
        kind: kind of the error if a value is no text.

    Raises:
        DataError: a value is no text, too long, or there is no caption.
    """
    try:
        captions, numbers = find_captions(values, keys, what)
    except ValueError as error:
        raise DataError(f"{name}: {error}", kind) from None
    if not captions:
        shown = f"no caption under {', '.join(map(repr, keys))}; its {what}s: {quote_names(values)}"
        raise DataError(f"{name}: {shown}", "no caption")
    return require_usable(captions, name), tuple(numbers)


def find_captions(values: Mapping[str, Any], keys: Sequence[str], what: str = "column") -> tuple[list[str], list[int]]:
    """Return the texts under some keys of a mapping, and the number of the key of each.

    Raises:
        ValueError: a value is no text, see `find_texts`.
    """
    captions: list[str] = []
    numbers: list[int] = []
    for number, key in enumerate(keys):
        try:
            captions += find_texts(look_up(values, key))
        except ValueError as error:
            raise ValueError(f"{what} {key!r} contains {error}; expected text or a list of texts") from None
        numbers += [number] * (len(captions) - len(numbers))
    return captions, numbers


def look_up(values: Mapping[str, Any], key: str) -> Any:
    """Return the value under a key, or under one such as ``meta.caption`` in an object; None if there is none."""
    if key in values or "." not in key:
        return values.get(key)
    first, _, rest = key.partition(".")
    inside = values.get(first)
    return look_up(inside, rest) if isinstance(inside, Mapping) else None


def find_texts(value: object, depth: int = 0) -> list[str]:
    """Return the texts in a value, without blanks around them; nulls, NaN and empty ones are skipped.

    The value is a text, an object with a text, such as Karpathy's ``{"raw": ...}``, or a list of these. Of a
    conversation, as LLaVA has it, the first answer is taken.

    Raises:
        ValueError: it is something else, which the message describes.
    """
    if isinstance(value, str):
        return [text] if (text := value.removeprefix("\ufeff").strip()) else []
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return []
    if isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        return [text for each in _without_questions(value) for text in find_texts(each, depth + 1)]
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        if (key := next((key for key in TEXT_KEYS if key in value), None)) is not None:
            return find_texts(value[key], depth + 1)
        raise ValueError(f"an object with the keys {quote_names(value)}")
    raise ValueError(f"a {type(value).__name__}")


def _without_questions(values: Sequence[object]) -> Sequence[object]:
    """Return the first answer of a conversation; other lists as they are."""
    speakers = [each.get("from", each.get("role")) if isinstance(each, Mapping) else None for each in values]
    if not speakers or None in speakers:
        return values
    return [turn for turn, speaker in zip(values, speakers, strict=True) if speaker in _ANSWERERS][:1]


def require_usable(texts: Iterable[str], name: str, what: str = "the caption") -> tuple[str, ...]:
    """Return the captions of a sample, without blanks around them and without empty ones.

    Raises:
        DataError: none is left, or one is too long or not UTF-8.
    """
    captions = tuple(stripped for text in texts if (stripped := text.strip()))
    if not captions:
        raise DataError(f"{name}: {what} is empty", "no caption")
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
