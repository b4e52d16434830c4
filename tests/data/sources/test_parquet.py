import base64
import contextlib
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from tests.data import serving
from tests.data.making import caption_shards, encode, make_files, pixels, write_parquet
from tests.data.serving import FaultyServer
from vqclip.data import RawSample, parse_source
from vqclip.data.sources import parquet
from vqclip.data.sources.base import MAX_BYTES
from vqclip.data.sources.parquet import ParquetConfig, ParquetStream
from vqclip.errors import ConfigError, DataError, StorageError, VqclipError

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'vqclip[parquet]'")
import pyarrow.parquet as pq  # noqa: E402

IMAGES = [encode(pixels(number)) for number in range(10)]
CAPTIONS = [f"caption {number}" for number in range(10)]
NO_TEXT = pyarrow.array([None] * 10, "string")
TWICE = pyarrow.StructArray.from_arrays([IMAGES, IMAGES], ["bytes"] * 2)
STORED = ["coded", "lists", "views", "nested", "spelled", "null", "inside", "dicts", "dict", "rows", "talks", "nulls"]
TALKS = [[{"from": "human", "value": "?"}, {"from": "gpt", "value": each}] for each in CAPTIONS]


def write(path: Path, columns: dict | None = None, group: int = 4, **options) -> Path:
    return write_parquet(path, columns or {"image": IMAGES, "caption": CAPTIONS}, group, **options)


def read_all(path: Path | str, **options) -> list[RawSample]:
    source = ParquetConfig(path=str(path), **options).build()
    return [source.read(index) for index in range(len(source))]


def refusal(path: Path | str, **options) -> str:
    with pytest.raises(VqclipError) as error:
        read_all(path, **options)
    return str(error.value)


EXPECTED = [RawSample(image, (caption,)) for image, caption in zip(IMAGES, CAPTIONS, strict=True)]


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"image": IMAGES, "caption": CAPTIONS}, {}),
        ({"caption": CAPTIONS, "image": [{"bytes": each, "path": "x.jpg"} for each in IMAGES]}, {}),
        ({"pic": IMAGES, "words": [[each] for each in CAPTIONS], "n": list(range(10))}, {"captions": "words"}),
        ({"image": IMAGES, "en": CAPTIONS, "de": NO_TEXT, "url": CAPTIONS}, {"captions": ("en", "de")}),
        ({"jpg": IMAGES, "txt": CAPTIONS, "__key__": CAPTIONS}, {}),
        ({"image": [{"bytes": None, "path": f"{n}.jpg"} for n in range(10)], "caption": CAPTIONS}, {}),
        ({"picture": IMAGES, "caption_id": CAPTIONS, "long_caption": CAPTIONS}, {}),
    ],
    ids=["bytes", "struct", "lists", "several columns", "webdataset", "paths in structs", "similar name"],
)
def test_rows_are_samples(tmp_path: Path, columns: dict, options: dict) -> None:
    for number, image in enumerate(IMAGES):
        (tmp_path / f"{number}.jpg").write_bytes(image)
    path = write(tmp_path / "a.parquet", columns)
    assert read_all(path, **options) == EXPECTED
    write(tmp_path / "b.parquet", columns, compression="zstd")
    assert read_all(tmp_path, **options) == EXPECTED * 2
    assert read_all(f"{tmp_path}/{{b,a}}.parquet", **options) == EXPECTED * 2


@pytest.mark.parametrize("columns", [None, {"image": ["a.jpg"], "caption": ["x"]}], ids=["bytes", "paths"])
def test_splits_that_are_read_together_are_noted(tmp_path: Path, columns: dict | None) -> None:
    (tmp_path / "a.jpg").write_bytes(IMAGES[0])
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / f"{name}.parquet", columns)
    note = f"files of splits test (1), train (2) are read together; the path {tmp_path}/*train*.parquet reads one"
    assert note in ParquetConfig(path=str(tmp_path)).build().notes
    assert "splits" not in " ".join(parse_source(f"{tmp_path}/train*.parquet").build().notes)  # its kind is plain


def test_rows_are_chosen_by_a_column(tmp_path: Path) -> None:
    splits = ["train", "val"] * 5
    path = write(tmp_path / "a.parquet", {"image": IMAGES, "caption": CAPTIONS, "split": splits})
    assert read_all(path) == EXPECTED
    assert "column 'split' are read; where: {split: train}" in ParquetConfig(path=str(path)).build().notes[1]
    assert read_all(path, where={"split": ("val",)}) == EXPECTED[1::2]
    assert "or with the values of where" in refusal(path, where={"split": "test"})
    path = write(tmp_path / "b.parquet", {"image": IMAGES, "label": [*"abcdefghij"], "split": splits})
    assert ParquetConfig(path=str(path), where={"split": "val"}).build().classnames == tuple("bdfhj")


def test_left_out_rows_divide_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_PIECE_ROWS", 2)  # images span pieces
    columns = {"image": [IMAGES[row // 3] for row in range(12)], "caption": [f"c {row}" for row in range(12)]}
    path = write(tmp_path / "a.parquet", {**columns, "lang": ["en", "de", "en"] * 4}, group=2)
    expected = [RawSample(IMAGES[image], (f"c {3 * image}", f"c {3 * image + 2}")) for image in range(4)]
    assert read_all(path, where={"lang": "en"}) == expected
    path = write(tmp_path / "b.parquet", {**columns, "split": ["train"] + ["test"] * 11}, group=2)
    stream = ParquetStream(ParquetConfig(path=str(path), where={"split": "train"}))
    rows, seen = stream.rows, list[int]()
    monkeypatch.setattr(stream, "rows", lambda *given: (seen.append(row[0]) or row for row in rows(*given)))
    assert [[*stream.group(piece)] for piece in range(1, 6)] == [[]] * 5
    assert len(seen) < 30  # none reads on to the end of the file


def test_labels_become_prompts(tmp_path: Path) -> None:
    columns = {"image": IMAGES, "label": [number % 2 for number in range(10)]}
    path = write(tmp_path / "a.parquet", columns)
    options = {"classnames": ("cat", "dog"), "templates": ("a {c}", "the {c}")}
    assert read_all(path, **options)[1] == RawSample(IMAGES[1], ("a dog", "the dog"), 1)
    with mock.patch.object(ParquetStream, "rows", None):  # none is read to open it
        assert ParquetStream(ParquetConfig(path=str(path), **options)).classnames == ("cat", "dog")
    assert "classnames: missing: the classes are numbers" in refusal(path)
    text = refusal(path, classnames=("cat",))
    assert "row 1: label: class '1'; expected one of classnames, or its number, 0 to 0" in text
    wrong = write(tmp_path / "w.parquet", {**columns, "label": [1, 2] * 4 + [0, 0]})  # 0 comes after the wrong 2
    assert ParquetConfig(path=str(wrong), **options).build().read(8).label == 0
    shifted = write(tmp_path / "b.parquet", {**columns, "label": [1, 2] * 5})
    assert "a class has the number 2; expected 0 to 1" in refusal(shifted, classnames=("cat", "dog"))
    for stored, names in ((["n01440764", "n01443537"], ("tench", "goldfish")), (["cat", "dog"], ("cat", "dog"))):
        features = {"info": {"features": {"label": {"names": stored, "_type": "ClassLabel"}}}}
        table = pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps(features)})
        pq.write_table(table, path)
        source = ParquetConfig(path=str(path)).build()
        assert source.classnames == names
    assert source.templates == ("a photo of a {c}",)
    assert source.read(1) == RawSample(IMAGES[1], ("a photo of a dog",), 1)
    table = table.append_column("caption", [CAPTIONS])
    pq.write_table(table, path)
    assert read_all(path) == EXPECTED
    both = ParquetConfig(path=str(path), label="label").build()
    assert both.read(1) == RawSample(IMAGES[1], ("caption 1",), 1)
    assert both.templates == ()


def test_img2dataset_needs_no_settings(tmp_path: Path) -> None:
    lost = {2, 3, 9}
    columns = {
        "url": [f"http://nowhere/{number}" for number in range(10)],
        "caption": CAPTIONS,
        "key": [f"{number:09d}" for number in range(10)],
        "status": ["failed_to_download" if number in lost else "success" for number in range(10)],
        **{"error_message": [None] * 10, "width": [24] * 10, "exif": ["x"] * 10, "sha256": ["x"] * 10},
        "jpg": [None if number in lost else IMAGES[number] for number in range(10)],
    }
    write(tmp_path / "00000.parquet", columns)
    (tmp_path / "00000_stats.json").write_text("{}")
    source = parse_source(tmp_path).build()
    assert [source.read(index) for index in range(len(source))] == [EXPECTED[n] for n in range(10) if n not in lost]
    assert source.name(2).endswith("00000.parquet: row 4")
    assert source.place(2) == "00000.parquet/000000004"
    del columns["jpg"]  # its table of metadata beside tars
    write(tmp_path / "00000.parquet", columns)
    assert "its columns: url (string), caption" in refusal(tmp_path)
    caption_shards(tmp_path, (1,))
    assert parse_source(tmp_path).kind == "shards"


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"a": IMAGES, "b": IMAGES, "caption": CAPTIONS}, {}, "image: no column has a usual name of the images"),
        ({"image": TWICE, "caption": CAPTIONS}, {}, "name it, image=COLUMN; its columns: image (struct<"),
        ({"image": IMAGES, "words": CAPTIONS}, {}, "captions: no column has a usual name of captions"),
        ({"image": IMAGES, "caption": CAPTIONS}, {"image": "img"}, "no column 'img'; its columns: 'image', "),
        ({"image": IMAGES, "my.meta": [{"caption": "x"}] * 10}, {}, "no column has a usual name of captions"),
        ({"image": IMAGES, "caption": CAPTIONS}, {"captions": "image"}, "captions: column 'image' is binary; expected"),
        ({"image": IMAGES, "caption": CAPTIONS}, {"label": "image"}, "column 'image' is binary; expected class"),
        ({"image": IMAGES, "caption": pyarrow.nulls(10), "label": [0] * 10}, {}, "'caption' is null; expected text"),
    ],
)
def test_columns_that_are_not_plain(tmp_path: Path, columns: dict, options: dict, message: str) -> None:
    path = write(tmp_path / "a.parquet", columns)
    text = refusal(path, **options)
    assert message in text
    assert text.startswith(f"{path}: ")


def test_bad_rows_are_named(tmp_path: Path) -> None:
    columns = {"image": [None, *IMAGES[1:]], "caption": ["x", None, " ", "y" * 70_000, *CAPTIONS[4:]]}
    source = ParquetConfig(path=str(write(tmp_path / "a.parquet", columns))).build()
    for row, message in enumerate(["image is null", *[r"the caption \(caption\) is empty"] * 2, "of 70000 characters"]):
        with pytest.raises(DataError, match=rf"a\.parquet: row {row}: .*{message}"):
            source.read(row)
    assert source.read(4) == EXPECTED[4]


def test_an_image_that_is_too_large_is_a_bad_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, most = write(tmp_path / "a.parquet"), max(map(len, IMAGES))
    monkeypatch.setitem(MAX_BYTES, "image", most - 1)
    source = ParquetConfig(path=str(path)).build()
    with pytest.raises(DataError, match=rf"row \d+: \.\w+ of {most} bytes; at most {most - 1} are read") as error:
        source.read([*map(len, IMAGES)].index(most))
    assert error.value.kind == "too many bytes"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    assert "no such file or folder; expected a file, a folder of *.parquet" in refusal(path)
    assert "no *.parquet in this folder (it is empty)" in refusal(tmp_path)
    good = write(path, compression="none", use_dictionary=False).read_bytes()
    write(tmp_path / "b.parquet")
    for content in (b"", b"hello", good[:-20]):
        path.write_bytes(content)
        assert refusal(tmp_path).startswith(f"{path}: ")
        assert "copy it again, or leave it out" in refusal(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert "a.parquet" in refusal(path)
    write(tmp_path / "c" / "1.parquet")
    write(tmp_path / "c" / "2.parquet", {"image": IMAGES, "caption": list(range(10))})
    assert "2.parquet: caption: int64; " in refusal(tmp_path / "c")
    write(tmp_path / "d.parquet", {"image": pyarrow.array([], "binary"), "caption": pyarrow.array([], "string")})
    assert "d.parquet: has no rows with images" in refusal(tmp_path / "d.parquet")


def test_a_damaged_group_is_bad_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", compression="none", use_dictionary=False)
    good, at = path.read_bytes(), pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    path.write_bytes(good[:at] + b"\xff" * 20 + good[at + 20 :])
    source = ParquetConfig(path=str(path)).build()
    assert source.notes == ("4 of 10 samples cannot be used",)
    assert [source.read(index) for index in (3, 8)] == [EXPECTED[3], EXPECTED[8]]
    with pytest.raises(DataError, match=r"a\.parquet: row 7: row group 1 is damaged from row 4 on") as error:
        source.read(7)
    assert error.value.kind == "damaged shard"


def test_a_disk_without_room_is_refused_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet")
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    for _ in range(2):
        assert "has room for 100 bytes" in refusal(path)


@pytest.mark.parametrize("group", [3, 4, 100])
def test_a_row_for_each_caption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    monkeypatch.setattr(parquet, "_PIECE_ROWS", 3)  # images span pieces
    order = [0] * 5 + [1] * 7 + [2, 3, 3, 0]
    columns = {"image": [{"bytes": IMAGES[n], "path": f"{k}.jpg"} for k, n in enumerate(order)]}
    columns["caption"] = [None if k == 1 else f"caption {k}" for k in range(len(order))]
    source = ParquetConfig(path=str(write(tmp_path / "a.parquet", columns, group))).build()
    samples = [source.read(index) for index in range(len(source))]
    assert [IMAGES.index(sample.image) for sample in samples] == [0, 1, 2, 3, 0]
    assert [len(sample.captions) for sample in samples] == [4, 7, 1, 2, 1]
    assert source.notes[0] == "16 rows are 5 samples: neighbouring rows of one image are one"
    assert group != 100 or source.notes[1].startswith("1 samples have the same image as one in another place")
    inside = {"meta": [{"img": IMAGES[n]} for n in order], "caption": columns["caption"]}
    stream = parquet.ParquetStream(ParquetConfig(path=str(write(tmp_path / "c.parquet", inside, group))))
    first = next(stream.group(0))
    assert [{*row} for row in first.values] == [{"meta", "caption"}, *[{"caption"}] * 4]  # one image in memory
    columns["label"] = [k % 2 for k in range(len(order))]
    labelled = ParquetConfig(path=str(write(tmp_path / "b.parquet", columns)), label="label", classnames=("a", "b"))
    assert len(labelled.build()) == len(order)  # other labels are other samples


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pyarrow.array(CAPTIONS).dictionary_encode(), CAPTIONS),
        (pyarrow.array([[each] for each in CAPTIONS], pyarrow.large_list(pyarrow.large_string())), CAPTIONS),
        pytest.param(
            *(pyarrow.array([[each] for each in CAPTIONS], pyarrow.list_view(pyarrow.string_view())), CAPTIONS),
            marks=pytest.mark.skipif(int(pyarrow.__version__.partition(".")[0]) < 25, reason="writes no views"),
        ),
        (pyarrow.array([[[each, None], []] for each in CAPTIONS]), CAPTIONS),
        (pyarrow.array([json.dumps([each]) for each in CAPTIONS]), CAPTIONS),
        (pyarrow.array([json.dumps([each, None]) for each in CAPTIONS]), CAPTIONS),
        (pyarrow.array([[json.dumps([each])] for each in CAPTIONS]), [json.dumps([each]) for each in CAPTIONS]),
        (pyarrow.array([{"en": [each]} for each in CAPTIONS]), CAPTIONS),
        (pyarrow.array([{"raw": each} for each in CAPTIONS]), CAPTIONS),
        (pyarrow.array([[{"raw": each, "tokens": ["x"]}] for each in CAPTIONS]), CAPTIONS),
        (pyarrow.array(TALKS), CAPTIONS),
        (pyarrow.array([[each], None, [None, " "]][n % 3] for n, each in enumerate(CAPTIONS)), CAPTIONS[::3]),
    ],
    ids=STORED,
)
def test_captions_however_they_are_stored(tmp_path: Path, values: object, expected: list[str]) -> None:
    source = ParquetConfig(path=str(write(tmp_path / "a.parquet", {"IMG": IMAGES, " Caption": values}))).build()
    assert "others: ' Caption." not in "".join(source.notes)  # a part of what is read
    found = []
    for index in range(10):
        with contextlib.suppress(DataError):
            found += source.read(index).captions
    assert found == expected


def test_images_however_they_are_stored(tmp_path: Path) -> None:
    (tmp_path / "5.jpg").write_bytes(IMAGES[5])
    texts = [base64.b64encode(image).decode() for image in IMAGES]
    texts[3] = f"data:image/jpeg;base64,{texts[3]}"
    texts[5] = "5.jpg"
    assert read_all(write(tmp_path / "a.parquet", {"image_bytes": texts, "caption": CAPTIONS})) == EXPECTED
    bitmap = encode(pixels(0), "BMP")
    texts[5] = base64.b64encode(bitmap).decode()
    assert read_all(write(tmp_path / "a.parquet", {"image": texts, "caption": CAPTIONS}))[5].image == bitmap
    for columns in ({"meta": [{"path": "5.jpg"}]}, {"images": [["5.jpg"]]}, {"meta": [{"jpg": IMAGES[5]}]}):
        path = write(tmp_path / "a.parquet", {**columns, "text": ["x"]})
        assert read_all(path) == [RawSample(IMAGES[5], ("x",))]
    columns = {"image": [[None], [], [], [texts[0]]], "text": [*"abcd"]}
    source = ParquetConfig(path=str(write(tmp_path / "l.parquet", columns))).build()
    assert (len(source), source.read(3)) == (4, RawSample(IMAGES[0], ("d",)))
    for row in range(3):
        with pytest.raises(DataError, match=f"row {row}: image is null"):
            source.read(row)
    numbers = pyarrow.array([list(image) for image in IMAGES], pyarrow.list_(pyarrow.uint8()))
    assert read_all(write(tmp_path / "b.parquet", {"jpg": numbers, "caption": CAPTIONS})) == EXPECTED
    structs = [{"bytes": None if n == 5 else image, "path": f"{n}.jpg"} for n, image in enumerate(IMAGES)]
    structs[7] = {"bytes": None, "path": "../x.jpg"}
    source = ParquetConfig(path=str(write(tmp_path / "c.parquet", {"image": structs, "caption": CAPTIONS}))).build()
    assert [source.read(index) for index in (4, 5, 6)] == EXPECTED[4:7]
    with pytest.raises(DataError, match="row 7: ../x.jpg: leaves the folder"):
        source.read(7)
    lists = [[{"bytes": image, "path": ""}] * (1 + (n == 8)) for n, image in enumerate(IMAGES)]
    source = ParquetConfig(path=str(write(tmp_path / "d.parquet", {"images": lists, "caption": CAPTIONS}))).build()
    assert [source.read(index) for index in range(8)] == EXPECTED[:8]
    with pytest.raises(DataError, match="row 8: images has 2 images; expected one"):
        source.read(8)


@pytest.mark.parametrize("stored", ["string", "dictionary", "digits", "floats", "booleans", "inside"])
def test_labels_however_they_are_stored(tmp_path: Path, stored: str) -> None:
    names = [("dog", "cat", None)[n % 3] for n in range(10)]
    numbers = [{"cat": 0, "dog": 1}.get(name or "") for name in names]
    values = {
        "string": pyarrow.array(names),
        "dictionary": pyarrow.array(names).dictionary_encode(),
        "digits": pyarrow.array([None if n is None else str(n) for n in numbers]),
        "floats": pyarrow.array(numbers, pyarrow.float64()),
        "booleans": pyarrow.array(numbers).cast("bool"),
        "inside": pyarrow.array([{"Species": name, "id": 1} for name in names]),
    }[stored]
    path = write(tmp_path / "a.parquet", {"image": IMAGES, "Species": values})
    found = stored in ("string", "dictionary", "inside")
    source = ParquetConfig(path=str(path), classnames=() if found else ("cat", "dog")).build()
    assert source.classnames == ("cat", "dog")
    assert [source.read(n).label for n in (0, 1, 3)] == [1, 0, 1]
    with pytest.raises(DataError, match=r"row 2: Species(\.Species)?: the class is empty"):
        source.read(2)
    assert "3 of 10 samples cannot be used" in source.notes


@pytest.mark.parametrize("ranges", [True, False])
def test_files_at_urls(tmp_path: Path, server: FaultyServer, ranges: bool) -> None:
    write(tmp_path / "0.parquet")
    url, server.ranges = server.add(tmp_path), ranges
    options = {"remote": {"tries": 1}}
    assert read_all(f"{url}/0.parquet?key=x", **options) == EXPECTED
    before = len(server.requests)
    assert read_all(f"{url}/0.parquet?key=x", **options) == EXPECTED  # it is packed
    assert len(server.requests) == before
    assert ParquetConfig(path=f"{url}/0.parquet?key=x").build().fingerprint == (
        ParquetConfig(path=str(tmp_path / "0.parquet")).build().fingerprint
    )
    server.files["/0.parquet"] = b"PAR1"
    assert "0.parquet: cannot be read as Parquet" in refusal(f"{url}/0.parquet", **options)
    server.files["/0.parquet"] = (tmp_path / "0.parquet").read_bytes()
    assert read_all(f"{url}/0.parquet", **options) == EXPECTED


def test_images_at_urls(tmp_path: Path, server: FaultyServer, cache: Path, pauses: list[float]) -> None:
    for number, image in enumerate(IMAGES):
        server.files[f"/{number}.jpg"] = image
    urls = [f"{server.url}/{number}.jpg?secret=5{number}" for number in range(10)]
    path = write(tmp_path / "a.parquet", {"image": urls, "caption": CAPTIONS})
    text = refusal(path)
    assert text.endswith("URLs in tables are not fetched unless urls: fetch is set")
    assert "secret=5" not in text
    assert not server.requests
    server.faults["/0.jpg"] = [serving.status(503)]
    for _ in range(2):
        assert read_all(path, urls="fetch") == EXPECTED
    assert len(server.requests) == 11
    shutil.rmtree(cache / "packed")
    server.for_ever["/1.jpg"] = serving.status(404)
    assert "not found" in refusal(path, urls="fetch")
    source = ParquetConfig(path=str(path), urls="fetch_or_replace", remote={"tries": 2}).build()
    with pytest.raises(DataError, match="row 1: .*not found") as error:
        source.read(1)
    assert error.value.kind == "gone"
    shutil.rmtree(cache / "packed")
    server.for_ever["/1.jpg"] = lambda handler, body: serving.answer(handler, b"\n<!DOCTYPE html><html>")
    assert "the server sent a page (HTML) instead of an image" in refusal(path, urls="fetch")
    server.for_ever["/1.jpg"] = serving.status(503)
    assert "HTTP 503" in refusal(path, urls="fetch_or_replace", remote={"tries": 2})
    server.for_ever["/1.jpg"] = lambda handler, body: serving.answer(handler, bytes(4 << 20), length=65 << 20)
    with pytest.raises(DataError, match="has 68157440 bytes"):
        ParquetConfig(path=str(path), urls="fetch_or_replace").build().read(1)


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"Parquet needs the package pyarrow, .* pip install 'vqclip\[parquet\]'"):
        parse_source(path).build()
    with pytest.raises(ConfigError, match="expected prompts with"):
        parse_source(path, ["templates=[x]"])


def test_paths_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"images/{number}.jpg" for number in range(10)]
    for name, image in zip(names, IMAGES, strict=True):
        make_files(tmp_path, name, image)
    path = write(tmp_path / "a.parquet", {"filepath": names, "title": [None, *CAPTIONS[1:]], "width": [1] * 10})
    source = parse_source(path).build()
    with monkeypatch.context() as patch:
        patch.setattr(ParquetConfig, "files", lambda _: pytest.fail("looks for files at every sample"))
        assert [source.read(index) for index in range(1, 10)] == EXPECTED[1:]
    assert source.name(3) == f"{path}: row 3: images/3.jpg"
    with pytest.raises(DataError, match="row 0: images/0.jpg: the caption is empty"):
        source.read(0)
    write(path, {"filepath": names, "label": [7, *[0] * 9]})
    labelled = ParquetConfig(path=str(path), classnames=("cat",), templates=("a {c}",)).build()
    assert labelled.read(3) == RawSample(IMAGES[3], ("a cat",), 0)
    with pytest.raises(DataError, match="row 0: .*class .7.; expected one of classnames"):
        labelled.read(0)
    write(path, {"filepath": ["../x.jpg"] * 10, "title": CAPTIONS})
    assert "leaves the folder" in refusal(path)


def test_tables_at_urls_name_no_files(tmp_path: Path, server: FaultyServer) -> None:
    write(tmp_path / "0.parquet", {"path": ["/etc/passwd"] * 10, "title": CAPTIONS})
    assert "a table at a URL has images or URLs in it" in refusal(f"{server.add(tmp_path)}/0.parquet")


def test_a_url_among_images_is_not_fetched(tmp_path: Path, server: FaultyServer) -> None:
    server.files["/1.jpg"] = IMAGES[1]
    images = [{"bytes": IMAGES[0], "path": None}, {"bytes": None, "path": f"{server.url}/1.jpg"}]
    path = write(tmp_path / "a.parquet", {"image": images, "caption": CAPTIONS[:2]})
    assert "row 1: " in refusal(path)
    assert refusal(path).endswith("URLs in tables are not fetched unless urls: fetch is set")
    assert not server.requests
    assert read_all(path, urls="fetch") == EXPECTED[:2]


def test_a_server_that_fails_makes_no_bad_rows(tmp_path: Path, server: FaultyServer) -> None:
    write(tmp_path / "0.parquet")
    config = ParquetConfig(path=f"{server.add(tmp_path)}/0.parquet", remote={"tries": 1})
    stream = parquet.ParquetStream(config)
    rows = stream.rows(0, 0, stream.stored)
    next(rows)
    server.for_ever["/0.parquet"] = serving.status(503)
    with pytest.raises(StorageError, match="HTTP 503"):
        list(rows)
