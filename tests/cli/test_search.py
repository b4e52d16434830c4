from dataclasses import replace

import pytest
import torch
from PIL import Image

from tests.commands import command
from tests.data.making import caption_members, caption_shards, class_folder, write_tar
from tests.search.making import built, pictures
from vqclip.cli.export import batches
from vqclip.data.prepare import open_images
from vqclip.errors import DataError
from vqclip.search import CodeIndex
from vqclip.search.index import build_index

main = command("search")


def test_pictures_that_cannot_be_read_are_left_out_and_counted(tmp_path):
    (pictures(tmp_path) / "03a.png").write_bytes(b"no picture")
    source, tokenizer = open_images(str(tmp_path)), built().image
    with pytest.raises(DataError, match="1 samples cannot be used"):
        build_index(tokenizer, source)
    index = build_index(tokenizer, source, batch_size=5, bad_fraction=0.1)
    bad = [source.place(number) for number in range(13)].index("03a.png")
    assert index.places.tolist() == [place for place in range(13) if place != bad]
    assert [len(batch) for batch in batches(tokenizer, source, 100)] == [12]  # what `vqclip export` compares


def test_captions_that_cannot_be_read_are_left_out_and_counted(tmp_path, caplog):
    members = caption_members(0, 13) | {"000000003.txt": b""}
    source, tokenizer = open_images([str(write_tar(tmp_path / "0.tar", members))], ["captions=txt"]), built().text
    with pytest.raises(DataError, match="1 samples cannot be used(?s:.*)000000003: the caption (.*) is empty"):
        build_index(tokenizer, source)
    index = build_index(tokenizer, source, bad_fraction=0.1)
    assert index.places.tolist() == [place for place in range(13) if place != 3]
    assert "sample 3 left out" in caplog.text
    assert [len(batch) for batch in batches(tokenizer, source, 100)] == [12]


@pytest.fixture
def shown(tmp_path, capsys):
    """The page that the two commands make, and what they print."""
    built().save_pretrained(tmp_path / "tokenizer")
    given = ["--tokenizer", str(tmp_path / "tokenizer")]
    images, index, target = pictures(tmp_path / "pictures"), str(tmp_path / "index"), tmp_path / "page.html"
    assert main(["build", *given, "--data", str(images), "--out", index]) == 0
    shown = ["-k", "5", "--data", str(images), "--out", str(target)]
    assert main(["query", "--index", index, "a <red> apple", *shown]) == 0
    return target, capsys.readouterr().out


@pytest.fixture
def query(tmp_path):
    """A function that searches the index, for a page of the pictures in a folder, and returns the status."""

    def run(*options, data="pictures"):
        page = ["--data", str(tmp_path / data), "--out", str(tmp_path / "other.html")]
        return main(["query", "--index", str(tmp_path / "index"), "x", *page, *options])

    return run


def test_the_commands_make_a_page(shown):
    target, printed = shown
    text = target.read_text(encoding="utf-8")
    told = "12 items of 48 bits, 12 of them distinct; 72 bytes, 6.0 bytes an item; float32 embeddings: 64 an item"
    assert told in printed
    assert text.count("data:image/png;base64,") == 5
    assert "<h1>a &lt;red&gt; apple</h1>" in text
    assert "<i>" not in text
    assert "<script" not in text


def test_pictures_that_changed_are_not_shown(tmp_path, shown, query, capsys, refused):
    Image.new("RGB", (9, 9)).save(tmp_path / "pictures" / "new.png")
    assert "the index was built from other data, with other keys, or by an older version" in refused(query())
    given = ["--index", str(tmp_path / "index")]
    picture = str(tmp_path / "pictures" / "00.png")
    assert main(["query", *given, "--image", picture, "-k", "1"]) == 0
    assert capsys.readouterr().out.split()[2] == "00.png"  # a picture finds itself
    (tmp_path / "pictures" / "new.png").unlink()
    (tmp_path / "pictures").rename(tmp_path / "moved")
    assert query(data="moved") == 0
    assert "expected one of them" in refused(main(["query", *given]))


def test_no_picture_is_read_because_an_index_says_so(tmp_path, shown, refused):
    message = f"--data: missing, expected the images for --out; the index was built from {tmp_path / 'pictures'}"
    given = ["--index", str(tmp_path / "index"), "x", "--out", str(tmp_path / "other.html")]
    assert message in refused(main(["query", *given]))
    assert not (tmp_path / "other.html").exists()


def test_places_beyond_the_pictures_are_refused_and_a_moved_tokenizer_is_asked_for(tmp_path, shown, query, refused):
    index = CodeIndex.load(tmp_path / "index")
    replace(index, places=torch.arange(12) + 10**9).save(tmp_path / "index")
    assert "expected less than 12, the images of" in refused(query())
    replace(index, origin=index.origin.model_copy(update={"tokenizer": "/gone"})).save(tmp_path / "index")
    assert "--tokenizer: missing, and the index names /gone, which is not there" in refused(query())


def test_one_unreadable_picture_does_not_hide_the_others(tmp_path, shown, query, capsys):
    path = tmp_path / "pictures" / "04.png"
    path.write_bytes(bytes(9))
    index, source = CodeIndex.load(tmp_path / "index"), open_images(str(tmp_path / "pictures"))
    origin = index.origin.model_copy(update={"fingerprint": source.fingerprint})
    replace(index, origin=origin).save(tmp_path / "index")
    assert query("-k", "12") == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"vqclip search: left out of the page: {path}: not a JPEG, PNG, ")
    text = (tmp_path / "other.html").read_text()
    assert text.count("data:image/png;base64,") == 11
    assert text.count('title="04.png">no image</span>') == 1


def test_names_tell_pictures_apart(tmp_path):
    for name in ("a/cat.png", "b/cat.jpg"):
        (tmp_path / "pictures" / name).parent.mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "pictures" / name)
    for folder in ("x", "y"):
        caption_shards(tmp_path / "shards" / folder, counts=(2,))
    class_folder(tmp_path / "classes")
    model = built()
    assert build_index(model.image, open_images(str(tmp_path / "pictures"))).names == ["a/cat.png", "b/cat.jpg"]
    shards = open_images(str(tmp_path / "shards" / "*" / "*.tar"))
    captions = [shards.read(number).captions[0] for number in range(4)]
    places = [f"{folder}/00000.tar/{number:09d}" for folder in "xy" for number in range(2)]
    expected = [f"{place}: {caption}" for place, caption in zip(places, captions, strict=True)]
    assert build_index(model.image, shards).names == build_index(model.text, shards).names == expected
    labelled = build_index(model.image, open_images(str(tmp_path / "classes")))
    assert labelled.names[5] == "0.tar/s0000005: red panda"
    assert len(set(labelled.names)) == len(labelled)
    with pytest.raises(DataError, match="typo: no such file or folder"):
        open_images(str(tmp_path / "typo"))
