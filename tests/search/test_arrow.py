"""Vectors of an index as Arrow and Parquet, in LanceDB and faiss, and files that are damaged or of others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models import RESIDUAL
from tests.search.making import built, drawn, queries
from vqclip.cli.search import build, main
from vqclip.data.prepare import open_images
from vqclip.errors import CheckpointError, ConfigError, DataError
from vqclip.search import CodeIndex, CodeSearch, export_vectors, read_vectors, vectors_of

pa = pytest.importorskip("pyarrow", reason="pip install 'vqclip[parquet]'")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """An index, its tokenizer, and its Parquet file in two groups of rows."""
    monkeypatch.setattr("vqclip.search.arrow._ROWS", 200)
    tokenizer = built().image
    names = [f"naïve \udcff {number}" for number in range(300)]
    index = CodeIndex.build(tokenizer, drawn(), names, places=torch.arange(300) * 2)
    export_vectors(index, tokenizer, tmp_path / "images.parquet")
    return index, tokenizer, tmp_path / "images.parquet"


def test_a_file_contains_the_index_and_its_embeddings(made, tmp_path):
    index, tokenizer, path = made
    table = read_vectors(path, tokenizer)
    assert table.column("item").to_pylist() == list(range(300))
    assert table.column("place").to_pylist() == list(range(0, 600, 2))
    assert table.column("name")[5].as_py() == "naïve \\udcff 5"
    assert str(table.schema.field("ids").type) == "fixed_size_list<element: uint8>[8]"
    ids = torch.tensor(table.column("ids").to_pylist())
    assert torch.equal(ids.view(300, 4, 2), index.ids(torch.arange(300)))
    with torch.no_grad():
        assert torch.equal(torch.tensor(vectors_of(table, tokenizer)), tokenizer.embed(ids.view(300, 4, 2)))
    export_vectors(index, tokenizer, tmp_path / "half.parquet", "float16")
    half = vectors_of(read_vectors(tmp_path / "half.parquet", tokenizer), tokenizer)
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, vectors_of(table, tokenizer), atol=1e-3)


def test_an_arrow_file_is_mapped_without_a_copy(made, tmp_path, monkeypatch):
    monkeypatch.undo()
    index, tokenizer, _ = made
    export_vectors(index, tokenizer, tmp_path / "images.arrow")
    with pa.memory_map(str(tmp_path / "images.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
        vectors = vectors_of(table, tokenizer)
        assert vectors.ctypes.data == table.column("vector").chunk(0).values.buffers()[1].address
        assert pa.total_allocated_bytes() < vectors.nbytes
        assert not vectors.flags.owndata
    with pytest.raises(
        DataError, match=r"images.arrow: cannot be read; expected a .parquet file of `vqclip search export`"
    ):
        read_vectors(tmp_path / "images.arrow", tokenizer)


@pytest.mark.slow  # docs/search.md compares LanceDB by default
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_lancedb_finds_the_same(made, tmp_path, dtype):
    lancedb = pytest.importorskip("lancedb", reason="pip install 'vqclip[lancedb]'")
    index, tokenizer, path = made
    export_vectors(index, tokenizer, path, dtype)
    table = lancedb.connect(tmp_path / "db").create_table("images", read_vectors(path, tokenizer))
    exact = CodeSearch(index, tokenizer).search(queries(), 10)
    for query, scores, items in zip(queries().numpy(), exact.scores, exact.items, strict=True):
        found = table.search(query).distance_type("cosine").limit(10).to_arrow()
        assert found.column("item").to_pylist() == items.tolist()
        np.testing.assert_allclose(
            1 - found.column("_distance").to_numpy(), scores, atol=2e-3 if "16" in dtype else 1e-5
        )
    assert vectors_of(table.to_arrow(), tokenizer).shape == (300, 16)  # the metadata is kept


@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat", pytest.param("IVF4,PQ8x4", marks=pytest.mark.slow)])
def test_faiss_finds_the_same(made, factory):
    faiss = pytest.importorskip("faiss", reason="pip install 'vqclip[search]'")
    index, tokenizer, path = made
    vectors = vectors_of(read_vectors(path, tokenizer), tokenizer)
    found = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    found.train(vectors)
    found.add(vectors)
    exact = CodeSearch(index, tokenizer).search(queries(), 10)
    if "IVF" in factory:
        found.nprobe = 8
    scores, items = found.search(queries().numpy(), 10)
    if "PQ" in factory:  # approximate
        assert np.mean([len({*a} & {*b}) for a, b in zip(items.tolist(), exact.items.tolist(), strict=True)]) > 3
    else:
        assert items.tolist() == exact.items.tolist()
        np.testing.assert_allclose(scores, exact.scores, atol=1e-6)


def test_absent_tokens_are_signed(tmp_path):
    model = built(RESIDUAL)
    ids = model.text.encode(["a red star", "x"])
    export_vectors(CodeIndex.build(model.text, ids), model.text, tmp_path / "texts.parquet")
    table = read_vectors(tmp_path / "texts.parquet", model.text)
    assert table.schema.field("ids").type.value_type == pa.int16()
    assert table.column("ids").to_pylist() == ids.flatten(1).tolist()
    assert int(ids.min()) == -1


def test_an_empty_index_is_an_empty_table(tmp_path):
    tokenizer = built().image
    for name in ("empty.parquet", "empty.arrow"):
        export_vectors(CodeIndex.build(tokenizer, drawn(0)), tokenizer, tmp_path / name)
    assert vectors_of(read_vectors(tmp_path / "empty.parquet", tokenizer), tokenizer).shape == (0, 16)


def rewrite(path, **options):
    """Write the table as another tool may do; ``change`` changes it."""
    change = options.pop("change", lambda table: table)
    options = {"compression": "none", "use_dictionary": False} | options
    parquet.write_table(change(parquet.read_table(path)), path, **options)


def with_vectors(change):
    def changed(table):
        values = table.column("vector").combine_chunks().flatten().to_numpy().copy().reshape(-1, 16)
        column = pa.FixedSizeListArray.from_arrays(pa.array(change(values).reshape(-1)), 16)
        return table.set_column(4, table.schema.field("vector"), column)

    return changed


def at_row_250(value):
    def change(values):
        values[250, 3] = value
        return values

    return with_vectors(change)


def without_a_vector(table):
    column = pa.array([None, *table.column("vector").to_pylist()[1:]], table.schema.field("vector").type)
    return table.set_column(4, table.schema.field("vector"), column)


def metadata(**changes):
    def change(table):
        found = json.loads(table.schema.metadata[b"vqclip"]) | changes
        return table.replace_schema_metadata({"vqclip": json.dumps(found)})

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (at_row_250(np.nan), DataError, "vector: row 250 has the length nan; expected 1"),
        (at_row_250(np.inf), DataError, "row 250 has the length inf"),
        (at_row_250(0.0), DataError, "row 250 has the length 0"),
        (without_a_vector, DataError, "vector: got null"),
        (metadata(tokenizer_sha256="0" * 64), CheckpointError, "another tokenizer .*: tokenizer_sha256 '000"),
        (metadata(codebook_sizes=[64]), CheckpointError, r"codebook_sizes \[64\], not \[64, 64\]"),
        (metadata(more=1), CheckpointError, "unknown keys"),
        (lambda table: table.replace_schema_metadata(None), CheckpointError, "no metadata 'vqclip'"),
        (lambda table: table.replace_schema_metadata({"vqclip": "[" * 9999}), CheckpointError, "another tokenizer"),
        (lambda table: table.drop_columns("name"), DataError, "expected those of `vqclip search export`"),
        (lambda table: table.drop_columns("vector"), DataError, "vector: got no such column"),
        (with_vectors(lambda values: values.astype(np.float64)), DataError, None),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit_are_refused(made, change, error, message):
    _, tokenizer, path = made
    if message is None:
        change, message = lambda table: table.cast(wide(table.schema)), "vector: got fixed_size_list<element: double>"
    rewrite(path, change=change)
    with pytest.raises(error, match=message):
        read_vectors(path, tokenizer)


def wide(schema):
    return schema.set(4, schema.field("vector").with_type(pa.list_(pa.field("element", pa.float64()), 16)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "zstd"}, "item: ZSTD ; expected UNCOMPRESSED and PLAIN"),
        ({"use_dictionary": True}, "RLE_DICTIONARY; expected UNCOMPRESSED"),
    ],
)
def test_what_could_grow_is_refused_before_it_is_read(made, options, message, monkeypatch):
    _, tokenizer, path = made
    rewrite(path, **options)
    monkeypatch.setattr(parquet.ParquetFile, "read", None)
    with pytest.raises(DataError, match=message):
        read_vectors(path, tokenizer)


def test_a_billion_rows_of_nothing_are_refused(made, monkeypatch):
    _, tokenizer, path = made
    rewrite(path, change=lambda table: pa.table([pa.nulls(10**5, f.type) for f in table.schema], schema=table.schema))
    monkeypatch.setattr(parquet.ParquetFile, "read", None)
    with pytest.raises(DataError, match="100000 rows in .* bytes; too many"):
        read_vectors(path, tokenizer)


def test_damage_is_an_error_of_ours_or_changes_nothing(made):
    """Statistics and names of writers may be damaged without harm."""
    _, tokenizer, path = made
    data, whole = path.read_bytes(), read_vectors(path, tokenizer)
    draws, refused = np.random.default_rng(0), []
    for _ in range(60):
        damaged = bytearray(data)
        kind = draws.integers(3)
        at = int(draws.integers(len(data)))
        if kind == 0:
            damaged = damaged[:at]
        else:
            damaged[at if kind == 1 else len(data) - 1 - at % 2000] ^= 1 << int(draws.integers(8))
        path.write_bytes(damaged)
        try:
            table = read_vectors(path, tokenizer)
        except (DataError, CheckpointError) as error:
            refused.append(str(path) in str(error))
        else:
            assert table.equals(whole)
    assert all(refused)
    assert len(refused) > 40


def test_another_tokenizer_and_other_files_are_refused(made, tmp_path):
    index, tokenizer, path = made
    with pytest.raises(CheckpointError, match="made by another tokenizer than this one: modality 'image', not 'text'"):
        read_vectors(path, built().text)
    with pytest.raises(CheckpointError, match="its codes were made by the image tokenizer"):
        export_vectors(index, built().text, path)
    with pytest.raises(ConfigError, match=r"got the suffix '.csv'; expected .parquet or .arrow"):
        export_vectors(index, tokenizer, tmp_path / "x.csv")
    with pytest.raises(ConfigError, match="dtype: got 'int8'; expected one of float32, float16"):
        export_vectors(index, tokenizer, path, "int8")
    with pytest.raises(DataError, match=r"none.parquet: cannot be read; expected .* .FileNotFoundError"):
        read_vectors(tmp_path / "none.parquet", tokenizer)


def test_the_command_exports(made, tmp_path, capsys):
    index, _, path = made
    built().save_pretrained(tmp_path / "tokenizer")
    index.save(tmp_path / "index")
    command = ["export", "--index", str(tmp_path / "index"), "--out", str(tmp_path / "new.parquet")]
    assert main(command) == 2
    assert "--tokenizer: missing, and the index names no local folder" in capsys.readouterr().err
    command += ["--tokenizer", str(tmp_path / "tokenizer")]
    assert main(command) == 0
    assert "new.parquet: 300 rows, vectors of 16 float32;" in capsys.readouterr().out
    assert (tmp_path / "new.parquet").read_bytes() == path.read_bytes()
    for wrong, message in ((["--out", str(tmp_path / "none" / "x.arrow")], "--out: "), (["--out", "x.csv"], "suffix")):
        assert main([*command, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif("VQCLIP_DATA" not in os.environ, reason="needs the data sets named by VQCLIP_DATA")
def test_texts_find_the_same_emoji_everywhere(tmp_path):
    """Captions through codes: our search, faiss and LanceDB return the same images."""
    lancedb, faiss = pytest.importorskip("lancedb"), pytest.importorskip("faiss")
    model = built()
    source = open_images(str(Path(os.environ["VQCLIP_DATA"]) / "captions_noto_emoji" / "val"))
    index = build(model.image, source)
    captions = [source.read(number).captions[0] for number in range(100)]
    with torch.no_grad():
        asked = model.text.embed(model.text.encode(captions))
    exact = CodeSearch(index, model.image).search(asked, 10)
    export_vectors(index, model.image, tmp_path / "emoji.parquet")
    table = read_vectors(tmp_path / "emoji.parquet", model.image)
    flat = faiss.IndexFlatIP(16)
    flat.add(vectors_of(table, model.image))
    lance = lancedb.connect(tmp_path / "db").create_table("emoji", table)
    scores, items = flat.search(asked.numpy(), 10)
    np.testing.assert_allclose(scores, exact.scores, atol=1e-6)
    for row in range(100):  # images of equal codes have equal scores, in any order
        found = lance.search(asked[row].numpy()).distance_type("cosine").limit(10).to_arrow()
        np.testing.assert_allclose(1 - found.column("_distance").to_numpy(), exact.scores[row], atol=1e-5)
        better = exact.scores[row] > exact.scores[row, -1] + 1e-5
        ours = {*exact.items[row][better].tolist()}
        assert ours <= {*items[row].tolist()}
        assert ours <= {*found.column("item").to_pylist()}
