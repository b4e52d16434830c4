from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tokenizer.test_base import built
from vqclip.errors import ShapeError


def test_an_exclamation_mark_inside_a_word_is_no_padding():
    tokenizer = built().text.eval()
    ids = tokenizer.encode(["#!/bin a", "a"])
    assert (ids[..., 0] >= 0).sum(1).tolist() == [7, 3]


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ("a cat", r"^captions: got 'a cat' \(str\), expected a list of str with one caption: \[caption\]"),
        (b"a cat", r"^captions: got b'a cat' \(bytes\), expected a list of str$"),
        (None, "^captions: got None"),
        (["a", 3], r"^captions\[1\]: got 3 \(int\), expected a str"),
        ([None], r"^captions\[0\]: got None"),
        ([b"a"], r"^captions\[0\]: got b'a' \(bytes\), expected a str; bytes become one by .decode"),
        (np.zeros((1, 12), np.int64), r"^captions: got a ndarray of shape \(1, 12\) and dtype int64"),
        ((caption for caption in ["a"]), "^captions: got <generator"),
        (torch.full((1, 12), 49408), r"^tokens: got the number 49408, expected 0 to 49407"),
        (torch.full((1, 12), -1), r"^tokens: got the number -1"),
        (
            torch.tensor([[49406, 49407] + [0] * 10, [49406] + [5] * 11]),
            r"^tokens\[1\]: got a row without the end mark",
        ),
        (torch.zeros(1, 12), r"^tokens: got shape \(1, 12\) and dtype torch.float32, expected \(B, 1 to 12\) int64"),
    ],
)
def test_what_is_no_caption_is_refused(captions, message):
    with pytest.raises(ShapeError, match=message):
        built().text.encode(captions)
