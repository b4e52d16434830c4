"""Rows of Parquet files as samples."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import shutil
import time
from pathlib import Path

import pytest

from tests.data import serving
from tests.data.making import caption_shards, encode, pixels
from tests.data.serving import FaultyServer
from tests.ranks import RankPool
from vqclip.data import RawSample, parse_source, prepare_sources
from vqclip.data.sources import row_groups
from vqclip.data.sources.parquet import ParquetConfig
from vqclip.errors import ConfigError, DataError, StorageError, VqclipError

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'vqclip[parquet]'")
import pyarrow.parquet as pq  # noqa: E402

IMAGES = [encode(pixels(number)) for number in range(10)]
CAPTIONS = [f"caption {number}" for number in range(10)]


def write(path: Path, columns: dict | None = None, group: int = 4, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(columns or {"image": IMAGES, "caption": CAPTIONS})
    pq.write_table(table, path, row_group_size=group, **options)
    return path


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
        (
            {"image": IMAGES, "en": CAPTIONS, "de": pyarrow.array([None] * 10, "string"), "url": CAPTIONS},
            {"captions": ("en", "de")},
        ),
    ],
    ids=["bytes", "struct", "lists", "several columns"],
)
def test_rows_are_samples(tmp_path: Path, columns: dict, options: dict) -> None:
    path = write(tmp_path / "a.parquet", columns)
    assert read_all(path, **options) == EXPECTED
    write(tmp_path / "b.parquet", columns, compression="zstd")
    assert read_all(tmp_path, **options) == EXPECTED * 2
    assert read_all(f"{tmp_path}/{{b,a}}.parquet", **options) == EXPECTED * 2


def test_the_kind_is_plain_and_rows_have_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    for each in (path, tmp_path):
        source = parse_source(each).build()
        assert isinstance(source.config, ParquetConfig)
    assert source.name(7) == f"{path}: row 7"
    assert source.place(7) == "a.parquet/07"
    assert source.shards[0]["samples"] == 10
    with pytest.raises(IndexError):
        source.read(10)


def test_labels_become_prompts(tmp_path: Path) -> None:
    columns = {"image": IMAGES, "label": [number % 2 for number in range(10)]}
    path = write(tmp_path / "a.parquet", columns)
    options = {"classnames": ("cat", "dog"), "templates": ("a {c}", "the {c}")}
    assert read_all(path, **options)[1] == RawSample(IMAGES[1], ("a dog", "the dog"), 1)
    assert "classnames: missing; expected the names of the classes in column 'label'" in refusal(path)
    assert "label contains '1'; expected a class number, 0 to 0" in refusal(path, classnames=("cat",))
    features = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    table = pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, path)
    source = ParquetConfig(path=str(path)).build()
    assert source.classnames == ("cat", "dog")
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
        "error_message": [None] * 10,
        "width": [24] * 10,
        "exif": ["{}"] * 10,
        "sha256": ["x"] * 10,
        "jpg": [None if number in lost else IMAGES[number] for number in range(10)],
    }
    write(tmp_path / "00000.parquet", columns)
    (tmp_path / "00000_stats.json").write_text("{}")
    source = parse_source(tmp_path).build()
    assert [source.read(index) for index in range(len(source))] == [EXPECTED[n] for n in range(10) if n not in lost]
    assert source.name(2).endswith("row 4")
    del columns["jpg"]  # its table of metadata beside tars
    write(tmp_path / "00000.parquet", columns)
    assert "image: which column? none is plainly it; set image to one of url (string), caption" in refusal(tmp_path)
    caption_shards(tmp_path, (1,))
    assert parse_source(tmp_path).kind == "shards"


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"a": IMAGES, "b": IMAGES, "caption": CAPTIONS}, {}, "image: which column? a, b could all be it"),
        (
            {"image": pyarrow.StructArray.from_arrays([IMAGES, IMAGES], ["bytes"] * 2), "caption": CAPTIONS},
            {},
            "image: which column? none is plainly it; set image to one of image (struct<",
        ),
        ({"a": CAPTIONS}, {}, "image: which column? none is plainly it; set image to one of a (string)"),
        ({"image": IMAGES, "caption": CAPTIONS, "text": CAPTIONS}, {}, "It could be caption, text; set captions"),
        ({"image": IMAGES, "words": CAPTIONS}, {}, "captions: which column? None is called caption, captions, text"),
        (
            {"image": IMAGES, "caption": CAPTIONS},
            {"image": "img"},
            "image: no column 'img'; its columns: image (binary)",
        ),
        (
            {"image": IMAGES, "caption": CAPTIONS},
            {"image": "caption"},
            "image: got 'caption', a column of captions; set",
        ),
        ({"image": IMAGES, "caption": CAPTIONS}, {"captions": "image"}, "captions: column 'image' is binary; expected"),
        (
            {"image": IMAGES, "caption": CAPTIONS},
            {"label": "caption"},
            "label: column 'caption' is string; expected int",
        ),
        ({"image": IMAGES, "caption": CAPTIONS}, {"classnames": ("a",)}, "classnames: set, and no column is read as"),
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
    for row, message in enumerate(["image is null", "no caption under 'caption'", "no caption", "of 70000 characters"]):
        with pytest.raises(DataError, match=rf"a\.parquet: row {row}: .*{message}"):
            source.read(row)
    assert source.read(4) == EXPECTED[4]


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    assert "no such file or folder; expected a parquet, a folder of parquets" in refusal(path)
    assert "no *.parquet in this folder (it is empty)" in refusal(tmp_path)
    good = write(path, compression="none", use_dictionary=False).read_bytes()
    for content in (b"", b"hello", good[:-20], good[:50] + good[60:]):
        path.write_bytes(content)
        assert refusal(path).startswith(f"{path}: ")
    path.write_bytes(good.replace(IMAGES[5][100:200], bytes(100)))
    assert read_all(path) != EXPECTED  # no checksum in pages: like a tar
    path.write_bytes(good)
    at = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    path.write_bytes(good[:at] + b"\xff" * 20 + good[at + 20 :])
    assert f"{path}: row 4: row group 1 is damaged" in refusal(path)
    path.unlink()
    os.mkfifo(path)
    assert "a.parquet" in refusal(path)
    write(tmp_path / "c" / "1.parquet")
    write(tmp_path / "c" / "2.parquet", {"image": IMAGES, "caption": list(range(10))})
    assert "2.parquet: caption: int64; " in refusal(tmp_path / "c")
    write(tmp_path / "d.parquet", {"image": pyarrow.array([], "binary"), "caption": pyarrow.array([], "string")})
    assert "d.parquet: no rows with images in 1 file" in refusal(tmp_path / "d.parquet")
    monkeypatch.setattr(row_groups, "_MAX_GROUP_BYTES", 2000)
    assert "a row group of 0.00 GiB; at most" in refusal(tmp_path / "c" / "1.parquet")


def test_groups_that_are_larger_than_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal images are stored once; the footer says their size once."""
    path = write(tmp_path / "a.parquet", {"image": [os.urandom(99_999)] * 500, "caption": ["x"] * 500}, group=500)
    assert pq.ParquetFile(path).metadata.row_group(0).total_byte_size < 1 << 20
    monkeypatch.setattr(row_groups, "_MAX_GROUP_BYTES", 10 << 20)
    assert f"{path}: row 0: row group 0: a row group of 0.01 GiB" in refusal(path)


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    source = ParquetConfig(path=str(path)).build()
    before = source.fingerprint
    assert source.read(0)
    os.utime(path, ns=(1, 1))
    with pytest.raises(StorageError, match="a.parquet: the file has changed since it was indexed; start the run again"):
        source.read(0)
    path.unlink()
    with pytest.raises(StorageError, match="row 1: cannot be read: No such file"):
        source.read(1)
    write(path)
    assert ParquetConfig(path=str(path)).build().fingerprint == before
    shutil.copy(path, tmp_path / "b.parquet")
    assert ParquetConfig(path=str(tmp_path / "b.parquet")).build().fingerprint == before
    assert json.loads(json.dumps(before)) == before
    write(path, {"image": IMAGES[::-1], "caption": CAPTIONS})
    assert ParquetConfig(path=str(path)).build().fingerprint != before


def test_memory_is_bounded_and_slow_groups_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    images = [os.urandom(200_000) for _ in range(20)]
    path = write(tmp_path / "a.parquet", {"image": images, "caption": ["x"] * 20}, group=4)
    monkeypatch.setattr(row_groups, "_WORTH_A_WARNING", 1 << 19)
    with caplog.at_level(logging.WARNING, "vqclip.data"):
        source = ParquetConfig(path=str(path), memory_mib=2).build()
    assert "row groups of 1 MiB on average, 0.00 GiB in all, of which each process keeps 2 MiB" in caplog.text
    for index in range(20):
        assert source.read(index).image == images[index]
        assert 0 < source._rows._held <= 2 << 20
        assert len(source._rows._groups) <= 2
    assert len(pickle.dumps(source)) < 10_000
    caplog.clear()
    ParquetConfig(path=str(path), memory_mib=5).build()
    assert not caplog.text


def read_in_child(source: object, index: int, queue: multiprocessing.Queue) -> None:
    queue.put(source.read(index))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_read_too(tmp_path: Path, method: str) -> None:
    source = ParquetConfig(path=str(write(tmp_path / "a.parquet"))).build()
    assert source.read(1) == EXPECTED[1]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=read_in_child, args=(source, index, queue)) for index in (1, 9)]
    for child in children:
        child.start()
    assert sorted(queue.get(timeout=60).captions for _ in children) == [("caption 1",), ("caption 9",)]
    assert source.read(5) == EXPECTED[5]
    for child in children:
        child.join()


def test_files_at_urls(tmp_path: Path, server: FaultyServer) -> None:
    write(tmp_path / "0.parquet")
    url = server.add(tmp_path)
    options = {"remote": {"tries": 1}}
    assert read_all(f"{url}/0.parquet?key=x", **options) == EXPECTED
    assert len(server.requests) == 1
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
    shutil.rmtree(cache / "images")
    server.for_ever["/1.jpg"] = serving.status(404)
    source = ParquetConfig(path=str(path), urls="fetch").build()
    with pytest.raises(StorageError, match="not found"):
        source.read(1)
    source = ParquetConfig(path=str(path), urls="fetch_or_replace", remote={"tries": 2}).build()
    with pytest.raises(DataError, match="row 1: .*not found") as error:
        source.read(1)
    assert error.value.kind == "gone"
    assert not isinstance(error.value, StorageError)
    server.for_ever["/1.jpg"] = serving.status(503)
    with pytest.raises(StorageError, match="HTTP 503"):
        source.read(1)
    server.for_ever["/1.jpg"] = lambda handler, body: serving.answer(handler, b"", length=65 << 20)
    with pytest.raises(DataError, match="has 68157440 bytes"):
        source.read(1)


def test_fetched_images_are_bounded(server: FaultyServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vqclip.data.remote import RemoteConfig, fetch_image, image

    monkeypatch.setattr(image, "digest", lambda url: f"{len(url):02x}00{url[-2:]}")  # each measures the folder
    left_over = cache / "images" / "00" / "from a clock that was ahead"
    left_over.parent.mkdir(parents=True)
    left_over.write_bytes(bytes(1000))
    os.utime(left_over, (time.time() + 3600,) * 2)
    for number in range(10, 20):
        server.files[f"/{number}"] = bytes([number]) * 1000
        assert (
            fetch_image(f"{server.url}/{number}", RemoteConfig(cache_gib=5500 / 2**30), 5000) == bytes([number]) * 1000
        )
        kept = list((cache / "images").glob("*/*"))
        assert sum(each.stat().st_size for each in kept) <= 5500
    assert sorted(each.name[-2:] for each in kept) == ["16", "17", "18", "19"][-len(kept) :] or len(kept) == 5
    assert not left_over.exists()


def prepare_on_rank(folder: Path, cache: Path) -> tuple[int, dict]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VQCLIP_CACHE", str(cache))
        made: list[int] = []
        examine = row_groups.ParquetPart._examine
        monkeypatch.setattr(row_groups.ParquetPart, "_examine", lambda part: (made.append(1), examine(part))[1])
        config = ParquetConfig(path=str(folder))
        prepare_sources([config])
        return len(made), config.build().fingerprint


def test_ranks_share_the_indexing(ranks: RankPool, tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "data" / f"{number}.parquet")
    (first, one), (second, other) = ranks(2, prepare_on_rank, tmp_path / "data", tmp_path / "cache")
    assert sorted((first, second)) == [1, 2]
    assert one == other


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert "Parquet needs pyarrow: pip install 'vqclip[parquet]'" in refusal(path)
    with pytest.raises(ConfigError, match="expected prompts with"):
        parse_source(path, ["templates=[x]"])


def test_paths_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    for number, image in enumerate(IMAGES):
        (tmp_path / "images" / f"{number}.jpg").write_bytes(image)
    names = [f"images/{number}.jpg" for number in range(10)]
    path = write(tmp_path / "a.parquet", {"filepath": names, "title": [None, *CAPTIONS[1:]], "width": [1] * 10})
    source = parse_source(path).build()
    with monkeypatch.context() as patch:
        patch.setattr(ParquetConfig, "files", lambda _: pytest.fail("looks for files at every sample"))
        assert [source.read(index) for index in range(1, 10)] == EXPECTED[1:]
    assert source.name(3) == f"{path}: row 3: images/3.jpg"
    with pytest.raises(DataError, match="row 0: images/0.jpg: the caption is empty"):
        source.read(0)
    (tmp_path / "images" / "4.jpg").write_bytes(IMAGES[5])
    with pytest.raises(StorageError, match="row 4: .*image has changed since it was indexed"):
        source.read(4)
    before = source.fingerprint
    source = ParquetConfig(path=str(path)).build()
    assert source.fingerprint != before
    assert source.read(4).image == IMAGES[5]
    write(path, {"filepath": names, "label": [7, *[0] * 9]})
    assert "row 0: label contains '7'; expected a class number, 0 to 0" in refusal(path, classnames=("cat",))
    write(path, {"filepath": names, "label": [0] * 10})
    assert read_all(path, classnames=("cat",), templates=("a {c}",))[3] == RawSample(IMAGES[3], ("a cat",), 0)
    write(path, {"filepath": ["../x.jpg"] * 10, "title": CAPTIONS})
    assert "leaves the folder" in refusal(path)


@pytest.mark.parametrize("form", ["text", "struct"])
def test_a_null_in_the_first_row_of_paths(tmp_path: Path, form: str) -> None:
    names = [None, *(f"{number}.jpg" for number in range(1, 10))]
    for name in names[1:]:
        (tmp_path / name).write_bytes(IMAGES[int(name[0])])
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    images = names if form == "text" else pyarrow.array([{"path": name} for name in names], kind)
    path = write(tmp_path / "a.parquet", {"image": images, "caption": CAPTIONS})
    source = ParquetConfig(path=str(path)).build()
    assert [source.read(index) for index in range(1, 10)] == EXPECTED[1:]
    with pytest.raises(DataError, match="row 0: "):
        source.read(0)
    assert source.fingerprint["kind"] == "files"  # the images are watched


def test_tables_at_urls_name_no_files(tmp_path: Path, server: FaultyServer) -> None:
    write(tmp_path / "0.parquet", {"path": ["/etc/passwd"] * 10, "title": CAPTIONS})
    text = refusal(f"{server.add(tmp_path)}/0.parquet")
    assert "a table at a URL has images or URLs in it; paths are not read" in text


def test_a_url_among_images_is_not_fetched(tmp_path: Path, server: FaultyServer) -> None:
    server.files["/1.jpg"] = IMAGES[1]
    images = [{"bytes": IMAGES[0], "path": None}, {"bytes": None, "path": f"{server.url}/1.jpg"}]
    path = write(tmp_path / "a.parquet", {"image": images, "caption": CAPTIONS[:2]})
    assert "row 1: " in refusal(path)
    assert refusal(path).endswith("URLs in tables are not fetched unless urls: fetch is set")
    assert not server.requests
    assert read_all(path, urls="fetch") == EXPECTED[:2]
    write(path, {"image": [images[0], {"bytes": None, "path": "x.jpg"}], "caption": CAPTIONS[:2]})
    assert "row 1: x.jpg: a relative path beside images or URLs" in refusal(path)
