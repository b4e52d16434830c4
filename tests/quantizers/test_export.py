from __future__ import annotations

import pytest
import torch

from tests.quantizers.test_contract import CONFIGS
from vqclip.errors import ShapeError
from vqclip.quantizers import codebook_matrix

SMALL = [name for name, config in CONFIGS.items() if max(config.build().codebook_sizes, default=2**63) < 2**18]


@pytest.mark.parametrize("name", SMALL)
def test_a_vector_is_the_sum_of_its_codebooks_rows(name):
    quantizer = CONFIGS[name].build().eval()
    ids = torch.stack([torch.randint(0, size, (9,)) for size in quantizer.codebook_sizes], dim=-1)
    ids[0, 0] = -1
    total = torch.zeros(9, quantizer.dim)
    for codebook, size in enumerate(quantizer.codebook_sizes):
        matrix = codebook_matrix(quantizer, codebook)
        assert (matrix.shape, matrix.requires_grad) == ((size, quantizer.dim), False)
        column = ids[:, codebook]
        total = total + torch.where(column[:, None] < 0, 0, matrix[column.clamp(min=0)])
    torch.testing.assert_close(total, quantizer.decode(ids), rtol=1e-6, atol=1e-7)


def test_codebooks_that_cannot_be_a_matrix_are_refused():
    with pytest.raises(ShapeError, match=f"LFQ: codebook 0 has {2**63} codes, as a matrix {2**63} × 63 numbers"):
        codebook_matrix(CONFIGS["lfq of 2^63 codes"].build(), 0)
    with pytest.raises(ShapeError, match=r"FSQ: got codebook 1, expected 0 to 0"):
        codebook_matrix(CONFIGS["fsq"].build(), 1)
    with pytest.raises(ShapeError, match=r"Identity: got codebook 0, expected none: it has no codebook"):
        codebook_matrix(CONFIGS["identity"].build(), 0)
