"""The vocabulary of a fast tokenizer, from its ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vqclip.errors import ConfigError, ShapeError
from vqclip.nn.inputs import require_captions
from vqclip.towers.huggingface.folder import VOCABULARY_FILE
from vqclip.towers.huggingface.library import require
from vqclip.towers.vocabulary import MAX_CONTEXT

PADDING = -1
"""Number of a position without a token: unlike a tokenizer's own padding, no caption can contain it."""


class FastVocabulary:
    """A fast tokenizer at a fixed context length; rows are padded with -1.

    Marks such as ``[SEP]`` or ``</s>`` that a caption writes are ordinary text.

    Args:
        content: of ``tokenizer.json``.
        context_length: N, token positions per caption, marks included.

    Raises:
        ConfigError: a damaged file, or a tokenizer that adds no mark, so that an empty caption would have no token.
    """

    def __init__(self, content: bytes, context_length: int):
        self._content = content
        self.context_length = context_length
        table = _table(content)
        marks = len(table.before) + len(table.after)
        self.size = table.size
        if marks == 0:
            raise ConfigError(
                f"tower.name: {VOCABULARY_FILE} adds no marks such as [CLS] or </s>, so that an empty caption would "
                "have no token; expected the tokenizer of an encoder"
            )
        if context_length <= marks:
            raise ConfigError(
                f"tower.context_length: got {context_length}; expected more than the {marks} marks that the tokenizer "
                "adds to each caption"
            )

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Map B captions to ``(B, N)`` int64, marks included, padded with -1.

        Raises:
            ShapeError: not a list or tuple of str.
        """
        return self.with_lengths(captions)[0]

    def with_lengths(self, captions: Sequence[str]) -> tuple[Tensor, list[int]]:
        """Tokenize captions as `__call__` does, and return the length of each before it was cut.

        Lengths are in tokens, marks included, and at most `MAX_CONTEXT` + 1.
        """
        table = _table(self._content)
        marks = len(table.before) + len(table.after)
        rows = [table.numbers(text) for text in require_captions(captions)]
        tokens = torch.full((len(rows), self.context_length), PADDING, dtype=torch.int64)
        for row, numbers in zip(tokens, rows, strict=True):
            whole = [*table.before, *numbers[: self.context_length - marks], *table.after]
            row[: len(whole)] = torch.tensor(whole)
        return tokens, [min(marks + len(numbers), MAX_CONTEXT + 1) for numbers in rows]

    def pieces(self, caption: str) -> tuple[list[str], int]:
        """Return the text of each token of a caption, and how many of them are read; see `Vocabulary.pieces`."""
        table = _table(self._content)
        return table.pieces(caption), self.context_length - len(table.before) - len(table.after)

    def mask(self, tokens: Tensor) -> Tensor:
        """Return ``(B, N)`` bool, True where there is a token."""
        return tokens >= 0

    def require_rows(self, tokens: Tensor) -> None:
        """Check that each row is a caption.

        Raises:
            ShapeError: a number outside the vocabulary, a row without tokens, or a token after padding.
        """
        for number in tokens[(tokens < PADDING) | (tokens >= self.size)].tolist():
            raise ShapeError(f"tokens: got the number {number}, expected 0 to {self.size - 1}, or -1 at padding")
        real = self.mask(tokens)
        wrong = ~real[:, 0] | (real[:, 1:] & ~real[:, :-1]).any(dim=1)
        for row in wrong.nonzero().flatten().tolist():
            raise ShapeError(
                f"tokens[{row}]: got a row that is empty or has a token after padding (-1), expected tokens, then "
                "padding; tokenizer.preprocess makes such rows from captions"
            )

    def files(self) -> dict[str, bytes]:
        """Return ``tokenizer.json``, byte for byte."""
        return {VOCABULARY_FILE: self._content}

    def describe(self) -> str:
        """Return how rows are made."""
        return (
            f"{VOCABULARY_FILE} of the tokenizer folder, with its marks and without its own cut and padding (special "
            "tokens in a caption are ordinary text), then -1 up to the context length"
        )


class _Table(NamedTuple):
    """A parsed tokenizer."""

    tokenizer: Any
    before: tuple[int, ...]
    """Marks before the tokens of a caption."""
    after: tuple[int, ...]
    """Marks after them."""
    size: int
    """Token numbers are below it."""
    marks: frozenset[int]
    """Special tokens that no caption may contain."""
    unknown: int | None
    """Token for text that the vocabulary lacks."""

    def numbers(self, text: str) -> list[int]:
        """Return the tokens of a caption, without marks.

        A vocabulary of sentence pieces has the marks among its pieces, so that `encode_special_tokens` is not enough.
        """
        found: list[int] = self._encode(text).ids
        if self.marks.isdisjoint(found):
            return found
        plain = [self.unknown if number in self.marks else number for number in found]
        return [number for number in plain if number is not None]

    def pieces(self, text: str) -> list[str]:
        """Return the text of each token of `numbers`: the characters it was made from, or the unknown token."""
        encoded, found, end = self._encode(text), [], 0
        for number, (_, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            if number in (*self.marks, self.unknown):
                found += [] if self.unknown is None else [f"{self.tokenizer.id_to_token(self.unknown)} "]
            else:
                found.append(text[end:stop])
            end = max(end, stop)
        return found

    def _encode(self, text: str) -> Any:
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, which JSON can contain
            text = text.encode(errors="replace").decode()
        return self.tokenizer.encode(text, add_special_tokens=False)


@lru_cache(maxsize=4)
def _table(content: bytes) -> _Table:
    """Parse a ``tokenizer.json``, once in each process."""
    tokenizers = require("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        marks: list[int] = tokenizer.encode("").ids
        bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
        whole: list[int] = tokenizer.encode("a").ids
    except BaseException as error:  # the library's own errors are plain Exceptions, its panics BaseExceptions
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise ConfigError(
            f"tower.name: {VOCABULARY_FILE} cannot be read: {type(error).__name__}: {error}; expected the file that a "
            "fast tokenizer's save_pretrained writes"
        ) from error
    splits = [n for n in range(len(marks) + 1) if [*marks[:n], *bare, *marks[n:]] == whole]
    if not splits:
        raise ConfigError(
            f"tower.name: the post-processor in {VOCABULARY_FILE} does not put fixed marks around a text; expected the "
            "tokenizer of an encoder, such as that of BERT or RoBERTa"
        )
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    unknown = _find_unknown(tokenizer, json.loads(content)["model"])
    if unknown in marks:  # CLIP's unknown token is its end mark
        unknown = None
    forbidden = frozenset({*special, *marks} - {unknown})
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    return _Table(tokenizer, tuple(marks[: splits[0]]), tuple(marks[splits[0] :]), size, forbidden, unknown)


def _find_unknown(tokenizer: Any, model: dict[str, Any]) -> int | None:
    """Return the number of the unknown token, which sentence pieces give as a number and others as text."""
    token = model.get("unk_token")
    found = model.get("unk_id") if token is None else tokenizer.token_to_id(token)
    return found if isinstance(found, int) else None
