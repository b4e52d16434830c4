"""Vocabularies: captions to rows of token numbers, and which numbers of a row are padding."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vqclip.errors import ConfigError, ShapeError, import_extra
from vqclip.nn.inputs import require_captions

MAX_CONTEXT = 4096
"""Largest context length."""
VOCABULARY_FILE = "tokenizer.json"
"""Fast tokenizer of a model of transformers."""
_CACHED_WORDS = 100_000
_LONG_WORD = 64
"""Longer words, in characters, are not cached."""
_END = "</w>"
"""End of the last token of a word."""


class Vocabulary(ABC):
    """Maps captions to token numbers. Cheap to send to the workers of a data loader.

    Which numbers of a row are padding never depends on the text of a caption: a caption cannot write a mark.

    Attributes:
        context_length: N, token positions per caption; captions are cut or padded to it.
        size: token numbers are below it.
        before: marks before the tokens of a caption.
        after: marks after them.
        padding: number at the positions after the last token.
    """

    context_length: int
    size: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    padding: int
    description: str
    """Description of how rows are made, for implementations in other languages."""
    row_error: str
    """Message on a row that `__call__` never makes: what was got, and what is expected."""

    def __init__(self, context_length: int):
        self.context_length = context_length

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Map B captions to ``(B, N)`` int64, marks included, with padding after the last token.

        Raises:
            ShapeError: not a list or tuple of str.
        """
        return self.with_lengths(captions)[0]

    def with_lengths(self, captions: Sequence[str]) -> tuple[Tensor, list[int]]:
        """Tokenize captions as `__call__` does, and return the length of each before it was cut.

        Lengths are in tokens, marks included, and at most `MAX_CONTEXT` + 1.
        """
        found = [self._numbers(text) for text in require_captions(captions)]
        marks = len(self.before) + len(self.after)
        tokens = torch.full((len(found), self.context_length), self.padding, dtype=torch.int64)
        for row, numbers in zip(tokens, found, strict=True):
            whole = [*self.before, *numbers[: self.context_length - marks], *self.after]
            row[: len(whole)] = torch.tensor(whole)
        return tokens, [min(marks + len(numbers), MAX_CONTEXT + 1) for numbers in found]

    @abstractmethod
    def _numbers(self, caption: str) -> list[int]:
        """Return the numbers of the tokens of a caption, without marks."""

    def pieces(self, caption: str) -> tuple[list[str], int]:
        """Return the text of each token of a caption, and how many of them are read before the cut.

        Marks are left out. A token that ends inside a character has an empty text, and the next one the character.
        """
        return self._texts(caption), self.context_length - len(self.before) - len(self.after)

    @abstractmethod
    def _texts(self, caption: str) -> list[str]:
        """Return the text of each token; see `pieces`."""

    def mask(self, tokens: Tensor) -> Tensor:
        """Return bool of the shape ``(B, N)`` of ``tokens``, True at real tokens, which precede all padding."""
        return tokens != self.padding

    def require_rows(self, tokens: Tensor) -> None:
        """Check that each row is a caption.

        Raises:
            ShapeError: a number outside the vocabulary, or a row that `__call__` does not make.
        """
        least = min(0, self.padding)
        for number in tokens[(tokens < least) | (tokens >= self.size)].tolist():
            raise ShapeError(f"tokens: got the number {number}, expected {least} to {self.size - 1}")
        for row in (~self._are_captions(tokens)).nonzero().flatten().tolist():
            raise ShapeError(f"tokens[{row}]: {self.row_error}; tokenizer.preprocess makes such rows from captions")

    @abstractmethod
    def _are_captions(self, tokens: Tensor) -> Tensor:
        """Return ``(B,)`` bool, True at rows ``(B, N)`` of valid numbers that `__call__` can make."""

    def files(self) -> Mapping[str, bytes]:
        """Return the files, by name, that a tokenizer folder needs to make the vocabulary again."""
        return {}


class BPE(Vocabulary):
    """open_clip's byte-pair vocabulary at a fixed context length; rows are padded with 0.

    Contains only the length, so that it is cheap to send to data-loader workers; each process loads the tables once.

    Args:
        context_length: N, token positions per caption.
    """

    size, end_of_text = 49408, 49407
    """Number of tokens, and number of the end mark."""
    before, after, padding = (49406,), (49407,), 0
    description = "open_clip's byte pairs: start mark, tokens, end mark, then zeros up to the context length"
    row_error = f"got a row without the end mark {end_of_text}, expected one after the last token"

    def _numbers(self, caption: str) -> list[int]:
        return list(_bpe().encode(caption))

    def _texts(self, caption: str) -> list[str]:
        bpe, decoder = _bpe(), codecs.getincrementaldecoder("utf-8")("replace")
        return [
            decoder.decode(bytes(bpe.byte_decoder[character] for character in token.removesuffix(_END)))
            + " " * token.endswith(_END)
            for token in map(bpe.decoder.__getitem__, bpe.encode(caption))
        ]

    def mask(self, tokens: Tensor) -> Tensor:
        """Return ``(B, N)`` bool, True up to and including the first end mark; a row without one has no real token.

        The padding's number 0 is ambiguous: it is also the number of "!" inside a word.
        """
        is_end = tokens == self.end_of_text
        end = is_end.int().argmax(dim=1, keepdim=True)  # the first of equals
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return (positions <= end) & is_end.any(dim=1, keepdim=True)

    def _are_captions(self, tokens: Tensor) -> Tensor:
        return (tokens == self.end_of_text).any(dim=1)


class Bytes(Vocabulary):
    """The bytes of a caption in UTF-8, in lower case: a vocabulary of 258 tokens, for small models and any language.

    As in ByT5 (Xue et al. 2021, https://arxiv.org/abs/2105.13626). Token 0 is padding, 1 the end mark, 2 + b
    byte b.

    Args:
        context_length: N, positions per caption; one is the end mark.
    """

    size, before, after, padding = 258, (), (1,), 0
    description = "bytes of the caption in lower case plus 2, end mark 1, then zeros up to the context length"
    row_error = "expected bytes, the end mark 1, and zeros"

    def _numbers(self, caption: str) -> list[int]:
        text = " ".join(caption.lower().split())
        return [2 + byte for byte in text.encode("utf-8", "replace")]

    def _texts(self, caption: str) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(bytes([number - 2])) for number in self._numbers(caption)]

    def _are_captions(self, tokens: Tensor) -> Tensor:
        ends, lengths = tokens == 1, (tokens != 0).sum(dim=1)
        return (ends.sum(dim=1) == 1) & (ends.int().argmax(dim=1) == lengths - 1)


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
    if (tokenizer.vocab_size, tokenizer.eot_token_id) != (BPE.size, BPE.end_of_text):
        raise RuntimeError(f"open_clip's vocabulary changed: expected {BPE.size} tokens, got {tokenizer.vocab_size}")
    regex = theirs.re  # the package of that name: Python's own does not know \p{L}
    tokenizer.pat = regex.compile(pattern.removeprefix(marks), regex.IGNORECASE)
    tokenizer.cache = _Bounded()
    return tokenizer


class FastVocabulary(Vocabulary):
    """A fast tokenizer of transformers at a fixed context length; rows are padded with -1.

    Marks such as ``[SEP]`` or ``</s>`` that a caption writes are ordinary text. It is pickled as the file.

    Args:
        content: of ``tokenizer.json``.
        context_length: N, token positions per caption, marks included.

    Raises:
        ConfigError: a damaged file, or a tokenizer that adds no mark, so that an empty caption would have no token.
    """

    padding = -1  # unlike a tokenizer's own padding, no caption can contain it
    description = (
        f"{VOCABULARY_FILE} of the tokenizer folder, with its marks and without its own cut and padding (special "
        "tokens in a caption are ordinary text), then -1 up to the context length"
    )
    row_error = "got a row that is empty or has a token after padding (-1), expected tokens, then padding"

    def __init__(self, content: bytes, context_length: int):
        super().__init__(context_length)
        self._content = content
        tokenizers = import_extra("tokenizers", "transformers", "tower.kind: transformers ")
        try:
            self._tokenizer = tokenizer = tokenizers.Tokenizer.from_str(content.decode())
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
                f"tower.name: {VOCABULARY_FILE} cannot be read: {type(error).__name__}: {error}; expected the file "
                "that a fast tokenizer's save_pretrained writes"
            ) from error
        split = next((n for n in range(len(marks) + 1) if [*marks[:n], *bare, *marks[n:]] == whole), None)
        if split is None or not marks:
            raise ConfigError(
                f"tower.name: {VOCABULARY_FILE} does not put fixed marks such as [CLS] or </s> around a text, so that "
                "an empty caption would have no token; expected the tokenizer of an encoder, such as that of BERT"
            )
        if context_length <= len(marks):
            raise ConfigError(
                f"tower.context_length: got {context_length}; expected more than the {len(marks)} marks that the "
                "tokenizer adds to each caption"
            )
        self.before, self.after = tuple(marks[:split]), tuple(marks[split:])
        self.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        model = json.loads(content)["model"]
        name = model.get("unk_token")  # sentence pieces have its number in place of its text
        unknown = model.get("unk_id") if name is None else tokenizer.token_to_id(name)
        self._unknown: int | None = None if unknown in marks else unknown  # CLIP's unknown token is its end mark
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._forbidden = {*special, *marks} - {self._unknown}

    def __reduce__(self) -> tuple[Any, ...]:
        return FastVocabulary, (self._content, self.context_length)

    def _tokens(self, caption: str) -> list[tuple[int, str]]:
        """Return number and characters of each token; those with the numbers of marks become the unknown token.

        They are removed if there is none. A vocabulary of sentence pieces has the marks among its pieces, so that
        `encode_special_tokens` is not enough.
        """
        plain = caption.encode(errors="replace").decode()  # without lone surrogates, which JSON can contain
        encoded, end = self._tokenizer.encode(plain, add_special_tokens=False), 0
        found: list[tuple[int, str]] = []
        for number, (_, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            if number not in self._forbidden and number != self._unknown:
                found.append((number, plain[end:stop]))
            elif self._unknown is not None:
                found.append((self._unknown, f"{self._tokenizer.id_to_token(self._unknown)} "))
            end = max(end, stop)
        return found

    def _numbers(self, caption: str) -> list[int]:
        return [number for number, _ in self._tokens(caption)]

    def _texts(self, caption: str) -> list[str]:
        return [text for _, text in self._tokens(caption)]

    def _are_captions(self, tokens: Tensor) -> Tensor:
        real = self.mask(tokens)
        return real[:, 0] & (real[:, :-1] | ~real[:, 1:]).all(dim=1)

    def files(self) -> dict[str, bytes]:
        """Return ``tokenizer.json``, byte for byte."""
        return {VOCABULARY_FILE: self._content}


class CaptionLengths(Counter[int]):
    """Counts of captions by their length in tokens, see `Vocabulary.with_lengths`."""

    def count_cut(self, context_length: int) -> int:
        """Return the number of captions that are longer than ``context_length``."""
        return sum(count for length, count in self.items() if length > context_length)

    def length_for(self, percent: int) -> int:
        """Return the smallest context length that holds ``percent`` % of captions without a cut."""
        held = 0
        for length in sorted(self):
            held += self[length]
            if 100 * held >= percent * self.total():
                return length
        return 0

    def describe_cuts(self, context_length: int, key: str = "context_length") -> str | None:
        """Describe how many captions are cut and which lengths would hold more of them; None if none is cut."""
        cut, total = self.count_cut(context_length), self.total()
        if not cut:
            return None
        wanted = {self.length_for(percent): f"{percent} %" for percent in (95, 99, 100)}
        better = [f"{length} would hold {share}" for length, share in wanted.items() if length > context_length]
        better = [each.replace(f"{MAX_CONTEXT + 1}", f"more than {MAX_CONTEXT}") for each in better[:2]]
        return (
            f"{100 * cut / total:.1f} % of captions ({cut:,} of {total:,}) are longer than {key} {context_length} "
            f"and were cut; {' and '.join(better)} of them"
        )
