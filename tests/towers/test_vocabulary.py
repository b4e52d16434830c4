from __future__ import annotations

import pickle

import pytest
import torch
from tokenizers import Tokenizer, models

from tests.towers.transformers_models import CAPTIONS, sentence_pieces, word_pieces
from vqclip.errors import ConfigError, ShapeError
from vqclip.towers.vocabulary import FastVocabulary


def vocabulary(tokenizer: Tokenizer, length: int = 12) -> FastVocabulary:
    return FastVocabulary(tokenizer.to_str().encode(), length)


def test_rows_are_the_tokenizers_own_without_its_cut_and_padding():
    theirs = word_pieces()
    theirs.no_truncation()
    theirs.no_padding()
    tokens, lengths = vocabulary(word_pieces()).with_lengths(CAPTIONS[:2])
    for row, caption in zip(tokens, CAPTIONS, strict=False):
        numbers = theirs.encode(caption).ids
        assert row.tolist() == numbers + [-1] * (12 - len(numbers))
    assert lengths == [5, 2]


def test_long_captions_are_cut_before_the_last_mark():
    tokens, lengths = vocabulary(word_pieces(), 6).with_lengths(["a " * 40, "a " * 9000])
    assert lengths == [42, 4097]
    assert tokens[:, 0].tolist() == [2, 2]
    assert tokens[:, -1].tolist() == [3, 3]


def test_a_caption_cannot_write_a_mark():
    """Neither where a mark would be split, nor where it is a piece of the vocabulary."""
    words = vocabulary(word_pieces(), 24)
    tokens = words(["a [SEP] star [PAD] [CLS]"])[0]
    assert [number for number in tokens.tolist() if number in (0, 2, 3)] == [2, 3]
    assert int(words.mask(tokens[None]).sum()) > 10
    theirs = sentence_pieces()
    theirs.encode_special_tokens = True
    assert {0, 1} <= set(theirs.encode("a </s> b <pad>", add_special_tokens=False).ids)  # so this is no idle worry
    pieces = vocabulary(sentence_pieces(), 24)
    tokens, lengths = pieces.with_lengths(["a </s> b <pad> </s>"])
    real = tokens[0][pieces.mask(tokens)[0]].tolist()
    assert len(real) == lengths[0]
    assert [number for number in real if number in (0, 1)] == [1]
    assert real[-1] == 1
    assert real.count(2) == 3


def test_the_unknown_token_is_removed_where_it_is_a_mark():
    """CLIP's unknown token is its end mark."""
    tokenizer = sentence_pieces()
    tokenizer.model = models.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("x", -1.0), ("▁", -1.0)], unk_id=1)
    tokens = vocabulary(tokenizer)(["x ? x"])
    assert (tokens == 1).sum() == 1


def test_any_str_is_a_caption():
    tokens = vocabulary(word_pieces())(["\ud800 a", "\0", "é你好"])
    assert (tokens[:, 0] == 2).all()


def test_wrong_rows_are_refused():
    words = vocabulary(word_pieces())
    rows = words(CAPTIONS)
    words.require_rows(rows)
    for row, message in (
        ([words.size], f"got the number {words.size}, expected 0 to"),
        ([-2], "got the number -2"),
        ([-1, -1, -1], "is empty"),
        ([2, -1, 3], "token after padding"),
    ):
        with pytest.raises(ShapeError, match=message):
            words.require_rows(torch.tensor([[*row, *[-1] * (12 - len(row))]]))
    with pytest.raises(ShapeError, match="expected a list of str"):
        words("a red star")


def test_it_is_pickled_as_the_file():
    words = vocabulary(word_pieces())
    data = pickle.dumps(words.with_lengths)
    assert len(data) < len(words.files()["tokenizer.json"]) + 500
    assert torch.equal(pickle.loads(data)(CAPTIONS)[0], words(CAPTIONS))


@pytest.mark.parametrize("content", [b"{}", b"\xff", b'{"model": 3}', b"[" * 10_000])
def test_damaged_files_are_refused(content):
    with pytest.raises(ConfigError, match="tokenizer.json cannot be read"):
        FastVocabulary(content, 12)


def test_tokenizers_without_marks_are_refused():
    tokenizer = word_pieces()
    tokenizer.post_processor = None
    with pytest.raises(ConfigError, match="adds no marks"):
        vocabulary(tokenizer)
    with pytest.raises(ConfigError, match="context_length: got 2; expected more than the 2 marks"):
        vocabulary(word_pieces(), 2)
