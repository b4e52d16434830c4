"""What only sources of image files have: tables, paths, and what is wrong with them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.data.making import class_folder, encode, pixels
from vqclip.data import FileSource, parse_source, prepare_sources
from vqclip.data.images import open_images
from vqclip.data.sources import file_parts
from vqclip.errors import ConfigError, DataError, StorageError, VqclipError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images a.jpg, b.jpg and c.jpg."""
    for number, name in enumerate("abc"):
        (tmp_path / f"{name}.jpg").write_bytes(encode(pixels(number)))
    return tmp_path


def table(folder: Path, text: str, name: str = "t.csv", overrides: tuple[str, ...] = (), **keys) -> FileSource:
    (folder / name).write_text(text)
    source = parse_source(folder / name, overrides, **keys).build()
    assert isinstance(source, FileSource)
    return source


def test_bad_rows_are_named_and_the_others_read(folder: Path) -> None:
    (folder / "big.jpg").touch()
    os.truncate(folder / "big.jpg", (64 << 20) + 1)
    (folder / "d.jpg").mkdir()
    os.mkfifo(folder / "p.jpg")
    rows = {
        "a.jpg,one": None,
        "none.jpg,two": "row 3: none.jpg: cannot be read: No such file",
        ",three": "row 4: : the path of the image is empty",
        "../a.jpg,four": "row 5: ../a.jpg: ../a.jpg: leaves the folder",
        "b.jpg, ": "row 6: b.jpg: the caption is empty",
        "https://host/a.jpg,six": "a URL; expected a file on this machine",
        "big.jpg,seven": "row 8: big.jpg: image of 67108865 bytes; at most 67108864",
        "d.jpg,eight": "row 9: d.jpg: cannot be read: Is a directory",
        "p.jpg,nine": "row 10: p.jpg: cannot be read: not a regular file",
        f"c.jpg,{'x' * 65_537}": "row 11: c.jpg: caption of 65537 characters",
        f"{folder}/c.jpg,absolute": None,
        "sub/../c.jpg,inside": None,
    }
    source = table(folder, "filepath,title\n" + "\n".join(rows) + "\n")
    for index, message in enumerate(rows.values()):
        if message is None:
            assert source.read(index).image
        else:
            with pytest.raises(DataError) as error:
                source.read(index)
            assert message in str(error.value)
            assert str(error.value).startswith(f"{folder}/t.csv: row ")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("", [], "t.csv: is empty"),
        ("filepath,title\n", [], "no rows below the header"),
        (
            "file,title\na.jpg,x\n",
            [],
            "no column 'filepath'; its columns: 'file', 'title'; did you mean \"file\"",
        ),
        ("filepath\ttitle\na.jpg\tx\n", [], r"it has a single column, so the separator may be '\t' (separator)"),
        ("filepath,title\na.jpg,x,y\n", [], "row 2: 3 columns, but the header has 2; put texts that contain ','"),
        ("filepath,title\na.jpg\n", [], "row 2: 1 columns, but the header has 2"),
        ('filepath,title\na.jpg,"x"y\n', [], "row 2: ',' expected after '\"'; if quotes are ordinary"),
        ('filepath,title\na.jpg,"x\n', [], "unexpected end of data"),
        ("filepath,title\na.jpg,\0\n", [], "line 2: contains a zero byte"),
        ("filepath,title,title\na.jpg,x,y\n", [], "2 columns are called 'title'"),
        (f"filepath,title\na.jpg,{'x' * 200_000}\n", [], "row 2: field larger than field limit"),
        (f"filepath,title\na.jpg,{'x' * (1 << 20)}\n", [], "line 2: more than 1048576 characters"),
        ("filepath,title\nnone.jpg,x\n", [], "none of the 1 images can be read; the first: "),
        ("filepath,title\na.jpg,x\n", ["label=cls"], "label: no column 'cls'"),
        ("filepath,cls\na.jpg,3\n", ["label=cls"], "the classes are numbers without names; set classnames"),
        ("filepath,cls\na.jpg,2\n", ["label=cls", "classnames=[a, b]"], "row 2: class '2'; expected one of classnames"),
        ("filepath,cls\na.jpg,\n", ["label=cls"], "row 2: the class is empty"),
        (f"filepath,cls\na.jpg,{'1' * 5000}\n", ["label=cls", "classnames=[a, b]"], "row 2: class '111"),
        (f"{'x' * 100_000},{'y' * 100_000}\n", [], "its columns: 'xxx"),
        ("filepath,cls\na.jpg,x\n", ["classnames=[a]"], "classnames: got them without label"),
        ("filepath,cls\na.jpg,x\n", ["label=cls", "templates=[a photo]"], "expected prompts with {c}"),
    ],
)
def test_wrong_tables(folder: Path, text: str, overrides: list[str], message: str) -> None:
    (folder / "t.csv").write_text(text)
    with pytest.raises(VqclipError) as error:
        parse_source(folder / "t.csv", overrides).build()
    assert message in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_json_without_a_caption_is_reported_in_a_short_message(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps({"k" * 1_000_000: 1}))
    source = parse_source(folder, ["captions=json"]).build()
    with pytest.raises(DataError, match="its keys: 'kkk") as error:
        source.read(0)
    assert len(str(error.value)) < 1000


def test_tables_of_other_encodings(folder: Path) -> None:
    (folder / "t.csv").write_bytes("filepath,title\na.jpg,é\n".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        parse_source(folder / "t.csv").build()
    (folder / "t.csv").write_bytes(b"\xef\xbb\xbf" + "filepath,title\r\na.jpg,é\r\n\r\n".encode())
    source = parse_source(folder / "t.csv").build()
    assert (len(source), source.read(0).captions) == (1, ("é",))


def test_columns_and_quotes(folder: Path) -> None:
    source = table(folder, 'image,one,two\na.jpg,"x, ""y""",z\n', overrides=("image=image", "captions=[one, two]"))
    assert source.read(0).captions == ('x, "y"', "z")
    source = table(folder, 'filepath\ttitle\na.jpg\t"x" y\nb.jpg\t"z\n', "t.tsv", ("quotes=false",))
    assert [source.read(index).captions for index in range(2)] == [('"x" y',), ('"z',)]
    sub = folder / "tables"
    sub.mkdir()
    assert table(sub, "filepath;title\na.jpg;x\n", overrides=("separator=;",), images=str(folder)).read(0).image


def test_classes_of_a_table(folder: Path) -> None:
    text = "filepath,cls,title\na.jpg,dog,one\nb.jpg,cat,two\nc.jpg,dog,three\n"
    source = table(folder, text, overrides=("label=cls",))
    assert source.classnames == ("cat", "dog")
    assert [source.read(index).label for index in range(3)] == [1, 0, 1]
    assert source.read(1).captions == ("a photo of a cat",)
    both = table(folder, text, overrides=("label=cls", "captions=title", "classnames=[dog, bird, cat]"))
    assert both.templates == ()
    assert [(both.read(index).label, both.read(index).captions) for index in range(2)] == [(0, ("one",)), (2, ("two",))]
    assert both.fingerprint != source.fingerprint


def test_only_changed_files_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    read: list[str] = []
    make = file_parts._hash
    monkeypatch.setattr(file_parts, "_hash", lambda path: read.append(Path(path).name) or make(path))
    text = "filepath,title\na.jpg,x\nb.jpg,y\nc.jpg,z\n"
    before = table(folder, text).fingerprint
    assert read == ["a.jpg", "b.jpg", "c.jpg"]
    (folder / "b.jpg").write_bytes(encode(pixels(9)))
    assert parse_source(folder / "t.csv").build().fingerprint != before
    assert read[3:] == ["b.jpg"]
    for file in (cache / "index").iterdir():  # as after a power cut
        file.write_bytes(file.read_bytes()[:-30])
    assert parse_source(folder / "t.csv").build().read(1).captions == ("y",)
    assert len(read) == 7


def test_a_damaged_list_of_arrays_in_an_index(folder: Path, cache: Path) -> None:
    text = "filepath,title\na.jpg,x\n"
    expected = table(folder, text).fingerprint
    for file in (cache / "index").iterdir():
        data = file.read_bytes()
        at = data.index(b"PK\x01\x02") + 33  # of the list at the end of a zip, which has no checksum
        file.write_bytes(data[:at] + b"\x02" + data[at + 1 :])  # the first name has a comment of 512 bytes
        assert parse_source(folder / "t.csv").build().fingerprint == expected
        assert file.read_bytes()[at] == 0


def test_a_file_that_comes_later_is_found_at_the_next_start(folder: Path) -> None:
    source = table(folder, "filepath,title\na.jpg,x\nnew.jpg,y\n")
    before = source.fingerprint
    (folder / "new.jpg").write_bytes(encode(pixels(5)))
    with pytest.raises(StorageError, match="row 3: new.jpg: image has changed since it was indexed"):
        source.read(1)  # the same on every rank, whenever it looks
    source = parse_source(folder / "t.csv").build()
    assert source.read(1).image
    assert source.fingerprint != before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not JSON"),
        ("[]", "expected COCO's format"),
        ('{"images": [], "annotations": []}', "0 images, none with a caption"),
        (
            '{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"image_id": 1}]}',
            "annotations[0]: no caption",
        ),
        ('{"images": [{"id": "1", "file_name": "a.jpg"}], "annotations": []}', "images[0].id: got '1'"),
        ('{"images": [{"id": 1, "file_name": 3}], "annotations": []}', "images[0].file_name: got '3'; expected text"),
        (
            '{"images": [{"id": 1, "file_name": "a.jpg"}, {"id": 1, "file_name": "b.jpg"}], "annotations": []}',
            "images[1]: id 1 is that of another image",
        ),
        (
            '{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"image_id": 1, "caption": "x"}, '
            '{"image_id": 7, "caption": "x"}]}',
            "1 annotations of images that are not listed, such as 7",
        ),
    ],
)
def test_wrong_coco_files(folder: Path, content: str, message: str) -> None:
    (folder / "c.json").write_text(content)
    with pytest.raises(DataError) as error:
        parse_source(folder / "c.json").build()
    assert message in str(error.value)


def test_an_image_of_coco_without_captions_is_a_bad_sample(folder: Path) -> None:
    images = [{"id": 5, "file_name": "a.jpg"}, {"id": 9, "file_name": "b.jpg"}]
    (folder / "c.json").write_text(
        json.dumps({"images": images, "annotations": [{"image_id": 9, "caption": "x\ud800"}]})
    )
    source = parse_source(folder / "c.json").build()
    with pytest.raises(DataError, match=r"c\.json: image 5: a\.jpg: the caption is empty"):
        source.read(0)
    with pytest.raises(DataError, match="lone surrogate"):
        source.read(1)


def test_captions_beside_the_images(folder: Path) -> None:
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"caption {name}\n")
    source = parse_source(folder).build()
    assert [source.read(index).captions for index in range(2)] == [("caption a",), ("caption b",)]
    with pytest.raises(DataError, match=r"c\.jpg: has no \.txt beside it"):
        source.read(2)
    (folder / "b.txt").write_bytes(b"\xff")
    with pytest.raises(StorageError, match=r"b\.jpg: \.txt has changed since it was indexed"):
        source.read(1)
    with pytest.raises(DataError, match=r"b\.jpg: the file of its caption is not UTF-8"):
        parse_source(folder).build().read(1)
    (folder / "c.json").write_text('{"caption": "json c"}')
    assert parse_source(folder, ["captions=json"]).build().read(2).captions == ("json c",)


def test_layouts_of_folders_that_are_not_plain(folder: Path) -> None:
    (folder / "a.csv").touch()
    with pytest.raises(DataError, match="3 images without captions; expected a .txt .* named as the path: a.csv"):
        parse_source(folder).build()
    (folder / "a.txt").write_text("x")
    with pytest.raises(DataError, match="3 images, of which 1 have a .txt and 0 a .json of the same name"):
        parse_source(folder).build()
    (folder / "metadata.csv").write_text("file_name,text\na.jpg,x\n")
    assert parse_source(folder).build().read(0).captions == ("x",)
    (folder / "captions.json").write_text('{"a.jpg": ["one", "two"]}')
    with pytest.raises(DataError, match=r"expected one of .*, got metadata\.csv, captions\.json"):
        parse_source(folder).build()
    (folder / "metadata.csv").unlink()
    assert parse_source(folder).build().read(0).captions == ("one", "two")
    (folder / "captions.json").write_text('[{"file_name": "a.jpg", "text": 5}]')
    with pytest.raises(DataError, match="row 1: text: got '5'; expected text; its keys: 'file_name', 'text'"):
        parse_source(folder).build()


def test_new_files_in_a_folder_are_found(folder: Path) -> None:
    for name in "abc":
        (folder / f"{name}.txt").write_text(name)
    assert len(parse_source(folder).build()) == 3
    (folder / "more").mkdir()
    (folder / "more" / "d.jpg").write_bytes(encode(pixels(4)))
    (folder / "more" / "d.txt").write_text("d")
    (folder / "more" / "above").symlink_to(folder)  # not followed for ever
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "e.jpg").touch()
    source = parse_source(folder).build()
    assert [source.read(index).captions[0] for index in range(len(source))] == ["a", "b", "c", "d"]


def test_urls_are_refused(tmp_path: Path) -> None:
    for path, kind in (("https://host/a.csv", "csv"), ("s3://bucket/a.json", "coco")):
        with pytest.raises(ConfigError, match=f"kind: {kind} reads files on this machine"):
            parse_source(path).build()


def test_a_file_that_is_written_while_it_is_indexed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = file_parts.open_regular

    class Growing:
        def __init__(self, path: Path):
            self.path, self.file = path, opened(path)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def fileno(self):
            return self.file.fileno()

        def read(self):
            with self.path.open("ab") as other:
                other.write(b"x")
            return self.file.read()

    monkeypatch.setattr(file_parts, "open_regular", Growing)
    with pytest.raises(DataError, match=r"a\.jpg: was written to while it was indexed"):
        table(folder, "filepath,title\na.jpg,x\n")


def test_after_preparation_files_are_not_compared_a_second_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "t.csv").write_text("filepath,title\na.jpg,x\nb.jpg,y\n")
    config, compared, stat = parse_source(folder / "t.csv"), [], file_parts._stat
    monkeypatch.setattr(file_parts, "_stat", lambda path: compared.append(path) or stat(path))
    prepare_sources([config])
    assert len(compared) == 2
    config.build()
    assert len(compared) == 2
    config.build()  # later, files may have changed
    assert len(compared) == 4


def test_class_folders_are_equal_to_class_shards(tmp_path: Path) -> None:
    shards = class_folder(tmp_path / "shards")
    packed = parse_source(shards).build()
    samples = sorted((packed.read(index) for index in range(len(packed))), key=lambda sample: sample.label)
    for number, sample in enumerate(samples):
        path = tmp_path / "images" / packed.classnames[sample.label].replace(" ", "_") / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.image)
    templates = "zeroshot_classification_templates.txt"
    (tmp_path / "images" / templates).write_bytes((shards / templates).read_bytes())
    source = parse_source(tmp_path / "images").build()
    assert (source.classnames, source.templates) == (packed.classnames, packed.templates)
    assert [source.read(index) for index in range(len(source))] == samples


def test_search_and_export_read_tables(folder: Path) -> None:
    (folder / "t.csv").write_text("filepath,title\na.jpg,x\n")
    images = open_images(str(folder / "t.csv"))
    assert (len(images), images.place(0)) == (1, "a.jpg (row 2)")


def test_a_damaged_table_or_index_is_made_again(folder: Path, cache: Path) -> None:
    source = table(folder, "filepath,title\na.jpg,x\nb.jpg,y\n")
    expected = [source.read(0), source.read(1), source.fingerprint]
    for stored in sorted((cache / "index").glob("*.npz")):
        whole = stored.read_bytes()
        for place in range(0, len(whole), 41):
            stored.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            again = source.config.build()
            assert [again.read(0), again.read(1), again.fingerprint] == expected
        stored.write_bytes(whole)
