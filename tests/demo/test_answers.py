from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.data.making import encode, pixels
from tests.search.making import built
from vqclip.demo.answers import MAX_CLASSES, Answers, cosine, split_classes
from vqclip.errors import DataError

FILE = encode(pixels(0), "PNG")


@pytest.fixture(scope="module")
def answers():
    model = built()
    return Answers(model.image, model.text, 14.0)


def test_an_image_has_the_ids_and_bits_of_the_tokenizer(answers):
    answer = answers.read_image(FILE)
    ids = answers.image.encode(answer.pixels[None])
    assert json.loads(answer.coded.to_json()) == ids[0].tolist()
    assert answer.bits == answers.image.bits_per_sample == 48
    assert (answer.size, answer.file_bytes) == ((24, 20), len(FILE))
    torch.testing.assert_close(answer.coded.codes_only, answers.image.embed(ids)[0])
    torch.testing.assert_close(answer.coded.continuous, answers.image.continuous(answer.pixels[None])[0])


def test_a_caption_has_ids_for_its_tokens_alone(answers):
    answer = answers.read_caption("a red apple")
    assert answer.pieces == ("<start>", "a ", "red ", "apple ", "<end>")
    assert answer.coded.ids.shape == (5, 2)
    assert (answer.bits, answer.bytes, answer.left_out) == (60, 11, 0)
    torch.testing.assert_close(answer.coded.codes_only, answers.text.embed(answers.text.encode(["a red apple"]))[0])
    assert answers.read_caption("one two three " * 9).left_out == 2 + 27 - 12


def test_probabilities_are_the_softmax_of_cosines_times_the_scale(answers):
    code = answers.read_image(FILE).coded
    scores = answers.classify(code, ["cat", "dog", "car"], "a {c}")
    prompts = answers.text.embed(answers.text.encode(["a cat", "a dog", "a car"]))
    expected = torch.softmax(answers.scale * (prompts @ code.codes_only), dim=0).tolist()
    assert {score.name: score.codes_only for score in scores} == pytest.approx(
        dict(zip(["cat", "dog", "car"], expected, strict=True)), abs=1e-5
    )
    assert [score.codes_only for score in scores] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    assert sum(score.continuous for score in scores) == pytest.approx(1)


def test_a_sample_is_nearest_to_itself(answers):
    code = answers.read_caption("a red apple").coded
    assert cosine(code, code) == pytest.approx((1, 1))


@pytest.mark.parametrize(
    ("text", "names"),
    [("cat, dog", ["cat", "dog"]), ("cat, wild\n dog \n\n", ["cat, wild", "dog"]), (" , ", []), ("cat,", ["cat"])],
)
def test_classes_are_between_commas_or_lines(text, names):
    assert split_classes(text) == names


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda it: split_classes("cat, dog, cat"), "'cat' more than once"),
        (lambda it: split_classes("\n".join(map(str, range(10_000)))), f"got 10,000; expected at most {MAX_CLASSES:,}"),
        (lambda it: split_classes("x" * 3000), "got 3,000 characters"),
        (lambda it: it.classify(it.read_image(FILE).coded, ["cat"], "a photo"), "expected {c} in it"),
        (lambda it: it.classify(it.read_image(FILE).coded, ["c" * 1999], "a {c}"), "prompt: got 2,001 characters"),
        (lambda it: it.read_caption(" \n"), "caption: empty"),
        (lambda it: it.read_image(b"%PDF-1.7"), "not a JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF image"),
        (lambda it: it.read_image(b"<svg/>"), "not a JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF image"),
        (lambda it: it.read_image(FILE[:-20]), "cut short"),
        (lambda it: it.read_image(FILE + bytes(20 << 20)), "expected at most 20,971,520"),
        (lambda it: replace(it, text=None).read_caption("cat"), "no text tokenizer"),
        (lambda it: replace(it, image=None).read_image(FILE), "no image tokenizer"),
        (lambda it: replace(it, scale=None).classify(it.read_image(FILE).coded, ["a"], "{c}"), "contains one of them"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(answers, call, message):
    with pytest.raises(DataError, match=message.replace("{", r"\{")):
        call(answers)


def test_nothing_is_kept_but_the_codes_of_equal_input(answers):
    assert answers.read_image(FILE) is answers.read_image(bytes(bytearray(FILE)))
    other = answers.read_image(encode(pixels(1), "PNG"))
    assert other.coded.to_json() != answers.read_image(FILE).coded.to_json()
