from __future__ import annotations

import pytest
import torch

from vqclip.errors import ConfigError
from vqclip.quantizers import FSQ, LFQ, VQ, Identity, Product, Quantizer, Residual


@pytest.mark.parametrize("layer", [FSQ((8, 5, 5)), LFQ(5, entropy_temperature=2.0)], ids=["fsq", "lfq"])
def test_equals_one_layer_a_codebook(layer: Quantizer) -> None:
    product = Product(layer, codebooks=3)
    x = torch.randn(4, 6, product.dim, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(4, 6) > 0.3
    out = product(x, mask)
    parts = [layer(part, mask) for part in x.chunk(3, dim=-1)]
    assert torch.equal(out.vectors, torch.cat([part.vectors for part in parts], dim=-1))
    assert torch.equal(out.ids, torch.cat([part.ids for part in parts], dim=-1))
    assert product.codebook_sizes == layer.codebook_sizes * 3
    assert product.bits == pytest.approx(3 * layer.bits)
    losses, apart = product.losses(out.stats), [layer.losses(part.stats) for part in parts]
    assert product.loss_weights == layer.loss_weights
    for name, loss in losses.items():
        expected = torch.stack([losses[name] for losses in apart]).mean()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            *(torch.autograd.grad(y, x, retain_graph=True) for y in (loss, expected)), rtol=1e-10, atol=1e-14
        )
    metrics = product.metrics(out.stats)
    for codebook, part in enumerate(parts):
        for name in ("usage", "perplexity"):
            torch.testing.assert_close(metrics[f"{codebook}/{name}"], layer.metrics(part.stats)[name])


def test_an_absent_part_decodes_as_zero() -> None:
    product = Product(FSQ((4, 4)), codebooks=2)
    ids = product(torch.randn(3, 4)).ids
    whole = product.decode(ids)
    ids[1, 0] = -1
    part = product.decode(ids)
    assert part[1].tolist() == [0, 0, *whole[1, 2:].tolist()]
    assert torch.equal(part[0], whole[0])


def test_columns_of_a_nested_product_are_in_channel_order() -> None:
    nested = Product(Product(FSQ((3,)), codebooks=2), codebooks=2)
    x = torch.tensor([[-5.0, 0.0, 5.0, -5.0]])
    assert nested(x).ids.tolist() == [[0, 1, 2, 0]]


def test_every_codebook_has_codes_of_its_own() -> None:
    product = Product(VQ(2, 8), codebooks=3)
    assert len(product.layer.codebook.flatten(0, 1).unique(dim=0)) == 24
    x = torch.randn(5, 6)
    for part, ids in enumerate(product(x).ids.unbind(-1)):
        distances = torch.cdist(x[:, 2 * part : 2 * part + 2], product.layer.codebook[part])
        assert torch.equal(ids, distances.argmin(dim=-1))


def test_nested_products_multiply_the_codebooks() -> None:
    product = Product(Product(VQ(2, 8), codebooks=3), codebooks=2)
    assert product.layer.layer.codebook.shape == (6, 8, 2)


def test_no_codebooks() -> None:
    with pytest.raises(ConfigError, match="codebooks is 0"):
        Product(FSQ((4,)), codebooks=0)


def test_nested_quantizers_have_a_bound() -> None:
    half = Product(FSQ((4,), "uniform"), codebooks=2**15)
    assert len(Product(half, codebooks=2).codebook_sizes) == 2**16
    with pytest.raises(ConfigError, match=r"Product: got 98304 codebooks and 98304 channels .* at most 65536 of each"):
        Product(half, codebooks=3)
    with pytest.raises(ConfigError, match="Residual: got 98304 codebooks and 32768 channels a token"):
        Residual(half, depth=3)
    nested = Residual(Product(Residual(VQ(2, 2), depth=16), codebooks=2), depth=16)
    with pytest.raises(ConfigError, match="Residual: got 512 stages, nested ones counted; expected at most 256"):
        Residual(nested, depth=2)
    with pytest.raises(ConfigError, match="Product: got 0 codebooks and 131072 channels"):
        Product(Identity(2**16), codebooks=2)
