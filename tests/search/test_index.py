from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.search.making import built, drawn, queries
from vqclip.errors import CheckpointError, ConfigError, ShapeError
from vqclip.search import CodeIndex, CodeSearch, Packing
from vqclip.search.index import _VERSIONS


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

    def test_an_index_without_items_is_loaded(self, tmp_path):
        CodeIndex.build(built().image, drawn(0)).save(tmp_path / "index")
        assert len(CodeIndex.load(tmp_path / "index")) == 0

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
            ({"row": torch.tensor([0, 1, 0, 3, 1], dtype=torch.int32)}, "row: numbers outside the 3 codes"),
            ({"row": torch.tensor([0, 1, 0, 2, 1])}, r"row: got \(5,\) torch.int64"),
            ({"extra": torch.zeros(1)}, "unexpected extra"),
            ({"codes": torch.zeros(3, 5, dtype=torch.uint8)}, r"codes: got \(3, 5\)"),
            ({"places": torch.tensor([0, 1, -1, 2, 3])}, "places: got -1, expected 0 or more"),
            ({"names": torch.zeros(3, dtype=torch.uint8)}, "names: expected a list of 5 texts"),
            ({"names": torch.tensor([*b'["a", 1]'], dtype=torch.uint8)}, "names: expected a list of 5 texts"),
        ],
    )
    def test_an_honest_hash_of_nonsense_is_refused(self, tmp_path, change, message, monkeypatch):
        """Whoever makes a file can make its hash, too."""
        from safetensors.torch import save_file

        monkeypatch.setattr(
            "vqclip.search.index.save_tensors", lambda tensors, path: save_file({**tensors, **change}, path)
        )
        self.saved(tmp_path / "index")
        with pytest.raises(CheckpointError, match=message):
            CodeIndex.load(tmp_path / "index")

    @pytest.mark.parametrize("sizes", [(0, 64), (64, -1), (2**63 + 1,), (2,) * (2**16 + 1)])
    def test_codebooks_that_cannot_be_are_refused(self, tmp_path, sizes, monkeypatch):
        from vqclip.search import index

        header = index._Header

        def forged(codebook_sizes, **facts):
            return header.model_construct(codebook_sizes=sizes, **facts)

        with monkeypatch.context() as patch:
            patch.setattr(index, "_Header", forged)
            self.saved(tmp_path / "index")
        with pytest.raises(CheckpointError, match=r"index.json: codebook_sizes"):
            CodeIndex.load(tmp_path / "index")

    @pytest.mark.parametrize("path", ["https://example.org/pictures", "owner/name", "/tmp/s3://bucket"])
    def test_nothing_is_fetched_because_an_index_says_so(self, tmp_path, path, monkeypatch):
        from vqclip.search.index import Origin

        with pytest.raises(ValueError, match="expected an absolute path"):
            Origin(pictures=path)
        tokenizer, _ = self.saved(tmp_path / "index")
        CodeIndex.build(tokenizer, drawn(3), origin=Origin.model_construct(tokenizer=path)).save(tmp_path / "index")
        with pytest.raises(CheckpointError, match="origin.tokenizer: .*expected an absolute path"):
            CodeIndex.load(tmp_path / "index")

    def test_other_folders_are_left_alone(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("")
        with pytest.raises(ConfigError, match="contains no index.json but thesis.tex"):
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

    def test_bits_are_what_the_sizes_need(self):
        assert Packing(16, (4096,) * 16, False).bits == 16 * 16 * 12
        assert Packing(16, (4096,) * 16, True).bits == 16 * 16 * 13
        assert Packing(3, (5, 8, 2), False).bits == 3 * (3 + 3 + 1)
        assert Packing(3, (5, 8, 2), False).bytes == 3

    def test_the_layout_is_stated(self):
        """Token after token, codebook after codebook, highest bit first: 101 0 | 011 1, and nothing for the rest."""
        assert Packing(2, (6, 2), False).pack(torch.tensor([[[5, 0], [3, 1]]])).tolist() == [[0b10100111]]

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            (torch.full((1, 2, 1), 6), "numbers from 6 to 6, expected 0 to one less"),
            (torch.full((1, 2, 1), -1), "numbers from -1"),
            (torch.zeros(1, 3, 1, dtype=torch.int64), r"expected \(n, 2, 1\) integers"),
            (torch.zeros(1, 2, 1), "float32"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, ids, message):
        with pytest.raises(ShapeError, match=message):
            Packing(2, (6,), False).pack(ids)

    def test_bytes_that_hold_no_id_are_refused(self):
        with pytest.raises(ShapeError, match="numbers from 7 to 7"):
            Packing(2, (6,), False).unpack(torch.tensor([[255]], dtype=torch.uint8))
