"""open_clip's byte-pair vocabulary."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vqclip.errors import ShapeError
from vqclip.nn.inputs import require_captions
from vqclip.towers.vocabulary import MAX_CONTEXT

_CACHED_WORDS = 100_000
_LONG_WORD = 64
"""Longer words, in characters, are not cached."""
_SIZE = 49408
_END = "</w>"
"""End of the last token of a word."""
_END_OF_TEXT = 49407


class BPE:
    """open_clip's byte-pair vocabulary at a fixed context length.

    Contains only the length, so that it is cheap to send to data-loader workers; each process loads the tables once.

    Args:
        context_length: N, token positions per caption.
    """

    size = _SIZE
    end_of_text = _END_OF_TEXT
    """Number of the end mark."""

    def __init__(self, context_length: int):
        self.context_length = context_length

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Map B captions to ``(B, N)`` int64, start and end marks included, padded with 0.

        Raises:
            ShapeError: not a list or tuple of str.
        """
        return self.with_lengths(captions)[0]

    def with_lengths(self, captions: Sequence[str]) -> tuple[Tensor, list[int]]:
        """Tokenize captions as `__call__` does, and return the length of each before it was cut.

        Lengths are in tokens, start and end marks included, and at most `MAX_CONTEXT` + 1.
        """
        bpe = _bpe()
        rows = [[bpe.sot_token_id, *bpe.encode(text), bpe.eot_token_id] for text in require_captions(captions)]
        tokens = torch.zeros(len(rows), self.context_length, dtype=torch.int64)
        for row, numbers in zip(tokens, rows, strict=True):
            if len(numbers) > self.context_length:
                numbers = [*numbers[: self.context_length - 1], bpe.eot_token_id]
            row[: len(numbers)] = torch.tensor(numbers)
        return tokens, [min(len(numbers), MAX_CONTEXT + 1) for numbers in rows]

    def pieces(self, caption: str) -> tuple[list[str], int]:
        """Return the text of each token of a caption, and how many of them are read; see `Vocabulary.pieces`."""
        bpe, decoder = _bpe(), codecs.getincrementaldecoder("utf-8")("replace")
        texts = [
            decoder.decode(bytes(bpe.byte_decoder[character] for character in token.removesuffix(_END)))
            + " " * token.endswith(_END)
            for token in map(bpe.decoder.__getitem__, bpe.encode(caption))
        ]
        return texts, self.context_length - 2

    def mask(self, tokens: Tensor) -> Tensor:
        """Return ``(B, N)`` bool, True up to and including the first end mark; a row without one has no real token.

        The padding's number 0 is ambiguous: it is also the number of "!" inside a word.
        """
        is_end = tokens == self.end_of_text
        end = is_end.int().argmax(dim=1, keepdim=True)  # the first of equals
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return (positions <= end) & is_end.any(dim=1, keepdim=True)

    def require_rows(self, tokens: Tensor) -> None:
        """Check that each row is a caption.

        Raises:
            ShapeError: a number outside the vocabulary, or a row without end mark.
        """
        for number in tokens[(tokens < 0) | (tokens >= self.size)].tolist():
            raise ShapeError(f"tokens: got the number {number}, expected 0 to {self.size - 1}")
        for row in (tokens != self.end_of_text).all(dim=1).nonzero().flatten().tolist():
            raise ShapeError(
                f"tokens[{row}]: got a row without the end mark {self.end_of_text}, expected one after the last token; "
                "tokenizer.preprocess makes such rows from captions"
            )

    def files(self) -> dict[str, bytes]:
        """Return no files: open_clip contains the tables."""
        return {}

    def describe(self) -> str:
        """Return how rows are made."""
        return "open_clip's byte pairs: start mark, tokens, end mark, then zeros up to the context length"


class _Bounded(dict[str, str]):
    """A cache that is cleared when it is full: open_clip's own cache grows without limit."""

    def __setitem__(self, word: str, pairs: str) -> None:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        if len(word) <= _LONG_WORD:
            super().__setitem__(word, pairs)


@lru_cache(maxsize=1)
def _bpe() -> Any:
    """Return open_clip's tokenizer, changed so that ``<end_of_text>`` in a caption is ordinary text."""
    from open_clip import tokenizer as theirs

    tokenizer = theirs.SimpleTokenizer()
    # Its pattern matches marks in captions first. Without that alternative their letters and brackets are split like
    # other text, and no caption, also not `&lt;end_of_text&gt;`, gives the number of a mark.
    marks = "|".join(tokenizer.decoder[number] for number in tokenizer.all_special_ids) + "|"
    pattern: str = tokenizer.pat.pattern
    if not pattern.startswith(marks):
        raise RuntimeError(f"open_clip's tokenizer changed: expected a pattern that starts with {marks}, got {pattern}")
    if (tokenizer.vocab_size, tokenizer.eot_token_id) != (_SIZE, _END_OF_TEXT):
        raise RuntimeError(f"open_clip's vocabulary changed: expected {_SIZE} tokens, got {tokenizer.vocab_size}")
    regex = theirs.re  # the package of that name: Python's own does not know \p{L}
    tokenizer.pat = regex.compile(pattern.removeprefix(marks), regex.IGNORECASE)
    tokenizer.cache = _Bounded()
    return tokenizer
