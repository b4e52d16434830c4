import inspect
import json
import os
import sys
from pathlib import Path

import pytest

from tests.data.making import NOT_UTF8, make_files
from tests.evaluation.made import image_folder, png
from vqclip.data import FileSource, FolderConfig, parse_source
from vqclip.errors import DataError
from vqclip.io.files import walk_files


def images_of(path) -> FileSource:
    return FolderConfig(path=path).build()


def test_classes_prompts_and_images(tmp_path):
    source = images_of(image_folder(tmp_path, per_class=3))
    (tmp_path / "green" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    source = images_of(tmp_path)
    assert source.classnames == ("dark red", "green")
    assert [source.read(i).label for i in range(len(source))] == [0, 0, 0, 1, 1, 1]
    assert source.read(5)[:3] == (png((30, 220, 30), seed=2), ("a photo of a green",), 1)
    assert source.name(5) == str(tmp_path / "green" / "2.png")
    before = source.fingerprint
    (tmp_path / "green" / "2.png").unlink()
    assert images_of(tmp_path).fingerprint != before
    with pytest.raises(DataError, match=r"2\.png: cannot be read: No such file"):
        source.read(5)


def test_folders_of_systems_are_not_entered(tmp_path, monkeypatch):
    image_folder(tmp_path)
    for name in ("lost+found", "@Recycle"):
        (tmp_path / name).mkdir()
    listdir = os.listdir

    def fail(path):
        if Path(path).name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", fail)
    assert images_of(tmp_path).classnames == ("dark red", "green")


def test_names_of_any_bytes(tmp_path):
    """Names are for the text tower too: Latin-1, or escapes where that gives controls (as names in cp850 do)."""
    folder, names = tmp_path / NOT_UTF8, (b"a_\xe9", b"b\x82", "naïve".encode())
    for number, name in enumerate(names):
        (folder / "classes" / os.fsdecode(name)).mkdir(parents=True)
        (folder / "classes" / os.fsdecode(name) / f"{NOT_UTF8}.png").write_bytes(png((number, 2, 3)))
    source = images_of(folder / "classes")
    assert source.classnames == ("a é", "b\\udc82", "naïve")
    assert [source.read(n).captions for n in range(3)] == [(f"a photo of a {each}",) for each in source.classnames]
    assert parse_source(str(folder / "classes")).path == str(folder / "classes")
    for each in (source.classnames, source.fingerprint, source.shards, source.notes, source.name(0)):
        json.dumps(each, ensure_ascii=False).encode()
    assert FolderConfig(path=folder / "classes" / "naïve", captions="names").build().read(0).captions == ("café",)


def test_templates_are_read(tmp_path):
    image_folder(tmp_path)
    (tmp_path / "zeroshot_classification_templates.txt").write_text("one {c}\nsome {c}\n")
    assert images_of(tmp_path).read(0).captions == ("one dark red", "some dark red")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("one {c}\na picture\n")
    with pytest.raises(DataError, match=r"templates\.txt:2: no {c} for the class name in 'a picture'"):
        images_of(tmp_path)


def test_errors_name_the_folder(tmp_path):
    make_files(tmp_path / "both", "images/0.jpg captions/0.txt")
    with pytest.raises(DataError, match=f"Name the folder of both: {tmp_path}/both$"):
        parse_source(tmp_path / "both" / "images").build()
    make_files(tmp_path / "twice", "dark_green/0.jpg dark__green/0.jpg", b"x")
    (tmp_path / "twice" / "dark__green").rename(tmp_path / "twice" / "dark green")
    with pytest.raises(DataError, match="the folders dark green, dark_green are all the class 'dark green'"):
        images_of(tmp_path / "twice")
    tmp_path = tmp_path / "empty"
    tmp_path.mkdir()
    with pytest.raises(DataError, match=r"none: no such folder"):
        images_of(tmp_path / "none")
    with pytest.raises(DataError, match="no subfolder; .*got: nothing"):
        images_of(tmp_path)
    make_files(tmp_path, "cat/a.psd")
    with pytest.raises(DataError, match=r"cat: no image .* got: a\.psd; .* if it contains the classes, name it"):
        images_of(tmp_path)


def test_links_that_make_loops(tmp_path):
    image_folder(tmp_path, per_class=1)
    (tmp_path / "green" / "above").symlink_to("..")
    for name in ("self", "green/self.jpg"):
        (tmp_path / name).symlink_to(Path(name).name)
    for options in ([], ["captions=txt"]):
        assert len(parse_source(tmp_path, options).build()) == 3  # the link to itself is a bad sample


def test_links_that_multiply(tmp_path):
    for number in range(14):
        (tmp_path / f"{number:02d}").mkdir()
        for name in "ab":
            (tmp_path / f"{number:02d}" / name).symlink_to(f"../{number + 1:02d}")
    with pytest.raises(DataError, match="symbolic links lead to it in more than 1000 ways"):
        FolderConfig(path=tmp_path, captions="txt").build()


def test_what_is_left_out_is_counted(tmp_path):
    assert images_of(image_folder(tmp_path)).notes == ()
    (tmp_path / "__MACOSX").mkdir()
    make_files(tmp_path, "green/a.psd dark_red/b.SVG green/.DS_Store green/0.jpg green/more/still/c.jpg d.png README")
    source = images_of(tmp_path)
    assert len(source) == 5
    assert source.notes == (
        "1 file named as another image but for the ending; are these masks? image_endings chooses",
        "left out: 2 files without an image's ending in the folders of classes (.svg 1, .psd 1)",
        "left out: 1 file with an image's ending in folders below those of classes",
        "left out: 1 file with an image's ending beside the folders of classes",
    )


PARTS = "are parts of a data set, not classes; name one of them as the path: "


@pytest.mark.parametrize(
    ("files", "overrides", "expected"),
    [
        ("train/0.jpg train/metadata.csv test/0.jpg test/metadata.csv", [], PARTS),
        ("a/0.jpg a/metadata.jsonl b/0.jpg", [], PARTS),
        ("cars_train/0.jpg cars_test/0.jpg", [], PARTS + ".*/cars_train, .*/cars_test$"),
        ("trainA/0.jpg trainB/0.jpg testA/0.jpg", [], PARTS),
        ("train/0.jpg test/0.jpg train_masks/0.gif", [], PARTS),
        ("long_train/0.jpg old_train/0.jpg", [], ["long train", "old train"]),
        ("train_a/0.jpg test_b/0.jpg", [], ["test b", "train a"]),
        ("00000/0.jpg 00000/0.txt 00000.parquet 00000_stats.json", [], ["00000/0.txt"]),
        (
            "train2017/0.jpg val2017/0.jpg annotations/captions_train2017.json annotations/captions_val2017.json",
            [],
            "are parts of a data set, not classes; a table with their captions is named as the path: .*captions_tr",
        ),
        ("train/cat/0.jpg test/cat/0.jpg", [], PARTS + ".*/train, .*/test$"),
        ("Images/0.jpg captions.txt=file_name,text\\n0.jpg,captions.txt", [], ["captions.txt", "images found in"]),
        ("pics/0.jpg t.csv=name,title\\n0.jpg,t.csv", [], ["t.csv", "images found in"]),
        ('pics/0.jpg package.json={"name":"x","version":"1"}', [], "package.json: names no image of .*; expected"),
        ("pics/0.jpg t.csv u.csv", [], "with images, pics, which .* named as the path: .*t.csv, .*u.csv; or set"),
        ("0.jpg 0.jpg.json=[] 1.png", [], "2 images without captions; .*; captions in the .json beside them"),
        (
            "pics/0.jpg pics/1.jpg t.csv=name,title,split\\n0.jpg,x,val\\n1.jpg,y,train",
            [],
            ["x", "y", "t.csv as the path, where: {split: train} reads some"],
        ),
        ("pics/a/0.jpg t.csv", [], "with images, pics, which .* named as the path: .*t.csv; or set"),
        ("0.jpg 1.jpg t.csv=name,title\\n0.jpg,t.csv", [], ["t.csv", "1 file that t.csv does not name, such as 1.jpg"]),
        ("JPEGImages/0.jpg annotations.xml", [], "JPEGImages, which would be the class of all; .* or set captions"),
        ("cub/001.a/0.jpg classes.txt parts/x.txt", [], "images, cub, which would .* as the path: .*/cub; a table"),
        ("002.a_b/0.jpg 010.a/0.jpg", [], ["a b", "a", "before the names of classes are left out: 002.a b, ..."]),
        ("n01440764-tench/0.jpg n01443537-shark/0.jpg", [], ["tench", "shark"]),
        ("1_a/0.jpg b/0.jpg", [], ["1 a", "b"]),
        ("1_a/0.jpg 2_a/0.jpg", [], ["1 a", "2 a"]),
        ("images/0.jpg captions/0.txt captions/1.txt", [], ["captions/0.txt", "in the folder captions", "such as cap"]),
        ("images/a/0.jpg txt/a/0.txt", [], ["txt/a/0.txt"]),
        ("cat/0.jpg dog/0.jpg text/0.txt", [], "text has a .txt with the name of each image"),
        ("0.jpg captions/0.txt", ["captions=txt_lines"], ["captions/0.txt"]),
        ("0.jpg 0.txt=a,\\nb 1.jpg 1.txt=c,\\nd", [], ["a,\nb", "c,\nd", "the first 2 .txt have several lines"]),
        ("images/0.jpg masks/0.png", [], "subfolders are images, masks, of which images has the name of all images"),
        ("image/0.jpg text/0.png", [], ["image", "text"]),
        ("images/0.jpg labels/0.txt", [], "labels has a .txt with the name of each image; if these are captions, call"),
        ("train/0.jpg car/0.jpg", [], ["car", "train"]),
        ("my_images_1/0.jpg my_images_2/1.jpg t.csv", [], "images_1, .* differ by a number.* the path: .*/t.csv; or"),
        ("my_images_1/0.jpg my_images_2/1.jpg", [], ["my images 1", "my images 2"]),
        ("my_images_1/0.jpg my_images_2/1.jpg t.csv", ["captions=classes"], ["my images 1", "my images 2"]),
        ("0/0.jpg 10/0.jpg 2/0.jpg", [], ["0", "2", "10", "the classes are numbers"]),
        ("n01440764/0.jpg n01443537/0.jpg", [], ["tench", "goldfish", "named tench, goldfish as in"]),
        ("n01440764/0.jpg n00004475/0.jpg", [], ["organism", "tench"]),
        ("n01440764/0.jpg n99999999/0.jpg", [], ["n01440764", "n99999999", "the classes are WordNet ids without"]),
        ("0/0.jpg 2/0.jpg", ["classnames=[a,b,c]"], ["a", "c"]),
        ("1/0.jpg 2/0.jpg", ["classnames=[a,b]"], ["a", "b"]),
        ("x/0.jpg y/0.jpg", ["classnames=[a,b]"], ["a", "b"]),
        ("x/0.jpg y/0.jpg", ["classnames=[y,x]"], ["x", "y"]),
        ("x/0.jpg y/0.jpg", ["classnames=[a,b,c]"], "classnames: got 3 for 2 folders"),
        ("0.jpg 0.txt 1.txt 2.psd", [], ["0.txt", "1 file .txt without an image", "(.psd 1)"]),
        ("0.jpg 0.txt 0.png", [], ["0.txt", "1 file named as another image but for the ending, such as 0.png"]),
        ("0.jpg 0.txt 0.png", ["image_endings=[.png]"], ["0.txt", "(.jpg 1)"]),
        ("0.jpg 0.caption 1.JPG 1.caption", [], ["0.caption", "1.caption"]),
        ("0.JPG 0.TXT", [], ["0.TXT"]),
        ("0.jpg 1.jpg a.csv", [], "a.csv: .* or set captions: classes, txt or names"),
        ("0.jpg 1.jpg a.csv b.csv", [], "2 images without captions; expected a .txt .* named as the path: .*a.csv"),
        ("0.jpg 1.jpg 2.jpg 0.txt", [], "3 images, of which 1 have a .txt and 0 a .json of the same name"),
        ("cat/0.jpg dev_board/0.jpg eval_board/0.jpg", [], ["cat", "dev board", "eval board"]),
        ("bounding_box_train/0.jpg bounding_box_test/0.jpg query/0.jpg", [], PARTS),
        ("0.jpg 0.txt 1.jpg 1.txt=car_0.5_0.5_0.25_0.25", [], r"1\.txt: has numbers"),
        ("0.jpg 0.txt=0_0.5_0.5_0.25_0.25", [], r"0\.txt: has numbers, such as the boxes of YOLO"),
        ("0.jpg 0.jpg.txt 1.png 1.png.txt", [], ["0.jpg.txt", "1.png.txt"]),
        ("0.jpg 0.jpg.txt 0.png 0.png.txt", [], ["0.jpg.txt", "0.png.txt"]),
        ("cat/0.jpg cat/0.jpg.json dog/1.jpg dog/1.jpg.json", [], ["cat", "dog"]),
        ("0.jpg 0_caption.txt 0.txt.bak", [], ["0_caption.txt", "(.bak 1)"]),
        ("images/0.jpg captions/0.caption.txt", [], ["captions/0.caption.txt"]),
        ("train/images/0.jpg train/captions/0.txt", [], PARTS + ".*/train$"),
        ("cat/pics/0.jpg cat/boxes.txt dog/pics/0.jpg", [], ["cat", "dog", "of each class are in its folder pics"]),
        ("cat/0.jpg dog/0.jpg lost+found/x $RECYCLE.BIN/0.jpg", [], ["cat", "dog"]),
        ("pics/0.jpg metadata.csv", [], ["metadata.csv", "images found in"]),
        ("cat/0.jpg metadata.json", [], "none of the first .* or set captions: classes, txt or names"),
        ("0.heic 1.heic", [], "0.heic: an image that is not read; convert it to JPEG or PNG"),
        ("0.jpg 0.txt @eaDir/0.jpg/THUMB.jpg a/@eaDir/0.jpg/THUMB.jpg a/1.jpg a/1.txt", [], ["0.txt", "a/1.txt"]),
        ("cat/0.jpg dog/0.jpg @eaDir/0.jpg __MACOSX/0.jpg", [], ["cat", "dog"]),
        ("0.jpg 1.jpg metadata.csv", [], ["metadata.csv", "1 file that metadata.csv does not name, such as 1.jpg"]),
    ],
)
def test_folders_as_people_have_them(tmp_path, files, overrides, expected):
    """Expected are the captions, and then parts of the notes; the captions of classes are their names."""
    for name in files.split():
        name, _, text = name.partition("=")
        text = text.replace("\\n", "\n") if "," in text else text.replace("_", " ") or name
        text = f"file_name,text\n0.jpg,{name}\n" if "metadata" in name else text
        make_files(tmp_path, name, b"[1]" if name == "metadata.json" else text.encode())
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            parse_source(tmp_path, overrides).build()
        return
    source = parse_source(tmp_path, overrides).build()
    found = [source.read(index).captions[0].removeprefix("a photo of a ") for index in range(len(source))]
    assert found == expected[: len(found)]
    for note in expected[len(found) :]:
        assert note in "\n".join(source.notes)


def test_folders_may_lie_deep(tmp_path):
    deep = tmp_path.joinpath("a", *["d"] * 60)
    deep.mkdir(parents=True)
    (deep / "1.jpg").write_bytes(b"")
    (deep / "1.txt").write_text("deep")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 40)
    try:
        assert [*walk_files(tmp_path)] == [f"a/{'d/' * 60}1.{ending}" for ending in ("jpg", "txt")]
    finally:
        sys.setrecursionlimit(limit)


def test_json_beside_images_without_texts(tmp_path):
    """As img2dataset writes them with `output_format: files` where a caption is in the JSON alone."""
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(png((200, 30, 30)))
        (tmp_path / f"{name}.json").write_text(json.dumps({"caption": f"caption {name}"}))
    assert images_of(tmp_path).read(1).captions == ("caption b",)
    (tmp_path / "b.json").write_text('{"text": "x"}')
    with pytest.raises(DataError, match="no caption under 'caption'; its keys: 'text'; json_keys names others"):
        images_of(tmp_path).read(1)
    for name in "abc":
        (tmp_path / f"{name}.json").rename(tmp_path / f"{name}.png.json")
    assert images_of(tmp_path).read(2).captions == ("caption c",)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text {name}\r\n\r\n", encoding="utf-16")
    assert images_of(tmp_path).read(1).captions == ("text b",)


def test_an_edited_table_in_a_folder_is_read_again(tmp_path):
    image_folder(tmp_path / "pics")
    name = next((tmp_path / "pics").rglob("*.[jp][pn]g")).relative_to(tmp_path)
    for caption in ("first", "second and longer"):
        (tmp_path / "t.csv").write_text(f"image,caption\n{name},{caption}\n")
        source = parse_source(tmp_path, ["captions=metadata"]).build()
        assert source.read(0).captions == (caption,)
