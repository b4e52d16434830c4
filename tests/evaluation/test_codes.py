from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from vqclip.errors import CheckpointError, ShapeError
from vqclip.evaluation.codes import code_usage, count_codes, id_dtype, load_ids, merge_counts, save_ids


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((2,), torch.int8),
        ((128, 5), torch.int8),
        ((129,), torch.int16),
        ((5, 2**15), torch.int16),
        ((2**15 + 1,), torch.int32),
        ((2**31,), torch.int32),
        ((2**31 + 1,), torch.int64),
        ((2**63,), torch.int64),
    ],
)
def test_ids_come_back_from_the_smallest_type_that_holds_them(tmp_path, sizes, dtype):
    last = torch.tensor([size - 1 for size in sizes])
    ids = torch.stack([last, torch.zeros_like(last), torch.full_like(last, -1)])[None]
    assert id_dtype(sizes) == dtype
    save_ids(tmp_path / "ids", ids, sizes)
    assert load_file(tmp_path / "ids")["ids"].dtype == dtype
    assert torch.equal(load_ids(tmp_path / "ids", sizes).long(), ids)


def test_ids_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ShapeError, match=r"got shape \(1, 2, 3\), expected \(B, N, 2\)"):
        save_ids(tmp_path / "ids", torch.zeros(1, 2, 3, dtype=torch.int64), (4, 4))
    save_ids(tmp_path / "ids", torch.zeros(1, 2, 1, dtype=torch.int64), (8,))
    with pytest.raises(CheckpointError, match=r"sizes \[8\], expected \[9\]"):
        load_ids(tmp_path / "ids", (9,))
    (tmp_path / "ids").write_bytes((tmp_path / "ids").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ids cannot be read"):
        load_ids(tmp_path / "ids", (8,))
    with pytest.raises(CheckpointError, match="ids cannot be read"):
        load_ids(tmp_path / "none", (8,))


def test_usage_equals_counting_by_hand():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 6, (9, 4, 2), generator=generator)
    ids[:, 3] = -1
    parts = [count_codes(ids[:5]), count_codes(ids[5:])]
    counts = [
        merge_counts(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(parts[0], parts[1], strict=True)
    ]
    usage = code_usage(counts, (8, 2**40), samples=9)
    bits = 0.0
    for codebook, size in enumerate((8, 2**40)):
        seen = Counter(ids[:, :3, codebook].flatten().tolist())
        entropy = -sum(n / 27 * math.log(n / 27) for n in seen.values())
        assert usage.codes_used[codebook] == len(seen)
        assert usage.usage[codebook] == len(seen) / size
        assert usage.perplexity[codebook] == pytest.approx(math.exp(entropy))
        bits += entropy / math.log(2)
    assert usage.bits_used_per_token == pytest.approx(bits)
    assert (usage.samples, usage.tokens, usage.tokens_per_sample) == (9, 27, 3)
    assert (usage.bits_per_token, usage.bits_per_sample) == (43, 129)
