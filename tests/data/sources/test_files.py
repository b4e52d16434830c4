"""What only sources of image files have: tables, paths, and what is wrong with them."""

import gzip
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.data.making import encode, make_files, pixels
from vqclip.data import FileSource, parse_source
from vqclip.data.sources import files
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
        ",three": "row 4: the path of the image is empty",
        "../a.jpg,four": "row 5: ../a.jpg: ../a.jpg: leaves the folder",
        "b.jpg, ": "row 6: b.jpg: the caption is empty",
        "https://host/a.jpg,six": "a URL; expected a file",
        "big.jpg,seven": "row 8: big.jpg: image of 67108865 bytes; at most 67108864",
        "d.jpg,eight": "row 9: d.jpg: cannot be read: Is a directory",
        "p.jpg,nine": "row 10: p.jpg: cannot be read: not a regular file",
        f"c.jpg,{'x' * 65_537}": "row 11: c.jpg: caption of 65537 characters",
        f"{folder}/b.jpg,absolute": None,
        "a.jpg,x,y": "row 13: 3 columns, but the header has 2; texts that contain ',' need double quotes",
        "a.jpg": "row 14: 1 columns, but the header has 2",
        "a.jpg,\0": "row 15: contains a zero byte",
        "a.jpg,caf\udce9": "row 16: not UTF-8: a.jpg,caf\\udce9; if the table has another encoding, set encoding",
        f"a.jpg,{'x' * (1 << 20)}": "row 17: more than 1048576 characters",
        "sub/../a.jpg,inside": None,
    }
    (folder / "t.csv").write_bytes(os.fsencode("filepath,title\n" + "\n".join(rows) + "\n"))
    source = parse_source(folder / "t.csv").build()
    assert source.read(0).captions == ("one", "inside")
    assert (source.place(0), source.place(1)) == ("a.jpg (row 2)", "none.jpg (row 3)")
    for index, message in enumerate([*rows.values()][:-1]):
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
        ("filepath,title\n", [], "no rows; expected one for each image"),
        ("foo,title\na.jpg,x\n", [], "column has a usual name of the images; name it, image=COLUMN, or, if the first"),
        ("image,foo\na.jpg,x\n", [], "captions: no column has a usual name of captions or classes; name it"),
        ("image,cls\na.jpg,1\nb.jpg,3\n", ["classnames=[c,d,e]"], "a class has the number 3; expected 0 to 2, or"),
        ("image,cls\na.jpg,1\nb.jpg,2\n", ["classnames=[c,d]"], "a class has the number 2; expected 0 to 1, or"),
        ("file,title\na.jpg,x\n", ["image=files"], "no column 'files'; its columns: 'file', 'title'; did you"),
        ("filepath,title\na.jpg,x,y\n", [], "none of the first 1 rows can be used; row 2: 3 columns"),
        ("a.jpg,x,y\nb.jpg,x,y\n", [], "no header, since its first row is 'a.jpg', 'x', 'y'; name its 3 columns"),
        ("image,caption\ne.jpg,x\n", [], "images of the table are in "),
        ("filepath,title\nnone.jpg,x\n", [], "none of the 1 images can be read; the first: "),
        ("filepath,title\na.jpg,x\n", ["where={split: train}"], "where: no column 'split'"),
        ("filepath,title,split\na.jpg,x,y\n", ["where={split: train}"], "values; in the first rows split has 'y'"),
        ("filepath,cls\na.jpg,3\n", ["label=cls"], "the classes are numbers without names (3), which prompts would"),
        ("filepath,cls\na.jpg,2\n", ["label=cls", "classnames=[a]"], "row 2: a.jpg: cls: class '2'; expected"),
        ("filepath,cls\na.jpg,a\na.jpg,b\n", ["label=cls", "classnames=[a,b,a]"], "class 'a': classnames has it more"),
        ("a.jpg\nb.jpg\n", [], "since its first row is 'a.jpg'; it has one column, or separator names"),
        ("image,label\n" + "".join(f"a.jpg,x{n}\n" for n in range(1001)), [], "label: 1001 classes in 1001 rows; if"),
        ("filepath,label\na.jpg,0.25\nb.jpg,-1\n", [], "the classes are numbers without names (-1, 0.25), which"),
        ("filepath,label\na.jpg,True\nb.jpg,False\n", [], "the classes are truth values without names (False, True)"),
        ("filepath,caption_file\na.jpg,a.txt\n", [], "captions: no column has a usual name of captions or classes"),
        ("filepath,label\na.jpg,n99999999\n", [], "the classes are WordNet ids without names (n99999999)"),
        ("filepath,title\n/none/z.jpg,x\n", [], "No such file or directory. Is this a path of another machine?"),
        ("filepath,title\nC:\\none\\z.jpg,x\n", [], "Is this a path of another machine?"),
        (f"filepath,cls\na.jpg,{'1' * 5000}\n", ["label=cls", "classnames=[a, b]"], "row 2: a.jpg: cls: class '111"),
        (f"{'x' * 100_000},{'y' * 100_000}\n1,2\n", [], "its columns: 'xxx"),
        ("filepath,cls\na.jpg,x\n", ["captions=cls", "classnames=[a]"], "classnames: set, and no column is read as"),
        ("filepath,cls\na.jpg,x\n", ["label=cls", "templates=[a photo]"], "expected prompts with {c}"),
        ("filepath,title\na.jpg,x\n", ["encoding=none"], "cannot be read (LookupError: unknown encoding: none)"),
    ],
)
def test_wrong_tables(folder: Path, text: str, overrides: list[str], message: str) -> None:
    make_files(folder, "one/e.jpg two/e.jpg")
    (folder / "t.csv").write_text(text)
    with pytest.raises(VqclipError) as error:
        parse_source(folder / "t.csv", overrides).build()
    assert message in str(error.value)
    assert len(str(error.value)) < 1000


X, Y, XY = {"a.jpg": ("x",)}, {"b.jpg": ("y",)}, {"a.jpg": ("x",), "b.jpg": ("y",)}
XY_SUB = {"a.jpg": ("x",), "sub/b.jpg": ("y",)}
XZ = {"a.jpg": ("x", "z"), "b.jpg": ("y",)}
ROWS = "image,caption\na.jpg,x\nb.jpg,y\n"
OBJECTS = [{"image": "a.jpg", "caption": "x"}, {"image": "b.jpg", "caption": "y"}]
ONE = {"images": [{"id": 1, "file_name": "a.jpg"}]}
COCO = {"images": [{"id": 5, "file_name": "a.jpg"}, {"id": "9", "file_name": "b.jpg"}]}
CAPTIONS = [{"image_id": image, "caption": text} for image, text in ((9, "y"), ("5", "x"), (7, "z"))]
CLASSES = {"annotations": [{"image_id": 9, "category_id": 2}], "categories": [{"id": 2, "name": "cat"}]}
SPLITS = [{"filename": "a.jpg", "split": "train", "sentences": [{"raw": "x", "tokens": ["x"]}, {"raw": "z"}]}]
TALK = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "x"}, {"from": "gpt", "value": "no"}]
NO_CLASS = "the class is empty, or a list of several; expected one"
EMPTY = "the caption is empty"
SLASH = "\\"
THREE = "row 2: b.jpg: cls: class '4'; expected one of classnames, or its number, 0 to 2"
FLAGS = {"a.jpg": 1, "b.jpg": 0}
ELEVEN = "".join(f"a.jpg,x{n}\n" for n in range(11))
PLACES = "sub/b.jpg sub/d.jpg 000000000139.jpg deep/0/in/e.jpg deep/1/f.jpg big.JPEG 000017.jpg"
PEOPLE = [
    ("t.csv", "Image , Caption\n./a.jpg,x\na.jpg,z\nb.jpg,y\n", "", XZ, "rows of the same image file are one"),
    ("t.csv", "image_name| comment_number| comment\na.jpg| 0| x\nb.jpg| 0| y\n", "", XY, "image 'image_name'"),
    ("t.csv", ROWS.replace(",", ";"), "", XY, ""),
    ("t.csv", "sep=;\n" + ROWS.replace(",", ";"), "", XY, ""),
    ("t.csv", "class id,filepaths,labels\n1,a.jpg,d\n0,b.jpg,c\n", "", {"a.jpg": 1, "b.jpg": 0}, "image 'filepaths'"),
    ("t.csv", "Id,Image Name,Alt-Text\n3,a.jpg,x\n4,b.jpg,y\n", "", XY, "image 'Image Name', captions 'Alt-Text'"),
    ("t.csv", "#image,caption\na.jpg,x\nb.jpg,y\n", "image='#image'", XY, ""),
    ("t.txt", "a.jpg 1\nsub/b.jpg 0\n", "classnames=[c,d]", {"a.jpg": 1, "sub/b.jpg": 0}, "no header"),
    ("t.csv", "image,label\na.jpg,Cat\nb.jpg,cat\n", "", {"a.jpg": 0, "b.jpg": 1}, "case: 'Cat' and 'cat'"),
    ("t.csv", ROWS.replace(",", "|"), "separator=|", XY, ""),
    ("t.tsv", ROWS.replace(",", "\t"), "separator=tab", XY, ""),
    ("t.txt", ROWS, "", XY, ""),
    ("t.csv", ROWS.replace("\n", ",,\r\n") + "\r\n,,\r\n", "", XY, ""),
    ("t.csv", ",image,caption\n0,a.jpg,x\n1,b.jpg,y\n", "", XY, ""),
    ("t.csv", ROWS.encode("utf-8-sig"), "", XY, ""),
    ("t.csv", ROWS.encode("utf-16"), "", XY, ""),
    ("t.csv.gz", gzip.compress(ROWS.encode("utf-8-sig"), mtime=0), "", XY, ""),
    ("t.json.gz", gzip.compress(json.dumps(OBJECTS).encode(), mtime=0), "", XY, ""),
    ("t.jsonl.gz", gzip.compress("\n".join(map(json.dumps, OBJECTS)).encode(), mtime=0), "", XY, ""),
    ("t.csv", ROWS.replace("y", "é").encode("latin-1"), "encoding=latin-1", XY | {"b.jpg": ("é",)}, ""),
    ("t.csv", "a.jpg,x\nb.jpg,y\n", "", XY, "no header: the first row is 'a.jpg', 'x'"),
    ("t.token", "a.jpg#0\tx\na.jpg#1\tz, 3\nb.jpg#0\ty\n", "", XY | {"a.jpg": ("x", "z, 3")}, "no header"),
    ("t.txt", "a.jpg\tx, 1\nb.jpg\ty, 2\n", "", {"a.jpg": ("x, 1",), "b.jpg": ("y, 2",)}, "no header"),
    ("t.csv", "1,a.jpg,x\n2,b.jpg,y\n", "columns=[id,image,caption]", XY, ""),
    ("t.csv", "id,name,caption\nROCO_1,a.jpg,x\nROCO_2,b.jpg,y\n", "", XY, "image 'name', captions 'caption'"),
    ("t.csv", "image_id,name,caption\na,dog,x\nb,cat,y\n", "", XY, "image 'image_id'"),
    ("t.csv", "image,label,caption_id,caption_en\na.jpg,dog,1,x\nb.jpg,cat,2,y\n", "", XY, "captions 'caption_en'"),
    ("t.csv", "image,text_en,texture\na.jpg,x,1\nb.jpg,y,2\n", "", XY, "captions 'text_en'"),
    ("t.json", [{"image_id": "7", "image_path": "a.jpg", "caption_tokens": ["x"], "caption_str": "x"}], "", X, "_str'"),
    ("t.csv", "img,caption_0,caption 1\na.jpg,x,z\nb.jpg,y,\n", "", XZ, ""),
    ("t.csv", "image,caption\n\"{'bytes': None, 'path': 'a.jpg'}\",x\n", "", X, ""),
    ("t.csv", "img,raw\na.jpg,\"['x', 'z']\"\nb.jpg,y\n", "", XZ, ""),
    ("t.csv", "image,caption\na.jpg,\"['x'\n 'z']\"\nb.jpg,\"['y', None]\"\n", "", XZ, ""),
    ("t.csv", 'image,caption\na.jpg,[]\nb.jpg,"[""y"", null]"\n', "", {**Y, "bad": f"row 2: a.jpg: {EMPTY}"}, ""),
    ("t.csv", 'image, caption\nb.jpg, "y, z"\n', "", {"b.jpg": ("y, z",)}, ""),
    ("t.csv", 'image,caption\nb.jpg,"y, \\"z\\""\n', "", {"b.jpg": ('y, "z"',)}, ""),
    ("t.csv", 'image,caption\nb.jpg,"y \\""z\\"" y\nlast"\n', "", {"b.jpg": ('y \\"z\\" y\nlast',)}, ""),
    ("t.csv", 'image,caption\nb.jpg,"y \\"z\\" y\nlast"\n', "", {"b.jpg": ('y "z" y\nlast',)}, ""),
    ("t.csv", 'image,caption\n"b.jpg", "y" z\n', "", {"b.jpg": ('"y" z',)}, ""),
    ("t.csv", f'image,caption\nb.jpg,"{1500 * SLASH}"x\n', "", {"b.jpg": (f'"{1500 * SLASH}"x',)}, "unclosed quote"),
    ("t.json", [{"image": "a.jpg", "caption": '{"a": "\\d"}'}], "", {"a.jpg": ('{"a": "\\d"}',)}, ""),
    ("t.json", [{"image": "a.jpg", "caption": ['["x"]']}], "", {"a.jpg": ('["x"]',)}, ""),
    ("t.csv", "image,cls\nb.jpg,4\na.jpg,1\n", "label=cls classnames=[a,b,c]", {"a.jpg": 1, "bad": THREE}, ""),
    ("t.csv", ROWS.replace("a.jpg", "a.JPG"), "", {"a.JPG": ("x",), **Y}, ""),
    ("t.csv", 'image,caption\na.jpg,"x, ""z""\n2"\n', "", {"a.jpg": ('x, "z"\n2',)}, ""),
    ("t.csv", 'image,caption\na.jpg,"x\nb.jpg,y"\n', "", {"a.jpg": ('"x',), "b.jpg": ('y"',)}, "rows, such as 2"),
    ("t.csv", 'image,caption\na.jpg,"x" z\n', "quotes=false", {"a.jpg": ('"x" z',)}, ""),
    ("t.csv", "image,caption,split\na.jpg,x,train\nb.jpg,y,val\n", "", XY, "'split' has train 1, val 1; all"),
    ("t.csv", "image,caption,data set\na.jpg,x,train\nb.jpg,y,test\n", "", XY, "'data set' has test 1, train 1; all"),
    ("t.csv", "image,caption,split\na.jpg,x,train\nb.jpg,y,val\n", "where.split=train", X, "left out: 1 row"),
    ("t.csv", "image,caption,used\na.jpg,x,True\nb.jpg,y,False\n", "where.used=true", X, "left out: 1 row"),
    ("t.csv", "image,caption,fold\na.jpg,x,1.0\nb.jpg,y,0.0\n", "where.fold=1", X, "left out: 1 row"),
    ("t.csv", ROWS.replace("b.jpg", "sub\\b.jpg"), "", X | {"sub/b.jpg": ("y",)}, ""),
    ("t.csv", ROWS.replace("b.jpg", "/k/in/sub/b.jpg").replace("a.jpg", "/k/in/a.jpg"), "", XY_SUB, "place of /k/in/"),
    ("t.csv", "image,caption\nC:\\me\\sub\\b.jpg,x\n", "", {"sub/b.jpg": ("x",)}, "place of C:/me/"),
    ("above/t.csv", "image,caption\n/k/in/sub/d.jpg,x\n", "", {"sub/d.jpg": ("x",)}, "images found in"),
    ("t.csv", ROWS.replace("b.jpg", "sub%2Fb.jpg"), "", X | {"sub/b.jpg": ("y",)}, ""),
    ("t.csv", ROWS.replace(".jpg", ""), "", XY, ""),
    ("t.json", [{"image_id": 139, "caption": "x"}], "", {"000000000139.jpg": ("x",)}, ""),
    ("t.csv", "image_id,caption\n17,x\n", "", {"000017.jpg": ("x",)}, ""),
    ("t.csv", "image,label\na.jpg,cat\nb.jpg,nan\n", "", {"a.jpg": 0, "bad": f"row 3: b.jpg: label: {NO_CLASS}"}, ""),
    ("t.csv", "image,label\n" + ELEVEN, "label=label", None, "label: 11 classes in 11"),
    ("t.jsonlines", '{"image_id": "big", "caption": "x"}\n', "", {"big.JPEG": ("x",)}, ""),
    ("t.csv", "image,caption\nd.jpg,x\n", "", {"sub/d.jpg": ("x",)}, "images found in"),
    ("above/t.csv", "image,caption\nd.jpg,x\n", "", {"sub/d.jpg": ("x",)}, "images found in"),
    ("above/t.csv", "image,caption\nsub/d.jpg,x\n", "", {"sub/d.jpg": ("x",)}, "images found in"),
    ("deep/t.csv", "id,caption\ne,x\nf,y\n", "", {"0/in/e.jpg": ("x",), "1/f.jpg": ("y",)}, "by their names"),
    ("t.csv", "id,caption\nd,x\ne,y\n", "", {"sub/d.jpg": ("x",), "deep/0/in/e.jpg": ("y",)}, "not read: 1"),
    ("t.csv", "image,label\na.jpg,dog\nb.jpg,cat\n", "", {"a.jpg": 1, "b.jpg": 0}, ""),
    ("t.csv", "image,label\na.jpg,2.red_dog\nb.jpg,1.cat\n", "", {"a.jpg": 1, "b.jpg": 0}, "are left out: 1.cat, ..."),
    ("t.csv", ROWS + "image,caption\n", "", XY, ""),
    ("t.csv", "id,caption\na,x\nbig,y\nc,z\n", "", {**X, "big.JPEG": ("y",), "c.jpg": ("z",)}, "by their names"),
    ("t.csv", "image,caption\na.jpg,b.jpg\n", "", {"a.jpg": ("b.jpg",)}, "'caption' has names of files"),
    ("deep/t.csv", "id,caption\ndeep/0/in/e.jpg,x\n", "", {"deep/0/in/e.jpg": ("x",)}, "images found in"),
    ("t.csv", "image,caption,key,split\na.jpg,x,train_1,a\nb.jpg,y,test_2,b\n", "", XY, "'split' has a 1, b 1"),
    ("t.json", {"image": {"3": "a.jpg", "7": "b.jpg"}, "caption": {"7": "y", "3": "x"}}, "", XY, ""),
    ("t.csv", "image,label\na.jpg,30-39\nb.jpg,20-29\n", "", {"a.jpg": 1, "b.jpg": 0}, ""),
    ("t.csv", 'image,labels\na.jpg,"x,z"\nb.jpg,"x,z"\n', "", {"a.jpg": 0, "b.jpg": 0}, "all samples are of one"),
    ("t.csv", "image,cls\na.jpg,3.0\nb.jpg,1\n", "label=cls classnames=[a,b,c,d]", {"a.jpg": 3, "b.jpg": 1}, ""),
    ("t.csv", "image,cls\na.jpg,n2\na.jpg,n1\n", "label=cls", {"a.jpg": 1, "a.jpg ": 0}, "1 image has rows of"),
    ("t.jsonl", "\n".join(map(json.dumps, OBJECTS)) + "\n", "kind=coco", XY, ""),
    ("t.json", "\n".join(map(json.dumps, OBJECTS)) + "\n", "", XY, ""),
    ("t.json", OBJECTS, "", XY, ""),
    ("t.json", {"data": OBJECTS}, "", XY, ""),
    ("t.json", [["a.jpg", "x"], ["b.jpg", ["y"]]], "", XY, ""),
    ("t.json", [{"image": "a.jpg", "caption": '["x", "z"]'}, OBJECTS[1]], "", XZ, ""),
    ("t.json", [{"image": "a.jpg", "cls": True}, {"image": "b.jpg", "cls": [0]}], "classnames=[n,y]", FLAGS, ""),
    ("t.json", {"train": OBJECTS[:1], "test": OBJECTS[1:]}, "where.split=train", X, ""),
    ("t.json", {"cat": OBJECTS[:1], "dog": OBJECTS[1:]}, "", XY, ""),
    ("t.json", {"a.jpg": "x", "b.jpg": ["y", None, ""]}, "", XY, ""),
    ("t.json", {"a.jpg": {"caption": "x"}, "b.jpg": {"caption": "y"}}, "", XY, ""),
    ("t.json", {"image": ["a.jpg", "b.jpg"], "caption": ["x", "y"]}, "", XY, ""),
    ("t.json", {"image": {"0": "a.jpg", "1": "b.jpg"}, "caption": {"0": "x", "1": "y"}}, "", XY, ""),
    ("t.json", [{"file": {"path": "a.jpg"}, "meta": {"caption": "x"}}], "", X, "captions 'meta.caption'"),
    ("t.json", [{"i": ["a.jpg"], "meta": {"c": "x"}}], "image=i captions=meta.c", X, ""),
    ("t.csv", "filename,filepath,text\nb.jpg,sub/b.jpg,x\n", "", {"sub/b.jpg": ("x",)}, ""),
    ("t.json", {"images": SPLITS, "dataset": "coco"}, "", {"a.jpg": ("x", "z")}, ""),
    ("t.json", {"images": [{**SPLITS[0], "filepath": "sub", "filename": "b.jpg"}]}, "", {"sub/b.jpg": ("x", "z")}, ""),
    ("t.json", [{"id": "1", "image": "a.jpg", "conversations": TALK}], "", X, ""),
    ("t.json", {**COCO, "annotations": CAPTIONS}, "", XY, "left out: 1 annotations of images that are not listed"),
    ("t.json", {"images": COCO["images"] * 2, "annotations": CAPTIONS}, "", XY, "left out: 1 annotations"),
    ("t.json", {**COCO, **CLASSES}, "", {"b.jpg": 0, "bad": f"row 1: a.jpg: label: {NO_CLASS}"}, ""),
    ("t.json", [*OBJECTS, 3], "", XY | {"bad": "row 3: got a int; expected an object"}, ""),
    ("t.json", '[{"image": "a.jpg", "caption": NaN}]', "", {"bad": "row 1: a.jpg: the caption is empty"}, ""),
]


@pytest.mark.parametrize(
    ("name", "content", "overrides", "expected", "note"), PEOPLE, ids=[f"{n}-{row[0]}" for n, row in enumerate(PEOPLE)]
)
def test_tables_as_people_have_them(folder, name, content, overrides, expected, note):
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    make_files(folder, PLACES, (folder / "b.jpg").read_bytes())
    make_files(folder, name, text if isinstance(text, bytes) else text.encode())
    source = parse_source(folder / name, overrides.split()).build()
    found: dict[str, object] = {}
    for index in range(len(source)):
        try:
            sample = source.read(index)
            path = source.name(index).rpartition(": ")[2].removeprefix(f"{folder}/").removeprefix("./")
            found[path + " " * (path in found)] = sample.captions if sample.label < 0 else sample.label
        except DataError as error:
            found["bad"] = str(error).partition(f"{name}: ")[2]
    assert expected in (found, None)
    assert note in "\n".join(source.notes)


def test_only_changed_files_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    read: list[str] = []
    make = files._hash
    monkeypatch.setattr(files, "_hash", lambda path: read.append(Path(path).name) or make(path))
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


def test_images_that_come_later_are_found_in_their_folder(folder: Path) -> None:
    (folder / "later").mkdir()
    with pytest.raises(DataError, match="none of the 1 images can be read"):
        table(folder, "image,caption\nnew.jpg,x\n")
    (folder / "later" / "new.jpg").write_bytes(encode(pixels(5)))
    assert parse_source(folder / "t.csv").build().read(0).captions == ("x",)


def test_images_of_another_data_set_beside_are_not_read(folder: Path) -> None:
    make_files(folder, "mine/pics/a1.jpg other/1.jpg", (folder / "a.jpg").read_bytes())
    with pytest.raises(DataError, match=r"row 2: 1: cannot be read: No such file .* images names another folder"):
        table(folder, "id,caption\n1,x\n", "mine/t.csv")
    (folder / "mine" / "pics" / "a1.jpg").unlink()
    assert table(folder, "id,caption\n1,x\n", "mine/t.csv").notes[-1].startswith(f"images found in {folder}/other;")


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
        ("[", "cannot be read as JSON (JSONDecodeError: "),
        ("3", "got a int; expected a list of objects"),
        ('[{"drawing": 1}]', "name it, image=COLUMN; its columns: 'drawing'"),
        (json.dumps([["iVBORw0KGgo" + "A" * 61, "x"]]), "an image in base64, which Parquet may have"),
        ('{"a": 3, "b": [1]}', "its keys: 'a', 'b'; expected a list of objects"),
        ('{"images": [{"id": 1}], "annotations": [{"image_id": 1, "bbox": []}]}', "annotations have no caption and"),
        (json.dumps({**ONE, "annotations": [{"image_id": 1, "caption": 5}]}), "row 1: a.jpg: 'caption' contains a int"),
    ],
)
def test_wrong_json(folder: Path, content: str, message: str) -> None:
    (folder / "c.json").write_text(content)
    with pytest.raises(DataError) as error:
        parse_source(folder / "c.json").build()
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["t.csv.gz", "t.json.gz"])
def test_damaged_gzip(folder: Path, name: str) -> None:
    whole = gzip.compress(ROWS.encode() * 100)
    for data in (whole[:-20], whole[:30] + b"xxxx" + whole[34:]):
        (folder / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}: cannot be read( as JSON)? \("):
            parse_source(folder / name).build()


def test_names_that_macos_has_decomposed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for on_disk, in_table in (("cafe\u0301.jpg", "caf\u00e9.jpg"), ("u\u0308.jpg", "\u00fc.jpg")):
        (folder / on_disk).write_bytes(encode(pixels(7)))
        source = table(folder, f"image,caption\n{in_table},x\n")
        assert source.read(0).image == encode(pixels(7))
    monkeypatch.setattr(files, "_as_on_disk", lambda file: pytest.fail(f"looked for other spellings of {file}"))
    assert table(folder, "image,caption\na.jpg,x\n").read(0).captions == ("x",)


def test_names_of_classes_in_files(folder: Path) -> None:
    (folder / "t.csv").write_text("image,label\na.jpg,n01443537\nb.jpg,n01440764\n")
    (folder / "synsets.txt").write_text("n01440764 tench, Tinca tinca\nn01443537 goldfish\n")
    (folder / "index.json").write_text('{"0": ["n01440764", "tench"], "1": ["n01443537", "gold_fish"]}')
    (folder / "names.json").write_text('{"n01440764": "tench", "n01443537": "gold fish"}')
    for file, second in (("synsets.txt", "goldfish"), ("index.json", "gold fish"), ("names.json", "gold fish")):
        source = parse_source(folder / "t.csv", [f"classnames={folder / file}", "label=label"]).build()
        assert (source.classnames, source.read(0).label) == (("tench", second), 1)
    source = parse_source(folder / "t.csv", ["label=label"]).build()  # by ImageNet's own
    assert (source.classnames, source.read(0).label) == (("tench", "goldfish"), 1)
    assert any("named tench, goldfish as in" in each for each in source.notes)
    (folder / "t.csv").write_text("image,label\na.jpg,1\nb.jpg,0\n")
    for lines, names in (
        ("1 red dog\n2 cat\n", ("red dog", "cat")),
        ("red dog 0\ncat 1\n", ("red dog", "cat")),
        ("id,name\n0,747\n1,737\n", ("747", "737")),
        ("boeing 747\nboeing 737\n", ("boeing 747", "boeing 737")),
        ("2 cow\n0 cat\n1 cat\n3 dog\n", ("cat", "cat", "cow", "dog")),
        ("0) cat\n1) cat\n2) dog\n", ("cat", "cat", "dog")),
        ("1 001.Black_Albatross\n2 002.Gull\n", ("Black_Albatross", "Gull")),
        ("n02119789 1 kit_fox\nn02100735 2 setter\n", ("kit_fox", "setter")),
        ('["red dog", "cat"]', ("red dog", "cat")),
        ('{"cat": 1, "red dog": 0}', ("red dog", "cat")),
        ("cat\nred__dog\n", ("cat", "red__dog")),
    ):
        (folder / "names.txt").write_text(lines)
        source = parse_source(folder / "t.csv", [f"classnames={folder / 'names.txt'}", "label=label"]).build()
        assert (source.classnames, source.read(0).label) == (names, 1)
    assert source.read(0).captions == ("a photo of a red dog",)
    (folder / "twice.txt").write_text("n01440764 tench\nn01440764 Tinca\nn01443537 goldfish\n")
    (folder / "data.yaml").write_text("names: [tench, goldfish]\n")
    (folder / "python.txt").write_text("names = {\n0: 'tench',\n1: 'goldfish'}\n")
    (folder / "from1.json").write_text('{"2": "tench", "1": "goldfish"}')
    for name, message in (
        ("twice.txt", "has an id twice"),
        ("data.yaml", "YAML is not read; expected one class name"),
        ("python.txt:1", "got 'names = {'; expected a class name"),
    ):
        with pytest.raises(DataError, match=f"{name}: {message}"):
            parse_source(folder / "t.csv", [f"classnames={folder / name.removesuffix(':1')}", "label=label"]).build()
    with pytest.raises(ConfigError, match="a class has the number 0, which is none of those in classnames"):
        parse_source(folder / "t.csv", [f"classnames={folder / 'from1.json'}", "label=label"]).build()


def test_captions_beside_the_images(folder: Path) -> None:
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"caption {name}\n")
    source = parse_source(folder).build()
    assert [source.read(index).captions for index in range(2)] == [("caption a",), ("caption b",)]
    with pytest.raises(DataError, match=r"c\.jpg: its captions are missing: c\.txt"):
        source.read(2)
    (folder / "b.txt").write_bytes(b"\xff")
    with pytest.raises(StorageError, match=r"b\.jpg: txt has changed since it was indexed"):
        source.read(1)
    with pytest.raises(DataError, match=r"b\.jpg: \.txt is not UTF-8"):
        parse_source(folder).build().read(1)
    (folder / "c.json").write_text('{"caption": "json c"}')
    assert parse_source(folder, ["captions=json"]).build().read(2).captions == ("json c",)


def test_tables_beside_a_folder_are_named(folder: Path) -> None:
    (folder.parent / "beside.csv").touch()
    with pytest.raises(DataError, match=f"3 images without captions; .* as the path: {folder.parent}/beside.csv$"):
        parse_source(folder).build()
    (folder.parent / "beside.csv").unlink()  # the folder of all tests of this process
    tables = folder.parent / "annotations"
    make_files(tables, f"captions_{folder.name}.json captions_train.json instances.json")
    with pytest.raises(DataError, match=f"captions: names, .* named as the path: {tables}/captions_{folder.name}.json"):
        parse_source(folder).build()
    with pytest.raises(DataError, match=f"annotations: tables; one of them is the path: {tables}/captions_train.json"):
        parse_source(tables)
    shutil.rmtree(tables)


def test_descriptions_of_a_folder(folder: Path) -> None:
    (folder / "metadata.csv").write_text("file_name,text\na.jpg,x\n")
    assert parse_source(folder).build().read(0).captions == ("x",)
    (folder / "captions.json").write_text('{"a.jpg": ["one", "two"]}')
    with pytest.raises(DataError, match="expected one of .*, got metadata.csv, captions.json"):
        parse_source(folder).build()
    (folder / "metadata.csv").unlink()
    assert parse_source(folder).build().read(0).captions == ("one", "two")


def test_new_files_in_a_folder_are_found(folder: Path) -> None:
    for name in "abc":
        (folder / f"{name}.txt").write_text(name)
    assert len(parse_source(folder).build()) == 3
    make_files(folder, "more/d.jpg .hidden/e.jpg", encode(pixels(4)))
    (folder / "more" / "d.txt").write_text("d")
    (folder / "more" / "above").symlink_to(folder)  # not followed for ever
    source = parse_source(folder).build()
    assert [source.read(index).captions[0] for index in range(len(source))] == ["a", "b", "c", "d"]


def test_urls_are_refused(tmp_path: Path) -> None:
    for path, kind in (("https://host/a.csv", "csv"), ("s3://bucket/a.json", "json")):
        with pytest.raises(ConfigError, match=f"kind: {kind} reads files on this machine"):
            parse_source(path).build()


def test_a_file_that_is_written_while_it_is_indexed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count()
    monkeypatch.setattr(files.Stamp, "of", lambda _: files.Stamp(9, next(times)))
    with pytest.raises(DataError, match=r"a\.jpg: was written to while it was indexed"):
        table(folder, "filepath,title\na.jpg,x\n")
