import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models import FSQ, RESIDUAL
from tests.search.making import built, drawn, queries, reference
from vqclip.errors import CheckpointError, ConfigError, ShapeError
from vqclip.search import CodeIndex, CodeSearch, FaissSearch, Packing, embeddings
from vqclip.search import index as module
from vqclip.search.index import _VERSIONS, Origin


class TestFiles:
    NAMES = ("a red apple", "<b>", "naïve ☃", "", "bad \udcff byte")

    def saved(self, folder, repeat=True):
        tokenizer = built().image
        ids = drawn(3)[torch.tensor([0, 1, 0, 2, 1])] if repeat else drawn(5)
        index = CodeIndex.build(tokenizer, ids, self.NAMES, places=torch.tensor([0, 2, 3, 5, 8]))
        index.save(folder)
        return tokenizer, index

    @pytest.mark.parametrize("repeat", [False, True])
    def test_what_is_saved_is_loaded(self, tmp_path, repeat):
        tokenizer, index = self.saved(tmp_path / "index", repeat)
        loaded = CodeIndex.load(tmp_path / "index")
        assert list(loaded.names) == list(self.NAMES)
        assert torch.equal(loaded.codes, index.codes)
        assert torch.equal(loaded.places, index.places)
        assert (loaded.row is None) == (not repeat)
        a, b = (CodeSearch(each, tokenizer).search(queries(), 3) for each in (index, loaded))
        assert torch.equal(a.scores, b.scores)
        assert torch.equal(a.items, b.items)
        assert {path.name for path in (tmp_path / "index").iterdir()} == {"index.json", "codes.safetensors"}

    @pytest.mark.parametrize("name", ["index.json", "codes.safetensors"])
    @pytest.mark.parametrize("how", ["flip", "cut", "remove"])
    def test_damage_is_noticed(self, tmp_path, name, how):
        self.saved(tmp_path / "index")
        path = tmp_path / "index" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.unlink() if how == "remove" else path.write_bytes(data if how == "flip" else data[:-9])
        with pytest.raises(CheckpointError, match=name):
            CodeIndex.load(tmp_path / "index")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"row": torch.tensor([0, 1, 0, 3, 1], dtype=torch.int32)}, "row: got 0 to 3, expected 0 to 2"),
            ({"row": torch.tensor([0, 1, 0, 2, 1])}, "row: got torch.int64, expected torch.int32"),
            ({"extra": torch.zeros(1)}, "unexpected extra"),
            ({"codes": torch.zeros(3, 5, dtype=torch.uint8)}, r"codes: got shape \(3, 5\)"),
            ({"places": torch.tensor([0, 1, -1, 2, 3])}, "places: got -1 to 3, expected 0 to"),
            ({"names": torch.zeros(3, dtype=torch.uint8)}, "names: expected a list of 5 texts"),
            ({"names": torch.tensor([*b'["a", 1]'], dtype=torch.uint8)}, "names: expected a list of 5 texts"),
        ],
    )
    def test_an_honest_hash_of_nonsense_is_refused(self, tmp_path, change, message, monkeypatch):
        """Whoever makes a file can make its hash, too."""
        monkeypatch.setattr(
            "vqclip.search.index.save_tensors", lambda tensors, path: save_file({**tensors, **change}, path)
        )
        self.saved(tmp_path / "index")
        with pytest.raises(CheckpointError, match=message):
            CodeIndex.load(tmp_path / "index")

    @pytest.mark.parametrize("sizes", [(0, 64), (64, -1), (2**63 + 1,), (2,) * (2**16 + 1)])
    def test_codebooks_that_cannot_be_are_refused(self, tmp_path, sizes, monkeypatch):
        header = module._Header

        def forged(codebook_sizes, **facts):
            return header.model_construct(codebook_sizes=sizes, **facts)

        with monkeypatch.context() as patch:
            patch.setattr(module, "_Header", forged)
            self.saved(tmp_path / "index")
        with pytest.raises(CheckpointError, match=r"index.json: codebook_sizes"):
            CodeIndex.load(tmp_path / "index")

    @pytest.mark.parametrize("path", ["https://example.org/pictures", "owner/name", "/tmp/s3://bucket"])
    def test_nothing_is_fetched_because_an_index_says_so(self, tmp_path, path, monkeypatch):
        with pytest.raises(ValueError, match="expected an absolute path"):
            Origin(images=path)
        tokenizer, _ = self.saved(tmp_path / "index")
        CodeIndex.build(tokenizer, drawn(3), origin=Origin.model_construct(tokenizer=path)).save(tmp_path / "index")
        with pytest.raises(CheckpointError, match="origin.tokenizer: .*expected an absolute path"):
            CodeIndex.load(tmp_path / "index")

    def test_other_folders_are_left_alone(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("")
        (tmp_path / "index.json").write_text("{}")  # of a web page
        with pytest.raises(ConfigError, match=r"would be replaced, and contains thesis\.tex"):
            self.saved(tmp_path)
        self.saved(tmp_path / "index")
        self.saved(tmp_path / "index")
        assert (tmp_path / "thesis.tex").exists()


def test_an_index_of_the_former_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(_VERSIONS, "format_version", 1)
    CodeIndex.build(built().image, drawn(3)).save(tmp_path / "index")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"format_version is 1, .*; build the index again \(`vqclip search"):
        CodeIndex.load(tmp_path / "index")


class TestPacking:
    @pytest.mark.parametrize("absent", [False, True])
    @pytest.mark.parametrize("sizes", [(2,), (4096,) * 3, (5, 1000, 2**40, 64), (2**63,)])
    def test_ids_come_back(self, sizes, absent):
        packing = Packing(7, sizes, absent)
        rng = np.random.default_rng(0)
        columns = [rng.integers(-absent, size - 1, (33, 7), endpoint=True) for size in sizes]
        ids = torch.from_numpy(np.stack(columns, axis=-1))
        ids[0], ids[1] = torch.tensor([size - 1 for size in sizes]), -int(absent)
        codes = packing.pack(ids)
        assert codes.dtype == torch.uint8
        assert codes.shape == (33, packing.bytes)
        assert torch.equal(packing.unpack(codes), ids)

    def test_the_layout_is_stated_and_bytes_that_hold_no_id_are_refused(self):
        """Token after token, codebook after codebook, highest bit first: 101 0 | 011 1, and nothing for the rest."""
        assert Packing(2, (6, 2), False).pack(torch.tensor([[[5, 0], [3, 1]]])).tolist() == [[0b10100111]]
        with pytest.raises(ShapeError, match="got id 7, expected codebook 0: 0 to 5"):
            Packing(2, (6,), False).unpack(torch.tensor([[255]], dtype=torch.uint8))

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            (torch.full((1, 2, 1), 6), "got id 6, expected codebook 0: 0 to 5"),
            (torch.full((1, 2, 1), -1), "got -1, expected none"),
            (torch.zeros(1, 3, 1, dtype=torch.int64), "got 3 tokens, expected 2"),
            (torch.zeros(1, 2, 1), "float32"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, ids, message):
        with pytest.raises(ShapeError, match=message):
            Packing(2, (6,), False).pack(ids)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("repeat", [False, True])
def test_search_is_exact_whatever_is_kept(keep, repeat, monkeypatch):
    monkeypatch.setattr("vqclip.search.scan._CHUNK", 70)
    tokenizer, ids = built().image, drawn()
    if repeat:
        ids = ids[torch.arange(300) % 111]
    with torch.no_grad():
        embeddings = tokenizer.embed(drawn()[:111])[torch.arange(300) % 111] if repeat else tokenizer.embed(ids)
        scores, items = reference(embeddings, queries(), 10)
    search = CodeSearch(CodeIndex.build(tokenizer, ids), tokenizer, keep)
    found = search.search(queries(), 10)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(search.search(queries(), 10).scores, found.scores)
    torch.testing.assert_close(found.scores, scores, atol=1e-6, rtol=0)
    # Scores are equal, or further apart than rounding: so the order of the items is determined.
    steps = scores[:, :-1] - scores[:, 1:]
    assert ((steps == 0) | (steps > 1e-5)).all()
    assert torch.equal(found.items, items)
    for row, (score, item) in enumerate(zip(found.scores, found.items, strict=True)):
        same = score[:-1] == score[1:]
        assert (item[:-1] < item[1:])[same].all(), row
        assert repeat == bool(same.any())


def test_equal_codes_have_equal_scores_and_are_kept_once():
    tokenizer = built().image
    ids = drawn(7)[torch.tensor([3, 0, 3, 1, 3, 0])]
    index = CodeIndex.build(tokenizer, ids)
    assert len(index) == 6
    assert len(index.codes) == 3
    assert torch.equal(index.ids(torch.arange(6)), ids)
    found = CodeSearch(index, tokenizer).search(tokenizer.embed(ids[:1]).detach(), 99)
    assert found.items[0, :3].tolist() == [0, 2, 4]
    assert found.scores[0, :3].unique().numel() == 1
    assert sorted(found.items[0].tolist()) == list(range(6))


def test_absent_tokens_and_stages_are_kept():
    model = built(RESIDUAL)
    text = model.text.encode(["a red star", "x", "two small blue circles on a grey background"])
    ids = model.image.encode(torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8))
    ids[2, :, 1:] = -1
    for tokenizer, each in ((model.text, text), (model.image, ids)):
        index = CodeIndex.build(tokenizer, each)
        assert torch.equal(index.ids(torch.arange(len(each))), each)
        found = CodeSearch(index, tokenizer).search(tokenizer.embed(each).detach(), 1)
        assert found.items.flatten().tolist() == list(range(len(each)))


def test_an_empty_index_is_loaded_and_finds_nothing(tmp_path):
    tokenizer = built().image
    CodeIndex.build(tokenizer, drawn(0)).save(tmp_path / "index")
    for keep in (False, True):
        found = CodeSearch(CodeIndex.load(tmp_path / "index"), tokenizer, keep).search(queries(), 3)
        assert found.items.shape == found.scores.shape == (5, 0)


def test_the_code_search_of_a_codebook_of_few_bits_is_small():
    tokenizer = built(FSQ).image
    index = CodeIndex.build(tokenizer, torch.arange(64)[:, None, None].expand(64, 4, 1))
    assert index.nbytes == 64 * 3


@pytest.mark.parametrize(
    ("asked", "k", "message"),
    [
        (torch.zeros(16), 1, r"queries: got \(16,\) torch.float32, expected \(Q, 16\)"),
        (torch.zeros(1, 15), 1, r"\(1, 15\)"),
        (torch.full((1, 16), torch.nan), 1, "NaN"),
        (torch.zeros(1, 16), 0, "k: got 0"),
    ],
)
def test_wrong_queries_are_refused(asked, k, message):
    tokenizer = built().image
    with pytest.raises(ShapeError, match=message):
        CodeSearch(CodeIndex.build(tokenizer, drawn(3)), tokenizer).search(asked, k)


def test_another_tokenizer_is_refused():
    model = built()
    index = CodeIndex.build(model.image, drawn(3))
    with pytest.raises(CheckpointError, match="made by the image tokenizer .* got the text tokenizer"):
        CodeSearch(index, model.text)
    with pytest.raises(CheckpointError, match="made by the image tokenizer .* got the text tokenizer"):
        embeddings(index, model.text)


def test_embeddings_and_faiss_find_what_search_finds():
    pytest.importorskip("faiss", reason="pip install 'vqclip[search]'")
    tokenizer, ids = built().image, drawn()[torch.arange(300) % 111]
    index = CodeIndex.build(tokenizer, ids)
    vectors = embeddings(index, tokenizer)
    torch.testing.assert_close(vectors, tokenizer.embed(ids).detach(), atol=1e-6, rtol=0)
    flat, exact = FaissSearch(index, tokenizer), CodeSearch(index, tokenizer)
    assert flat.nbytes > 4 * len(index) * tokenizer.embed_dim > exact.nbytes
    torch.testing.assert_close(flat.search(queries(), 7).scores, exact.search(queries(), 7).scores, atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match="factory: got 'Nonsense'"):
        FaissSearch(index, tokenizer, "Nonsense")


def test_scores_of_any_sign_are_in_order_and_ties_by_number():
    index = CodeIndex.build(built().image, drawn(6))
    scores = torch.tensor([[0.5, -0.0, 0.0, -2.0, -0.5, 0.5]])
    keys = CodeSearch(index, built().image)._keys(scores, torch.arange(6))
    assert keys[0].argsort(descending=True).tolist() == [0, 5, 1, 2, 4, 3]
