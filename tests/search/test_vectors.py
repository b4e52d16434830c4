from __future__ import annotations

import pytest
import torch

from tests.search.making import built, drawn, queries
from vqclip.errors import ConfigError
from vqclip.search import CodeIndex, CodeSearch, FaissSearch


def test_faiss_agrees():
    pytest.importorskip("faiss")
    tokenizer, ids = built().image, drawn()
    index = CodeIndex.build(tokenizer, ids)
    exact, flat = CodeSearch(index, tokenizer).search(queries(), 10), FaissSearch(index, tokenizer)
    found = flat.search(queries(), 10)
    torch.testing.assert_close(found.scores, exact.scores, atol=1e-6, rtol=0)
    assert torch.equal(found.items, exact.items)
    assert flat.nbytes >= 300 * 16 * 4
    with pytest.raises(ConfigError, match="factory: got 'Wrong'"):
        FaissSearch(index, tokenizer, "Wrong")
