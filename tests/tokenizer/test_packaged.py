"""The tokenizer that comes with the package."""

from __future__ import annotations

from PIL import Image, ImageDraw

from vqclip import CLIP, load_tokenizer
from vqclip.tokenizer.folder import PACKAGED, find_folder


def test_it_finds_the_words_for_an_image_and_decodes_it():
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).ellipse((6, 6, 58, 58), fill="red")
    tok, text = load_tokenizer("emoji", "image"), load_tokenizer("emoji", "text")
    ids = tok.encode(image)
    captions = ["red circle", "blue circle", "red apple", "green apple", "hamster", "family"]
    similarity = tok.embed(ids) @ text.embed(text.encode(captions)).T
    assert captions[int(similarity.argmax())] == "red circle"
    decoded = tok.to_pil(tok.decode_pixels(ids))[0]
    red, green, blue = decoded.getpixel((32, 32))
    assert red > 150 > max(green, blue)
    assert min(decoded.getpixel((1, 1))) > 220


def test_it_is_small_and_has_a_card():
    for name in PACKAGED:
        files = [path for path in find_folder(name).iterdir() if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= 4e6
        card = (find_folder(name) / "README.md").read_text()
        assert "license: apache-2.0" in card
        assert "Google LLC" in card
        assert "Unicode, Inc." in card


def test_a_folder_of_the_name_has_precedence(tmp_path, monkeypatch):
    CLIP.from_pretrained("emoji").save_pretrained(tmp_path / "emoji")
    monkeypatch.chdir(tmp_path)
    assert find_folder("emoji").absolute() == tmp_path / "emoji"
