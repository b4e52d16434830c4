from __future__ import annotations

import pytest
import torch

from tests.data.making import encode, pixels
from tests.models import PRODUCT, RESIDUAL_FSQ, tiny_model
from tests.search.making import built, pictures
from vqclip.cli.search import build
from vqclip.data.prepare import open_images
from vqclip.demo.answers import Answers
from vqclip.demo.loading import load_answers
from vqclip.demo.respond import Request, respond
from vqclip.errors import CheckpointError, ConfigError, DataError
from vqclip.search.index import Origin

EVIL = "<img src=x onerror=alert(1)> ${1} {{1}} \x1b[31m"


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
    build(model.image, source, origin=Origin(fingerprint=source.fingerprint)).save(folder / "index")
    torch.manual_seed(1)
    (folder / "image.png").write_bytes(encode(pixels(0), "PNG"))
    return folder


@pytest.fixture(scope="module")
def answers(place):
    return load_answers(str(place / "run"), place / "index", str(place / "pictures"))


def test_everything_is_answered_together(answers, place):
    shown = respond(answers, "run", Request(place / "image.png", "a cat", "cat, dog", "a {c}"))
    assert shown.image.count("<svg") == 2
    assert "<b>48 bits</b> = 6 bytes" in shown.image
    assert shown.image_ids.startswith("[[")
    assert "a </figcaption>" in shown.caption
    assert "Cosine of image and caption" in shown.caption
    assert shown.classes.count("<tr>") == 3
    assert shown.nearest.count("data:image/png;base64,") == 16


def test_a_refusal_takes_the_place_of_its_answer_alone(answers, place, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes((place / "image.png").read_bytes()[:-30])
    shown = respond(answers, "run", Request(broken, "a cat", "cat, cat"))
    assert "png image cannot be decoded: it is cut short" in shown.image
    assert shown.image_ids == ""
    assert "<svg" in shown.caption
    assert "more than once" in shown.classes
    assert "Nearest to the image" not in shown.nearest
    assert "Nearest to the caption" in shown.nearest
    shown = respond(answers, "run", Request(tmp_path / "none.png", " ", ", ,"))
    assert "drop the image again" in shown.image
    assert "caption: empty" in shown.caption
    assert "got no name" in shown.classes


def test_hostile_text_is_text(answers, place):
    shown = respond(answers, EVIL, Request(place / "image.png", EVIL, f"{EVIL}\ncat", f"{{c}} {EVIL}"))
    page = "".join(shown)
    assert "<img src=x" not in page
    assert "\x1b" not in page
    assert "&lt;img src=x onerror=alert(1)&gt; ${1} {{1}} \\x1b[31m" in shown.classes
    assert "&lt;i&gt;" in shown.nearest  # names of files


def test_without_an_index_the_page_names_the_command(place):
    answers = load_answers(str(place / "run"))
    shown = respond(answers, str(place / "run"), Request())
    assert f"vqclip search build --tokenizer {place / 'run' / 'tokenizer'} --images" in shown.nearest
    assert respond(answers, "a b; <c>", Request()).nearest.count("&#39;a b; &lt;c&gt;&#39;") == 2


def test_one_modality_is_enough(place):
    image = respond(load_answers(str(place / "image")), "image", Request(place / "image.png", "a cat", "cat"))
    assert "<svg" in image.image
    assert "no text tokenizer" in image.caption
    assert "contains one of them" in image.classes
    text = respond(load_answers(str(place / "text")), "text", Request(place / "image.png", "a cat"))
    assert "<svg" in text.caption
    assert "no image tokenizer" in text.image


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (("image", None, "pictures"), ConfigError, "--images: got images without --index"),
        (("identity", None, None), CheckpointError, "no codes"),
        (("text", "index", None), CheckpointError, "--index: .* is of image codes"),
        (("run", "image", None), CheckpointError, "index.json"),
        (("run", "index", "run"), DataError, "no image"),
        (("none", None, None), CheckpointError, "no such run, checkpoint or tokenizer folder"),
    ],
)
def test_wrong_folders_are_named(place, given, error, message):
    folder, index, images = (each and place / each for each in given)
    with pytest.raises(error, match=message):
        load_answers(str(folder), index, images and str(images))


def test_codebooks_have_their_names_and_reduced_tokens_no_place(place):
    tower = {"kind": "convolutional", "image_size": 16, "channels": [8, 8, 16, 16], "channels_per_group": 4}
    image = {"tower": tower, "quantizer": RESIDUAL_FSQ, "reduce": {"kind": "queries", "count": 3, "heads": 2}}
    model = tiny_model(image=image | {"width": 16, "heads": 2}).build().eval()
    shown = respond(Answers(model.image, model.text, 1.0), "run", Request(place / "image.png")).image
    assert 'viewBox="0 0 30 10"' in shown
    assert "stage 3</figcaption>" in shown
    assert "have no place in the image" in shown


def test_an_index_of_another_tokenizer_is_refused_with_the_command(place, tmp_path):
    torch.manual_seed(5)
    tiny_model(PRODUCT, PRODUCT).build().eval().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="vqclip search build"):
        load_answers(str(tmp_path), place / "index")


def test_answers_without_an_index_have_no_nearest():
    model = built()
    answers = Answers(model.image, model.text, 1.0)
    assert answers.nearest(answers.read_caption("a").coded, 3) == []
