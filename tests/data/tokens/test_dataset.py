from __future__ import annotations

import json
import os
import pickle
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.making import write_tar
from vqclip.data.tokens import (
    IdLayout,
    Manifest,
    TokenDataset,
    TokenRecord,
    collate_tokens,
    id_type,
    open_shard,
    write_shard,
)
from vqclip.data.tokens.layout import strip_padding
from vqclip.data.tokens.manifest import Settings, ShardInfo, TokenizerInfo, json_file_bytes
from vqclip.errors import DataError, ShapeError
from vqclip.io.digest import digest_file
from vqclip.io.json_files import add_checksum

IMAGE = IdLayout(num_tokens=4, codebook_sizes=(1000, 7), padded=False)
TEXT = IdLayout(num_tokens=6, codebook_sizes=(2**20,), padded=True)
STORAGES = ("wds", "parquet")


def settings(storage: Any = "wds", image: IdLayout | None = IMAGE, text: IdLayout | None = TEXT) -> Settings:
    return Settings(
        storage=storage,
        tokenizer=TokenizerInfo(image="1" * 64, text="2" * 64, weights="a" * 64, config="b" * 64, id_layout=1),
        image=image,
        text=text,
        batch_size=8,
        precision="fp32",
        device="cpu",
        threads=1,
        max_pixels=1000,
        made_with={},
        data={},
        shards=(),
    )


def records(first: int, count: int) -> list[TokenRecord]:
    made = []
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        captions = tuple(f"caption {number}, {n}: ä\n" for n in range(1 + number % 3))
        image = np.stack([rng.integers(0, size, 4) for size in IMAGE.codebook_sizes], axis=1).astype(IMAGE.type)
        texts = tuple(rng.integers(0, 2**20, (rng.integers(1, 7), 1)).astype(TEXT.type) for _ in captions)
        made.append(TokenRecord(f"folder.x/{'k' * 90}{number:06d}", number, number % 2 - 1, captions, image, texts))
    return made


def token_folder(folder: Path, storage: str = "wds", counts: tuple[int, ...] = (5, 0, 300, 2)) -> Path:
    """A folder as `vqclip tokenize` writes it."""
    folder.mkdir()
    facts, first, chosen = [], 0, settings(storage)
    for shard, count in enumerate(counts):
        path = folder / f"{shard:05d}.{'tar' if storage == 'wds' else 'parquet'}"
        with path.open("wb") as file:
            write_shard(file, records(first, count), chosen)
        found = digest_file(path)
        facts.append(ShardInfo(name=path.name, size=found.size, sha256=found.sha256, samples=count, bad={}))
        first += count
    manifest = Manifest(settings=chosen, samples=first, bad={}, shards=tuple(facts))
    (folder / "manifest.json").write_bytes(json_file_bytes(manifest))
    return folder


def same(one: TokenRecord, other: TokenRecord) -> bool:
    return (
        one[:4] == other[:4]
        and np.array_equal(one.image, other.image)
        and one.image.dtype == other.image.dtype
        and len(one.texts) == len(other.texts)
        and all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one.texts, other.texts, strict=True))
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2,), np.uint8),
        ((256, 3), np.uint8),
        ((257,), np.uint16),
        ((3, 65536), np.uint16),
        ((65537,), np.int32),
        ((2**31,), np.int32),
        ((2**31 + 1,), np.int64),
        ((2**63,), np.int64),
    ],
)
def test_smallest_type_holds_every_id(sizes: tuple[int, ...], expected: type) -> None:
    kind = id_type(sizes)
    assert kind == expected
    layout = IdLayout(num_tokens=3, codebook_sizes=sizes, padded=True)
    ids = np.full((3, len(sizes)), -1, dtype=np.int64)
    ids[0], ids[1] = [size - 1 for size in sizes], 0
    kept = layout.require(strip_padding(ids, sizes), "here")
    assert kept.dtype == kind
    assert len(kept) == 2
    assert np.array_equal(layout.pad(kept), ids)


@pytest.mark.parametrize("ids", [[[-1, -1], [0, 0]], [[0, -1], [-1, -1]], [[-1, -1], [-1, -1]]])
def test_ids_that_lengths_cannot_tell_are_refused(ids: list[list[int]]) -> None:
    with pytest.raises(ShapeError, match="expected the first tokens to have ids"):
        strip_padding(np.array(ids), (4, 4))


@pytest.mark.parametrize("storage", STORAGES)
def test_records_come_back(tmp_path: Path, storage: str) -> None:
    data = TokenDataset(token_folder(tmp_path / "tokens", storage))
    assert len(data) == 307
    assert all(same(data.record(n), expected) for n, expected in enumerate(records(0, 307)))
    item, expected = data[5, 4], data.record(5)
    assert item.caption == expected.captions[4 % 3]
    assert item.image_ids.dtype == item.text_ids.dtype == torch.int64
    assert item.image_ids.shape == (4, 2)
    length = len(expected.texts[1])
    assert item.text_ids[:length].flatten().tolist() == expected.texts[1].flatten().tolist()
    assert (item.text_ids[length:] == -1).all()
    assert data.tokenizer_sha256 == {"image": "1" * 64, "text": "2" * 64}
    with pytest.raises(IndexError):
        data[307]


def test_bytes_do_not_depend_on_when(tmp_path: Path) -> None:
    """Nor on who: nothing of it is in the headers."""
    for storage in STORAGES:
        first, second = (token_folder(tmp_path / f"{storage}{n}", storage) for n in range(2))
        for path in first.iterdir():
            assert path.read_bytes() == (second / path.name).read_bytes()
    with tarfile.open(tmp_path / "wds0" / "00000.tar") as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar} == {(0, 0, 0, "", "", 0o644)}


def test_plain_webdataset_reads_tars(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    folder = token_folder(tmp_path / "tokens")
    for shard, first, count in (("00000.tar", 0, 5), ("00002.tar", 5, 300)):
        samples = list(webdataset.WebDataset(str(folder / shard), shardshuffle=False).decode())
        assert len(samples) == count
        for sample, expected in zip(samples, records(first, count), strict=True):
            assert sample["__key__"] == expected.key == sample["json"]["key"]
            assert sample["txt"] == expected.captions[0]
            assert tuple(sample["json"]["captions"]) == expected.captions
            assert sample["json"]["sample_id"] == expected.sample_id
            assert sample["json"].get("label", -1) == expected.label
            assert np.array_equal(sample["image.npy"], expected.image)
            texts = np.split(sample["text.npy"], np.cumsum(sample["json"]["text_lengths"])[:-1])
            assert all(np.array_equal(a, b) for a, b in zip(texts, expected.texts, strict=True))
            assert (sample["image.npy"].dtype, sample["text.npy"].dtype) == (np.uint16, np.int32)


def test_plain_pyarrow_reads_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(token_folder(tmp_path / "tokens", "parquet") / "00002.parquet").to_pylist()
    for row, expected in zip(rows, records(5, 300), strict=True):
        assert (row["key"], row["sample_id"], tuple(row["captions"])) == (*expected[:2], expected.captions)
        assert row["label"] == (None if expected.label < 0 else expected.label)
        assert row["image_ids"] == expected.image.flatten().tolist()
        assert row["text_ids"] == np.concatenate(expected.texts).flatten().tolist()
        assert row["text_lengths"] == [len(ids) for ids in expected.texts]


@pytest.mark.parametrize("storage", STORAGES)
def test_order_depends_on_seed_and_epoch_alone(tmp_path: Path, storage: str) -> None:
    data = TokenDataset(token_folder(tmp_path / "tokens", storage))

    def epoch(seed: int, number: int, workers: int = 0, world_size: int = 1) -> list[tuple[int, str]]:
        shares = []
        for rank in range(world_size):
            order = data.sampler(seed, rank=rank, world_size=world_size)
            order.set_epoch(number)
            loader = DataLoader(data, 7, sampler=order, collate_fn=collate_tokens, num_workers=workers)
            batches = list(loader)
            assert batches[0].image_ids.shape == (7, 4, 2)
            assert batches[0].text_ids.shape == (7, 6, 1)
            assert len(order) == sum(len(batch.sample_ids) for batch in batches)
            shares.append([pair for b in batches for pair in zip(b.sample_ids.tolist(), b.captions, strict=True)])
        return [shares[place % world_size][place // world_size] for place in range(len(data))]

    first = epoch(0, 0)
    assert sorted(number for number, _ in first) == list(range(307))
    assert first == epoch(0, 0, workers=2) == epoch(0, 0, world_size=3)
    others = [epoch(0, 1), epoch(1, 0)]
    for other in others:
        assert [number for number, _ in other] != [number for number, _ in first]
        assert sorted(number for number, _ in other) == list(range(307))
        assert dict(other) != dict(first)  # other captions of those that have several
    assert [place for place, _ in data.sampler(shuffle=False)] == list(range(307))
    assert {len(data.sampler(rank=rank, world_size=3, even=True)) for rank in range(3)} == {102}
    with pytest.raises(ValueError, match="got 3 of world_size 3"):
        data.sampler(rank=3, world_size=3)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_pickled_data_set_reads_on(tmp_path: Path, storage: str) -> None:
    data = TokenDataset(token_folder(tmp_path / "tokens", storage))
    data[0]
    assert pickle.loads(pickle.dumps(data))[0].key == data[0].key


@pytest.mark.parametrize("storage", STORAGES)
def test_damaged_shards_are_errors(tmp_path: Path, storage: str) -> None:
    folder = token_folder(tmp_path / "tokens", storage)
    path = next(folder.glob("00002.*"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"00002.* bytes; manifest.json says \d+; copy it again"):
        TokenDataset(folder)
    path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    data = TokenDataset(folder)
    data[0]
    with pytest.raises(DataError, match="00002.* SHA-256 .* damaged"):
        data[5]
    path.unlink()
    with pytest.raises(DataError, match="00002.*No such file"):
        TokenDataset(folder)


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path) -> None:
    folder = token_folder(tmp_path / "tokens")
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"samples": 307', '"samples": 308'))
    with pytest.raises(DataError, match="does not match its own checksum"):
        TokenDataset(folder)
    path.write_text(json.dumps({"format": "something"}))
    with pytest.raises(DataError, match="this vqclip reads 'vqclip tokens'"):
        TokenDataset(folder)
    path.unlink()
    with pytest.raises(DataError, match="expected a folder that `vqclip tokenize` wrote"):
        TokenDataset(folder)


def bad_records() -> dict[str, TokenRecord]:
    good = records(0, 1)[0]
    outside = good.image.copy()
    outside[1, 1] = 7
    return {
        "outside of its codebook": good._replace(image=outside),
        r"ids \(3, 2\) uint16; expected \(4, 2\)": good._replace(image=good.image[:3]),
        "int64; expected": good._replace(image=good.image.astype(np.int64)),
        "expected a key": good._replace(sample_id=None),
        "ids of 2 captions; it has 1|does not fit": good._replace(texts=good.texts * 2),
    }


@pytest.mark.parametrize(
    ("message", "storage"),
    [
        (message, storage)
        for message in bad_records()
        for storage in STORAGES
        if (message, storage) != ("int64; expected", "parquet")  # a column's: test_parquet_of_other_types_is_an_error
    ],
)
def test_samples_that_do_not_fit_are_errors(tmp_path: Path, message: str, storage: str) -> None:
    path = tmp_path / "0"
    with path.open("wb") as file:
        write_shard(file, [bad_records()[message]], settings(storage))
    with pytest.raises(DataError, match=message):
        open_shard(path, settings(storage)).read(0)


def parquet_file(path: Path, **columns: Any) -> Path:
    """A token shard of one sample, with these columns in place of its own."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with path.open("wb") as file:
        write_shard(file, records(0, 1), settings("parquet"))
    table = parquet.read_table(path)
    for name, (values, kind) in columns.items():
        column = arrow.array(values, arrow.type_for_alias(kind) if isinstance(kind, str) else kind)
        table = table.set_column(table.column_names.index(name), name, column)
    parquet.write_table(table, path, use_dictionary=False)
    return path


def test_parquet_of_other_types_is_an_error(tmp_path: Path) -> None:
    for name, values, kind in (
        ("image_ids", ["abc"], "string"),
        ("captions", [3], "int64"),
        ("sample_id", ["0"], "string"),
        ("text_lengths", [1.5], "float64"),
    ):
        path = parquet_file(tmp_path / "0.parquet", **{name: (values, kind)})
        with pytest.raises(DataError, match=rf"0.parquet: {name} .*; expected "):
            open_shard(path, settings("parquet"))
    other = IdLayout(num_tokens=4, codebook_sizes=(2**40, 7), padded=False)
    with pytest.raises(DataError, match=r"image_ids list<element: uint16>; expected list<item: int64>"):
        open_shard(parquet_file(tmp_path / "1.parquet"), settings("parquet", image=other))


def test_parquet_that_boasts_is_refused_unread(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ids = arrow.ListArray.from_arrays([0, 3_000_000], arrow.array(np.zeros(3_000_000, np.uint16)))
    many = parquet_file(tmp_path / "0.parquet", image_ids=(ids, ids.type))
    with pytest.raises(DataError, match="image_ids: 3000000 values in 1 rows"):
        open_shard(many, settings("parquet"))
    with (tmp_path / "1.parquet").open("wb") as file:
        write_shard(file, records(0, 1), settings("parquet"))
    table = parquet.read_table(tmp_path / "1.parquet")
    parquet.write_table(table, tmp_path / "1.parquet", use_dictionary=True)
    with pytest.raises(DataError, match="encoded as .*DICTIONARY"):
        open_shard(tmp_path / "1.parquet", settings("parquet"))
    parquet.write_table(arrow.concat_tables([table] * 300), tmp_path / "1.parquet", use_dictionary=False)
    with pytest.raises(DataError, match="a group of 300 rows"):
        open_shard(tmp_path / "1.parquet", settings("parquet"))


def test_a_footer_of_parquet_that_lies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "0.parquet"
    with path.open("wb") as file:
        write_shard(file, records(0, 300), settings("parquet"))
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    places = [match.start() for match in re.finditer(b"key|label|image_ids", whole) if match.start() > footer]
    assert len(places) > 6
    for place in places:  # names of columns that are no UTF-8, in the schema and in the groups
        path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        with pytest.raises(DataError, match=r"0\.parquet"):
            open_shard(path, settings("parquet"))
    for end in (footer - 1, footer + 100, len(whole) - 9):
        path.write_bytes(whole[:end] + whole[-8:])
        with pytest.raises(DataError, match=r"0\.parquet"):
            open_shard(path, settings("parquet"))
    path.write_bytes(whole)
    read = parquet.ParquetFile.read_row_group
    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", lambda *args, **how: read(*args, **how).slice(0, 9))
    with pytest.raises(DataError, match=r"0\.parquet: \w+: 9 rows; its footer says 256"):
        open_shard(path, settings("parquet")).read(10)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("key", ["/a", "../a", "..", "a/../b", "a/..", "a\\..\\b", "\\\\host\\a", "C:a", "a\0b"])
def test_names_that_lead_out_of_the_folder_are_not_written(tmp_path: Path, storage: str, key: str) -> None:
    with (tmp_path / "0").open("wb") as file, pytest.raises(DataError, match="would leave the folder") as raised:
        write_shard(file, [records(0, 1)[0]._replace(key=key)], settings(storage))
    assert raised.value.kind == "unsafe name"


def test_names_with_dots_are_written(tmp_path: Path) -> None:
    for key in ("./a", "a/b", "..a/b", "a../b", "ab:c"):
        with (tmp_path / "0").open("wb") as file:
            write_shard(file, [records(0, 1)[0]._replace(key=key)], settings())


def test_groups_of_parquet_are_kept_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TokenDataset(token_folder(tmp_path / "tokens", "parquet", (600,)))
    shard = data._shard(0)
    for bound, kept in ((1 << 30, 3), (1, 1)):
        monkeypatch.setattr("vqclip.data.tokens.parquet._KEPT_BYTES", bound)
        for row in (0, 300, 599):
            shard.read(row)
        assert len(shard._groups) == kept


@pytest.mark.parametrize("captions", ['"abc"', "{}", "[1]", "[]", "null"])
def test_captions_of_a_tar_are_a_list_of_strings(tmp_path: Path, captions: str) -> None:
    path = tmp_path / "0.tar"
    facts = json.dumps({"captions": json.loads(captions), "key": "a", "sample_id": 0})
    write_tar(path, {"a.txt": b"abc", "a.json": facts.encode()})
    with pytest.raises(DataError, match="expected a list of strings|expected a key, captions"):
        open_shard(path, settings(image=None, text=None)).read(0)


def test_json_of_a_tar_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    write_tar(path, {"a.txt": b"abc", "a.json": b" " * (5 << 20)})
    with pytest.raises(DataError, match="JSON of more than 4194304 bytes"):
        open_shard(path, settings(image=None, text=None))
    sample = records(0, 1)[0]._replace(captions=("x" * (5 << 20),))
    with path.open("wb") as file, pytest.raises(DataError, match=r"sample folder.*; expected at most 4194304"):
        write_shard(file, [sample], settings())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 2**40}, "less than or equal to 1048576"),
        ({"num_tokens": 0}, "greater than or equal to 1"),
        ({"num_tokens": 2**20, "codebook_sizes": [2, 2]}, "at most 1048576 ids a sample"),
        ({"codebook_sizes": []}, "at least 1 item"),
        ({"codebook_sizes": [0]}, "greater than or equal to 1"),
    ],
)
def test_numbers_of_a_layout_have_bounds(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = token_folder(tmp_path / "a")
    path = folder / "manifest.json"
    body = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    body["settings"]["image"] |= change
    path.write_bytes(add_checksum(body))
    with pytest.raises(DataError, match=message):
        TokenDataset(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": -1}, "greater than or equal to 0"),
        ({"size": -1}, "greater than or equal to 0"),
        ({"samples": 2**62}, "less than or equal to"),
        ({"samples": 6}, "samples: got 307, expected 308, the sum"),
    ],
)
def test_numbers_of_a_shard_have_bounds(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TokenDataset(edited(token_folder(tmp_path / "a"), **change))


def test_foreign_tars_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with path.open("wb") as file:
        write_shard(file, records(0, 2), settings())
    with pytest.raises(DataError, match=r"expected KEY.image.npy|expected .*\.txt"):
        open_shard(path, settings(text=None))
    (tmp_path / "1.parquet").write_bytes(path.read_bytes())
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_shard(tmp_path / "1.parquet", settings("parquet"))
    with (tmp_path / "2.parquet").open("wb") as file:
        write_shard(file, records(0, 2), settings("parquet", text=None))
    with pytest.raises(DataError, match="lacks text_ids, text_lengths"):
        open_shard(tmp_path / "2.parquet", settings("parquet"))


def edited(folder: Path, **changes: Any) -> Path:
    """The folder, whose manifest says something else of the first shard, under a hash that fits."""
    path = folder / "manifest.json"
    body = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    body["shards"][0] |= changes
    path.write_bytes(add_checksum(body))
    return folder


@pytest.mark.parametrize(
    "name", ["../b/00000.tar", "/dev/zero", "b/00000.tar", "..", "", "00000.tar\n", "settings.json", "00000.parquet"]
)
def test_a_manifest_names_shards_of_its_folder_alone(tmp_path: Path, name: str) -> None:
    token_folder(tmp_path / "b")
    with pytest.raises(DataError, match=r"manifest.json: shards"):
        TokenDataset(edited(token_folder(tmp_path / "a"), name=name))


@pytest.mark.parametrize("verify", [True, False])
def test_pipes_and_devices_are_no_shards(tmp_path: Path, verify: bool) -> None:
    path = edited(token_folder(tmp_path / "a"), size=0) / "00000.tar"
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match="not a regular file"):
        TokenDataset(path.parent, verify)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        TokenDataset(path.parent, verify)
    for read in (digest_file, lambda path: open_shard(path, settings())):
        with pytest.raises((OSError, DataError), match="not a regular file"):
            read(path)


def test_large_samples_have_small_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written can be read again, whatever its size."""
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("vqclip.data.tokens.parquet._GROUP_BYTES", 8000)
    data = TokenDataset(token_folder(tmp_path / "tokens", "parquet", (100,)))
    assert all(same(data.record(n), expected) for n, expected in enumerate(records(0, 100)))
    assert parquet.ParquetFile(tmp_path / "tokens" / "00000.parquet").metadata.num_row_groups > 5
