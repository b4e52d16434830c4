from __future__ import annotations

import numpy as np
import pytest
import torch

from vqclip.errors import ShapeError
from vqclip.search import Packing


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
