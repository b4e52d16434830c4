import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from vqclip.data.tokens import shards
from vqclip.data.tokens.dataset import TokenDataset, collate_tokens
from vqclip.data.tokens.shards import IdLayout, TokenRecord, TokenShard, id_type, strip_padding, write_shard
from vqclip.data.work_folder import ManifestItem
from vqclip.errors import DataError, ShapeError
from vqclip.io.atomic import digest_file
from vqclip.io.json_files import add_checksum

IMAGE = IdLayout(num_tokens=4, codebook_sizes=(1000, 7), padded=False)
TEXT = IdLayout(num_tokens=6, codebook_sizes=(2**20,), padded=True)


def settings() -> shards.Settings:
    return shards.Settings(
        tokenizer=shards.TokenizerInfo(image="1" * 64, text="2" * 64, weights="a" * 64, config="b" * 64, id_layout=1),
        image=IMAGE,
        text=TEXT,
        context_length=6,
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


def write(path: Path, samples: list[TokenRecord], text: IdLayout | None = TEXT) -> Path:
    with path.open("wb") as file:
        write_shard(file, samples, IMAGE, text)
    return path


def token_folder(folder: Path, counts: tuple[int, ...] = (5, 0, 300, 2)) -> Path:
    """A folder as `vqclip tokenize` writes it."""
    folder.mkdir()
    facts, first, chosen = [], 0, settings()
    for shard, count in enumerate(counts):
        path = write(folder / f"{shard:05d}.parquet", records(first, count))
        found = digest_file(path)
        facts.append(ManifestItem(name=path.name, size=found.size, sha256=found.sha256, samples=count, bad={}))
        first += count
    manifest = shards.Manifest(settings=chosen, samples=first, bad={}, shards=tuple(facts))
    (folder / "manifest.json").write_bytes(add_checksum({**shards.VERSIONS, **manifest.model_dump(mode="json")}))
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
    [((256, 3), np.uint8), ((257,), np.uint16), ((65537,), np.uint32), ((2**32 + 1,), np.int64), ((2**63,), np.int64)],
)
def test_smallest_type_holds_every_id(sizes: tuple[int, ...], expected: type) -> None:
    kind = id_type(sizes)
    assert kind == expected
    layout = IdLayout(num_tokens=3, codebook_sizes=sizes, padded=True)
    ids = np.full((3, len(sizes)), -1, dtype=np.int64)
    ids[0], ids[1] = [size - 1 for size in sizes], 0
    kept = strip_padding(ids, sizes)
    stored = pytest.importorskip("pyarrow").array(kept.reshape(-1))
    assert np.array_equal(layout.read(stored), kept)
    assert kept.dtype == kind
    assert len(kept) == 2
    assert np.array_equal(layout.pad(kept), ids)


@pytest.mark.parametrize("ids", [[[-1, -1], [0, 0]], [[0, -1], [-1, -1]], [[-1, -1], [-1, -1]]])
def test_ids_that_lengths_cannot_tell_are_refused(ids: list[list[int]]) -> None:
    with pytest.raises(ShapeError, match="expected the first tokens to have ids"):
        strip_padding(np.array(ids), (4, 4))


def test_records_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = token_folder(tmp_path / "tokens")
    for cached in (None, 1):  # in order, and at random with one group at a time
        if cached:
            monkeypatch.setattr("vqclip.data.tokens.dataset._CACHED_BYTES", cached)
        data = TokenDataset(folder)
        assert len(data) == 307
        places = range(307) if cached is None else np.random.default_rng(0).permutation(307).tolist()
        assert all(same(data.record(n), records(n, 1)[0]) for n in places)
        assert len(data._groups) == (7 if cached is None else 1)
    data = pickle.loads(pickle.dumps(data))  # to a worker that is not forked
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


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    folder = token_folder(tmp_path / "tokens")
    files = [str(folder / f"{shard:05d}.parquet") for shard in (0, 2)]
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.features["image_ids"] == datasets.List(datasets.Value("uint16"), length=8)
    assert rows.features["text_ids"] == datasets.List(datasets.List(datasets.Value("uint32")))
    table = pandas.concat(map(pandas.read_parquet, files))
    for row, (_, line), expected in zip(rows, table.iterrows(), records(0, 305), strict=False):
        assert (row["key"], row["sample_id"], tuple(row["captions"])) == (*expected[:2], expected.captions)
        assert row["label"] == (None if expected.label < 0 else expected.label)
        assert row["image_ids"] == line.image_ids.tolist() == expected.image.flatten().tolist()
        texts = [ids.flatten().tolist() for ids in expected.texts]
        assert row["text_ids"] == [ids.tolist() for ids in line.text_ids] == texts


def test_order_depends_on_seed_and_epoch_alone(tmp_path: Path) -> None:
    data = TokenDataset(token_folder(tmp_path / "tokens"))

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


def test_damaged_shards_are_errors(tmp_path: Path) -> None:
    folder = token_folder(tmp_path / "tokens")
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


def with_columns(path: Path, **columns: Any) -> Path:
    """A token shard of one sample, with these columns in place of its own."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(write(path, records(0, 1)))
    for name, (values, kind) in columns.items():
        place = table.column_names.index(name)
        kind = arrow.type_for_alias(kind) if isinstance(kind, str) else kind or table.schema.field(name).type
        table = table.set_column(place, name, arrow.array(values, kind))
    parquet.write_table(table, path, use_dictionary=False)
    return path


def read(path: Path) -> TokenRecord:
    return TokenShard(path, IMAGE, TEXT).read_group(0).record(0)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("key", None, "has no key"),
        ("sample_id", None, "has no sample id"),
        ("label", -2, "has a negative label"),
        ("captions", [], "has no captions"),
        ("captions", None, "has no captions"),
        ("captions", ["a", None], "has a caption that is null"),
        ("captions", ["a", "b"], "has another number of captions than of texts with ids"),
        ("image_ids", None, "(has no image ids|damaged .*Expected all lists)"),  # pyarrow before 25 cannot read it
        ("image_ids", [1, 1, 1, 7, 1, 1, 1, 1], "has an id outside of its codebook, 4 tokens of .* 1000, 7"),
        ("image_ids", [1, None, 1, 1, 1, 1, 1, 1], "has an id that is null"),
        ("text_ids", [None], "has ids of another length than 1 to 6 tokens"),
        ("text_ids", [[]], "has ids of another length than 1 to 6 tokens"),
        ("text_ids", [[5, 2**20]], "has an id outside of its codebook"),
    ],
)
def test_samples_that_do_not_fit_are_named(tmp_path: Path, column: str, value: Any, message: str) -> None:
    path = with_columns(tmp_path / "0.parquet", **{column: ([value], None)})
    with pytest.raises(DataError, match=rf"0.parquet: (sample .*)?{message}"):
        read(path)


def test_columns_of_other_types_are_errors(tmp_path: Path) -> None:
    for name, value, kind in (("image_ids", "abc", "string"), ("captions", 3, "int64"), ("sample_id", "0", "string")):
        with pytest.raises(DataError, match=rf"0.parquet: {name} .*; expected "):
            read(with_columns(tmp_path / "0.parquet", **{name: ([value], kind)}))
    path = write(tmp_path / "0.parquet", records(0, 1))
    other = IdLayout(num_tokens=4, codebook_sizes=(2**40, 7), padded=False)
    with pytest.raises(DataError, match=r"image_ids fixed.*<\w+: uint16>\[8\]; expected fixed.*<\w+: int64>\[8\]"):
        TokenShard(path, other, TEXT)
    with pytest.raises(DataError, match=r"image_ids .*\[8\]; expected .*\[10\]"):
        TokenShard(path, IMAGE.model_copy(update={"num_tokens": 5}), TEXT)
    with pytest.raises(DataError, match="text_ids is missing; expected list"):
        read(write(path, records(0, 2), text=None))
    path.write_bytes(b"a tar, perhaps" * 100)
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read(path)


def test_parquet_that_boasts_is_refused_unread(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = with_columns(tmp_path / "0.parquet", text_ids=([[[1] * 100]], None))
    with pytest.raises(DataError, match="text_ids: 100 values in 1 rows"):
        read(path)
    table = parquet.read_table(write(path, records(0, 1)))
    parquet.write_table(table, path, use_dictionary=True)
    with pytest.raises(DataError, match="encoded as .*DICTIONARY"):
        read(path)
    parquet.write_table(arrow.concat_tables([table] * 65), path, use_dictionary=False)
    with pytest.raises(DataError, match="a group of 65 rows"):
        read(path)


def test_a_footer_of_parquet_that_lies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = write(tmp_path / "0.parquet", records(0, 64))
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    places = [match.start() for match in re.finditer(b"key|label|image_ids", whole) if match.start() > footer]
    assert len(places) > 5
    for place in places:  # names of columns that are no UTF-8, in the schema and in the groups
        path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        with pytest.raises(DataError, match=r"0\.parquet"):
            read(path)
    for end in (footer - 1, footer + 100, len(whole) - 9):
        path.write_bytes(whole[:end] + whole[-8:])
        with pytest.raises(DataError, match=r"0\.parquet"):
            read(path)
    path.write_bytes(whole)
    original = parquet.ParquetFile.read_row_group
    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", lambda *args, **how: original(*args, **how).slice(0, 9))
    with pytest.raises(DataError, match=r"0\.parquet: 9 rows in a group; its footer says 64"):
        read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 2**40}, "less than or equal to 1048576"),
        ({"num_tokens": 2**20, "codebook_sizes": [2, 2]}, "at most 1048576 ids a sample"),
        ({"codebook_sizes": []}, "at least 1 item"),
        ({"size": -1}, "greater than or equal to 0"),
        ({"samples": 2**62}, "less than or equal to"),
        ({"samples": 6}, "samples: got 307, expected 308, the sum"),
    ],
)
def test_numbers_of_a_manifest_have_bounds(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TokenDataset(edited(token_folder(tmp_path / "a"), **change))


def edited(folder: Path, **changes: Any) -> Path:
    """The folder, whose manifest says something else of the images or the first shard, under a hash that fits."""
    path = folder / "manifest.json"
    body = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    body["settings"]["image"] |= {key: value for key, value in changes.items() if key in IdLayout.model_fields}
    body["shards"][0] |= {key: value for key, value in changes.items() if key not in IdLayout.model_fields}
    path.write_bytes(add_checksum(body))
    return folder


@pytest.mark.parametrize(
    "name", ["../b/0.parquet", "/dev/zero", "b/0.parquet", "..", "", "0.parquet\n", "settings.json", "00000.tar"]
)
def test_a_manifest_names_shards_of_its_folder_alone(tmp_path: Path, name: str) -> None:
    token_folder(tmp_path / "b")
    with pytest.raises(DataError, match=r"manifest.json: shards"):
        TokenDataset(edited(token_folder(tmp_path / "a"), name=name))


@pytest.mark.parametrize("verify", [True, False])
def test_pipes_and_devices_are_no_shards(tmp_path: Path, verify: bool) -> None:
    path = edited(token_folder(tmp_path / "a"), size=0) / "00000.parquet"
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match="not a regular file"):
        TokenDataset(path.parent, verify)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        TokenDataset(path.parent, verify)
    for read in (digest_file, lambda path: TokenShard(path, IMAGE, TEXT)):
        with pytest.raises((OSError, DataError), match="not a regular file"):
            read(path)


def test_large_samples_have_small_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written can be read again, whatever its size."""
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("vqclip.data.tokens.shards._GROUP_BYTES", 8000)
    data = TokenDataset(token_folder(tmp_path / "tokens", (100,)))
    assert all(same(data.record(n), expected) for n, expected in enumerate(records(0, 100)))
    assert parquet.ParquetFile(tmp_path / "tokens" / "00000.parquet").metadata.num_row_groups > 5
