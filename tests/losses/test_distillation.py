"""The distillation loss beside open_clip's, on any number of ranks."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from tests.losses.test_tiled import assert_equals_one_process, pairs, tile_bytes, value_and_gradients
from tests.ranks import for_each
from vqclip import dist
from vqclip.dist._torch_versions import TORCH_VERSION
from vqclip.errors import ShapeError
from vqclip.losses import DistillationLoss, Implementation

IMPLEMENTATIONS = get_args(Implementation)
TEACHER_SCALE = torch.tensor(20.0, dtype=torch.float64)


def teacher():
    return pairs(11, width=24, likeness=2.0, seed=5)


def on_a_rank(impl, sizes, tile):
    mine, theirs = ([t.split(sizes)[dist.rank()] for t in some] for some in (pairs(11), teacher()))
    loss = DistillationLoss(impl)
    with tile_bytes(tile, 0):
        return value_and_gradients(lambda *inputs: loss(*inputs, *theirs, TEACHER_SCALE), *mine, (14.0,))


def of_open_clip(image, text, scale):
    peer = pytest.importorskip("open_clip.loss").DistillClipLoss()
    return peer(image, text, scale, *teacher(), TEACHER_SCALE)[1]


@pytest.mark.parametrize(
    "sizes",
    [[11], *(pytest.param(each, marks=pytest.mark.slow) for each in ([6, 5], [3, 2, 2, 4])), [4, 0, 7]],
    ids=str,
)
def test_equals_open_clip_on_any_ranks(ranks, sizes):
    expected = value_and_gradients(of_open_clip, *pairs(11), (14.0,))
    found = ranks(len(sizes), for_each, on_a_rank, [(impl, sizes, 200) for impl in IMPLEMENTATIONS])
    for results in zip(*found, strict=True):
        assert_equals_one_process(results, expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_without_gradients_and_compiled(impl):
    torch._dynamo.reset()
    loss, theirs = DistillationLoss(impl), teacher()

    def scaled(*inputs):
        return 3 * loss(*inputs, *theirs, TEACHER_SCALE)

    expected = value_and_gradients(scaled, *pairs(11), (14.0,))
    compiled = torch.compile(scaled, fullgraph=TORCH_VERSION >= (2, 12), backend="aot_eager")
    torch.testing.assert_close(value_and_gradients(compiled, *pairs(11), (14.0,)), expected, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(scaled(*pairs(11), torch.tensor(14.0)), expected[0], rtol=1e-12, atol=0)


def test_no_gradient_reaches_the_teacher():
    theirs = [features.requires_grad_() for features in teacher()]
    image, text = (features.requires_grad_() for features in pairs(11))
    DistillationLoss()(image, text, torch.tensor(14.0), *theirs, TEACHER_SCALE).backward()
    assert image.grad is not None
    assert all(features.grad is None for features in theirs)


def test_another_number_of_pairs_is_refused():
    with pytest.raises(ShapeError, match="got 3 pairs from the student and 11 from the teacher"):
        DistillationLoss()(*pairs(3), torch.tensor(1.0), *teacher(), TEACHER_SCALE)
