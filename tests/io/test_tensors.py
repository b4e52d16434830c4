from __future__ import annotations

import pytest
import torch

from vqclip.io.tensors import checksums, nonfinite_names


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("length", [1, 3, 17])
def test_every_flipped_bit_changes_the_checksum(dtype, length):
    wide = torch.arange(length + 1).to(dtype)
    for tensor in (wide[1:], torch.stack([wide, wide])[:, 0]):  # misaligned; not contiguous
        plain = tensor.contiguous().clone()
        before = checksums({"a": tensor})
        assert before == checksums({"a": plain})
        data = plain.view(torch.uint8)
        for place in range(len(data) * 8 if dtype != torch.bool else 0):
            data[place // 8] ^= 1 << place % 8
            assert checksums({"a": plain}) != before
            data[place // 8] ^= 1 << place % 8


def test_a_change_far_into_a_large_tensor_is_seen():
    tensor = torch.zeros(300_000)
    before = checksums({"a": tensor, "empty": torch.zeros(0), "number": torch.tensor(1.0)})
    tensor[299_999] = 1e-45
    after = checksums({"a": tensor, "empty": torch.zeros(0), "number": torch.tensor(1.0)})
    assert [before[name] == after[name] for name in before] == [False, True, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_tensors_that_are_not_finite_are_named(value):
    tensors = {name: torch.ones(3, dtype=dtype) for name, dtype in (("a", torch.float16), ("b", torch.float64))}
    tensors |= {
        "c": torch.ones(3, dtype=torch.int64),
        "d": torch.zeros(0),
        "e": torch.tensor(1e300, dtype=torch.float64),
    }
    assert nonfinite_names(tensors) == []
    tensors["b"][1] = value
    assert nonfinite_names(tensors) == ["b"]
