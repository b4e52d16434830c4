import json

import pytest
import torch

from tests.data.making import encode, pixels
from tests.models import PRODUCT, tiny_model
from tests.search.making import built, pictures
from vqclip.data.prepare import open_images
from vqclip.demo.answers import MAX_CLASSES, MAX_TEXT, Answers
from vqclip.errors import CheckpointError, ConfigError, DataError
from vqclip.search.index import Origin, build_index

FILE = encode(pixels(0), "PNG")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Tokenizers of both modalities and of each, images, and an index of them."""
    folder = tmp_path_factory.mktemp("place")
    model = built()
    model.save_pretrained(folder / "run" / "tokenizer")
    model.image.save_pretrained(folder / "image")
    model.text.save_pretrained(folder / "text")
    built({"kind": "identity", "dim": 6}).image.save_pretrained(folder / "identity")
    source = open_images(str(pictures(folder / "pictures")))
    build_index(model.image, source, origin=Origin(fingerprint=source.fingerprint)).save(folder / "index")
    return folder


@pytest.fixture(scope="module")
def answers(place):
    return Answers.load(str(place / "run"), place / "index", [str(place / "pictures")])


def test_an_image_has_the_ids_of_the_tokenizer(answers):
    coded, seen = answers.of_image(FILE)
    ids = answers.image.encode(seen[None])
    assert json.loads(coded.to_json()) == ids[0].tolist()
    torch.testing.assert_close(coded.codes_only, answers.image.embed(ids)[0])
    torch.testing.assert_close(coded.continuous, answers.image.continuous(seen[None])[0])


def test_a_caption_has_ids_for_its_tokens_alone(answers):
    coded, pieces = answers.of_caption("a red apple")
    assert pieces == ["<start>", "a ", "red ", "apple ", "<end>"]
    assert coded.ids.shape == (5, 2)
    torch.testing.assert_close(coded.codes_only, answers.text.embed(answers.text.encode(["a red apple"]))[0])


@pytest.mark.parametrize("classes", ["cat, dog, car", "cat\n dog \n\ncar, cat", "cat, dog,, car,cat"])
def test_probabilities_are_the_softmax_of_cosines_times_the_scale(answers, classes):
    coded, _ = answers.of_image(FILE)
    continuous, codes = answers.classify(coded, classes, "a {c}")
    prompts = answers.text.embed(answers.text.encode([f"a {name}" for name in codes]))
    expected = torch.softmax(answers.scale * (prompts @ coded.codes_only), dim=0).tolist()
    assert list(codes) == (["cat", "dog", "car, cat"] if "\n" in classes else ["cat", "dog", "car"])
    assert list(codes.values()) == pytest.approx(expected, abs=1e-5)
    assert sum(continuous.values()) == pytest.approx(1)


def test_an_image_of_the_index_is_nearest_to_itself(answers, place):
    hit, *others = answers.nearest(answers.of_image((place / "pictures" / "00.png").read_bytes())[0], 3)
    assert (hit.name, len(others)) == ("00.png", 2)
    assert hit.picture is not None
    assert Answers.load(str(place / "run")).nearest(answers.of_caption("a")[0], 3) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda it, code: it.classify(code, "\n".join(map(str, range(1001))), "{c}"), "got 1,001; expected 1 to 1,000"),
        (lambda it, code: it.classify(code, " , ", "{c}"), "classes: got 0"),
        (lambda it, code: it.classify(code, "cat", "a photo"), r"expected \{c\} in it"),
        (lambda it, code: it.of_caption("x" * (MAX_TEXT + 1)), "caption: got 20,001 characters"),
        (lambda it, code: it.of_image(b"%PDF-1.7"), "not a JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF image"),
        (lambda it, code: it.of_image(FILE[:-20]), "cut short"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(answers, call, message):
    assert MAX_CLASSES == 1000
    with pytest.raises(DataError, match=message):
        call(answers, answers.of_image(FILE)[0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (("image", None, "pictures"), ConfigError, "--data: got images without --index"),
        (("identity", None, None), ConfigError, "no codes"),
        (("text", "index", None), CheckpointError, "--index: .* is of image codes"),
        (("run", "image", None), CheckpointError, "index.json"),
        (("run", "index", "run"), DataError, "no image"),
        (("none", None, None), CheckpointError, "no such run, checkpoint or tokenizer folder"),
    ],
)
def test_wrong_folders_are_named(place, given, error, message):
    folder, index, images = (each and place / each for each in given)
    with pytest.raises(error, match=message):
        Answers.load(str(folder), index, [str(images)] if images else [])


def test_an_index_of_another_tokenizer_is_refused_with_the_command(place, tmp_path):
    torch.manual_seed(5)
    tiny_model(PRODUCT, PRODUCT).build().eval().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="vqclip search build"):
        Answers.load(str(tmp_path), place / "index")
