"""The first stages and codebooks of a quantizer's ids."""

from __future__ import annotations

import pytest
import torch

from vqclip.errors import ConfigError, ShapeError
from vqclip.quantizers import FSQ, LFQ, VQ, Identity, Prefix, Product, Residual


def nested():
    return Product(Residual(Product(LFQ(3), 2), 3), 4)


def test_columns_of_nested_quantizers_by_hand():
    """Part by part, stage by stage, codebook by codebook."""
    quantizer = nested()
    assert quantizer.extent == Prefix(stages=3, codebooks=8)
    assert quantizer.places[:8] == ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 2), (0, 3))
    assert quantizer.columns(stages=1) == [0, 1, 6, 7, 12, 13, 18, 19]
    assert quantizer.columns(codebooks=3) == [0, 1, 2, 3, 4, 5, 6, 8, 10]
    assert quantizer.columns(2, 1) == [0, 2]
    assert quantizer.columns() == list(range(24))
    assert Residual(Residual(LFQ(3), 2), 3).columns(stages=4) == [0, 1, 2, 3]


def test_first_stages_are_a_quantizer_of_their_own():
    torch.manual_seed(0)
    x = torch.randn(50, 24)
    deep = Product(Residual(FSQ((5, 5, 5), "uniform"), 4), 8)
    ids = deep.encode(x)
    for depth in range(1, 5):
        alone = Product(Residual(FSQ((5, 5, 5), "uniform"), depth), 8)
        kept = deep.truncate(ids, stages=depth)
        assert torch.equal(kept[..., deep.columns(depth)], alone.encode(x))
        assert torch.equal(deep.decode(kept), alone(x).vectors)
    assert torch.equal(deep.truncate(ids), ids)


def test_left_out_codebooks_are_zero():
    torch.manual_seed(0)
    quantizer = Product(VQ(3, 16), 4).eval()
    out = quantizer(torch.randn(7, 12))
    kept = quantizer.truncate(out.ids.to(torch.uint8), codebooks=3)
    assert kept.dtype == torch.int64
    assert torch.equal(quantizer.decode(kept)[:, :9], out.vectors[:, :9])
    assert (quantizer.decode(kept)[:, 9:] == 0).all()


def test_prefixes_to_evaluate():
    assert FSQ((4, 4)).extent.shorter() == [(1, 1)]
    assert Residual(LFQ(3), 3).extent.shorter() == [(1, 1), (2, 1), (3, 1)]
    assert [each.codebooks for each in Product(LFQ(3), 12).extent.shorter()] == [1, 2, 4, 8, 12]
    assert Product(Residual(LFQ(3), 3), 2).extent.shorter() == [(1, 2), (2, 2), (3, 1), (3, 2)]
    assert Identity(4).extent.shorter() == []


def test_share_of_other_ids():
    assert Prefix(1, 3).share(Prefix(4, 4), Prefix(2, 2)) == (1, 2)
    assert Prefix(4, 4).share(Prefix(4, 4), Prefix(3, 16)) == (3, 16)
    assert Prefix(1, 1).share(Prefix(4, 4), Prefix(0, 0)) == (0, 0)


@pytest.mark.parametrize(
    ("stages", "codebooks", "told"),
    [
        (0, 1, "stages: got 0, expected 1 to 3"),
        (4, 1, "got 4"),
        (1, 9, "codebooks: got 9, expected 1 to 8"),
        (1.5, 1, "stages: got 1.5"),
        ("2", 1, "stages: got '2'"),
        (1, True, "got True"),
    ],
)
def test_a_prefix_that_does_not_exist_is_refused(stages, codebooks, told):
    with pytest.raises(ConfigError, match=told):
        nested().columns(stages, codebooks)


def test_other_mistakes_are_refused():
    with pytest.raises(ConfigError, match="Identity has no codes"):
        Identity(4).columns(1, 1)
    with pytest.raises(ShapeError, match="one id per codebook"):
        nested().truncate(torch.zeros(2, 3, dtype=torch.int64), 1)
