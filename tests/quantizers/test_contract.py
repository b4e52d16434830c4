"""What every quantizer keeps. A new one is a line in CONFIGS."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.training import differences
from vqclip.config.messages import kinds_of
from vqclip.errors import ConfigError, ShapeError
from vqclip.quantizers import (
    VQ,
    BinaryLossWeights,
    BSQConfig,
    FSQConfig,
    IdentityConfig,
    LFQConfig,
    Order,
    ProductConfig,
    Quantizer,
    QuantizerConfig,
    Residual,
    ResidualConfig,
    SimVQConfig,
    Stats,
    VQConfig,
    codebook_matrix,
)
from vqclip.quantizers.nearest import TableQuantizer

SOFT = {"entropy_temperature": 2.0}  # a soft assignment, so that every entry has a gradient
NO_GAP = BinaryLossWeights(codebook_entropy_gap=0.0)
UNIFORM = FSQConfig(levels=(8, 5, 3), layout="uniform")
VQ_5, VQ_3 = VQConfig(dim=5, codebook_size=16), VQConfig(dim=3, codebook_size=8)

CONFIGS = {
    "fsq": FSQConfig(levels=(8, 5, 5, 5)),
    "fsq of even, odd and two levels": FSQConfig(levels=(4, 7, 2)),
    "fsq of 10^18 codes": FSQConfig(levels=(1000,) * 6),
    "lfq": LFQConfig(bits=10, **SOFT),
    "lfq of one bit": LFQConfig(bits=1, **SOFT),
    "lfq of an odd number of bits": LFQConfig(bits=7, **SOFT),
    "lfq of 2^63 codes": LFQConfig(bits=63, loss_weights=NO_GAP, **SOFT),
    "lfq, bounded": LFQConfig(bits=6, scale=0.5, bound="tanh", **SOFT),
    "fsq, symmetric": FSQConfig(levels=(8, 5, 2), layout="symmetric"),
    "fsq, uniform": FSQConfig(levels=(8, 5, 2), layout="uniform"),
    "bsq": BSQConfig(bits=9, **SOFT),
    "vq": VQConfig(dim=6, codebook_size=32),
    "vq, plain": VQConfig(dim=6, codebook_size=7, kmeans=False, dead_below=0, gradient="straight_through"),
    "vq, learned": VQConfig(dim=4, codebook_size=16, learning="gradient"),
    "vq, cosine": VQConfig(dim=5, codebook_size=32, cosine=True),
    "vq, not synchronised": VQConfig(dim=6, codebook_size=32, sync_codebook=False),
    "vq, ibq": VQConfig(dim=4, codebook_size=16, learning="ibq"),
    "vq, diveq": VQConfig(dim=4, codebook_size=16, learning="diveq"),
    "simvq": SimVQConfig(dim=6, codebook_size=32),
    "simvq, blocks": SimVQConfig(dim=6, codebook_size=37, blocks=1),
    "identity": IdentityConfig(dim=6),
    "residual of fsq": ResidualConfig(layer=UNIFORM, depth=3),
    "residual of lfq": ResidualConfig(layer=LFQConfig(bits=5, **SOFT), depth=3),
    "residual of bsq": ResidualConfig(layer=BSQConfig(bits=5, **SOFT), depth=3),
    "residual of vq": ResidualConfig(layer=VQ_5, depth=3),
    "residual of vq, ibq": ResidualConfig(layer=VQ_5.model_copy(update={"learning": "ibq"}), depth=3, dropout=True),
    "residual of simvq": ResidualConfig(layer=SimVQConfig(dim=5, codebook_size=16), depth=2),
    "residual of product of vq": ResidualConfig(layer=ProductConfig(layer=VQ_3, codebooks=2), depth=2),
    "residual of vq with dropout": ResidualConfig(layer=VQ_5, depth=3, dropout=True),
    "residual of fsq with dropout": ResidualConfig(layer=UNIFORM, depth=3, dropout=True),
    "residual of vq, shared": ResidualConfig(layer=VQ_5, depth=3, shared=True),
    "residual of vq, beam": ResidualConfig(layer=VQ_5, depth=3, beam=4),
    "product of vq": ProductConfig(layer=VQConfig(dim=3, codebook_size=16), codebooks=3),
    "product of bsq": ProductConfig(layer=BSQConfig(bits=4, **SOFT), codebooks=2),
    "product of residual of vq": ProductConfig(layer=ResidualConfig(layer=VQ_3, depth=2), codebooks=2),
    "product of residual of vq, diveq": ProductConfig(
        layer=ResidualConfig(layer=VQ_3.model_copy(update={"learning": "diveq"}), depth=2), codebooks=2
    ),
    "product of lfq": ProductConfig(layer=LFQConfig(bits=5, **SOFT), codebooks=2),
    "product of product": ProductConfig(layer=ProductConfig(layer=LFQConfig(bits=3, **SOFT), codebooks=2), codebooks=2),
    "product of identity": ProductConfig(layer=IdentityConfig(dim=2), codebooks=2),
}

DISCRETE = {name: config for name, config in CONFIGS.items() if "identity" not in name}

DIFFERENT_GRAPHS = ("fsq", "bsq", "vq, learned", "vq, ibq", "vq, diveq", "simvq, blocks", "residual of vq, beam")
"""The graphs of the others have no operation that these lack, so they are traced in the slow tests only."""

TRACED = [pytest.param(c, id=n, marks=() if n in DIFFERENT_GRAPHS else pytest.mark.slow) for n, c in CONFIGS.items()]

EXTREMES = [0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, 3e38, -3e38]


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def quantizer(request: pytest.FixtureRequest) -> Quantizer:
    return request.param.build()


@pytest.fixture(params=DISCRETE.values(), ids=DISCRETE.keys())
def discrete(request: pytest.FixtureRequest) -> Quantizer:
    return request.param.build()


def whole(quantizer: Quantizer) -> Quantizer:
    """Without dropout, for tests in which every stage has its say."""
    for module in quantizer.modules():
        if isinstance(module, Residual):
            module.dropout = False
    return quantizer


def vectors_for(quantizer: Quantizer, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random inputs that reach all levels, some of them extreme."""
    generator = torch.Generator().manual_seed(seed)
    x = 1.5 * torch.randn(*shape, quantizer.dim, generator=generator, dtype=torch.float64)
    return x.to(dtype)


def ragged_mask(*shape: int) -> Tensor:
    """Padding at the end of some rows, in the middle of others; one row without any token."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0] = False
    return mask


def assert_same_stats(a: Stats, b: Stats) -> None:
    assert a.keys() == b.keys()
    a, b = a.local(), b.local()
    for name in a:
        assert a[name].dtype == b[name].dtype
        torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def total_loss(quantizer: Quantizer, stats: Stats) -> Tensor:
    """All losses together; a zero with a gradient path where there are none."""
    return sum(quantizer.losses(stats).values(), torch.zeros((), dtype=torch.float64))


class TestOutput:
    @given(data=st.data(), shape=st.lists(st.integers(0, 4), max_size=3), training=st.booleans())
    @settings(max_examples=25, deadline=None)
    def test_shapes_ranges_and_decode(self, data: st.DataObject, shape: list[int], training: bool) -> None:
        quantizer = whole(data.draw(st.sampled_from(list(CONFIGS.values()))).build()).train(training)
        x = vectors_for(quantizer, *shape, seed=data.draw(st.integers(0, 2**16)))
        for index in range(min(x.numel(), 8)):
            x.view(-1)[index] = data.draw(st.sampled_from([*EXTREMES, 1.0]))
        mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape))))
        out = quantizer(x, mask.bool().view(shape))
        assert out.vectors.shape == x.shape
        assert out.ids.shape == (*shape, len(quantizer.codebook_sizes))
        assert out.ids.dtype == torch.int64
        for ids, size in zip(out.ids.unbind(-1), quantizer.codebook_sizes, strict=True):
            assert ((ids >= -1) & (ids <= size - 1)).all()
            assert torch.equal(ids == -1, ~mask.bool().view(shape))
        if quantizer.codebook_sizes:
            assert torch.equal(quantizer.decode(out.ids).view(torch.int32), out.vectors.view(torch.int32))
        assert torch.isfinite(out.vectors).all()

    def test_codes_are_float32_numbers_also_where_vectors_are_float64(self, discrete: Quantizer) -> None:
        wide = discrete(vectors_for(discrete, 200, 5).double())
        assert torch.equal(discrete.decode(wide.ids).double(), wide.vectors)

    def test_decoded_vectors_quantize_to_their_own_ids(self, discrete: Quantizer) -> None:
        """Two ids never share a vector: a random id is found again in its vector."""
        generator = torch.Generator().manual_seed(0)
        columns = [torch.randint(0, min(k, 2**62), (500,), generator=generator) for k in discrete.codebook_sizes]
        ids = torch.stack(columns, dim=-1)
        vectors = discrete.decode(ids)
        if getattr(discrete, "shared", False):
            ids = ids.sort(dim=-1).values  # a sum of codes in any order
            vectors = discrete.decode(ids)
        assert len(vectors.unique(dim=0)) == len(ids.unique(dim=0))

    def test_a_vector_is_the_sum_of_its_codebooks_rows(self, discrete: Quantizer) -> None:
        if max(discrete.codebook_sizes) > 2**18:
            with pytest.raises(ShapeError, match=rf"codebook 0 has {discrete.codebook_sizes[0]} codes, as a matrix"):
                codebook_matrix(discrete, 0)
            return
        ids = torch.stack([torch.randint(0, size, (9,)) for size in discrete.codebook_sizes], dim=-1)
        ids[0, 0] = -1
        total = torch.zeros(9, discrete.dim)
        for codebook, size in enumerate(discrete.codebook_sizes):
            matrix = codebook_matrix(discrete, codebook)
            assert (matrix.shape, matrix.requires_grad) == ((size, discrete.dim), False)
            column = ids[:, codebook]
            total = total + torch.where(column[:, None] < 0, 0, matrix[column.clamp(min=0)])
        torch.testing.assert_close(total, discrete.decode(ids), rtol=1e-6, atol=1e-7)
        with pytest.raises(ShapeError, match=rf"got codebook {len(matrix)}, expected 0 to"):
            codebook_matrix(discrete, len(matrix))

    def test_the_same_in_any_mode_and_arrangement(self, quantizer: Quantizer) -> None:
        x, mask = vectors_for(quantizer, 3, 4).requires_grad_(), ragged_mask(3, 4)
        whole(quantizer)
        assert torch.equal(quantizer.encode(x, mask), quantizer(x, mask).ids)
        assert torch.equal(quantizer.encode(x), quantizer(x).ids)
        a, b = quantizer.train()(x), quantizer.eval()(x)
        assert torch.equal(a.vectors, b.vectors)
        assert torch.equal(a.ids, b.ids)
        assert_same_stats(Stats({name: a.stats[name] for name in b.stats}), b.stats)
        assert torch.equal(quantizer(x[0, 0]).ids, b.ids[0, 0])
        assert torch.equal(quantizer(x.transpose(0, 1)).vectors, b.vectors.transpose(0, 1))
        assert quantizer.bits == pytest.approx(sum(math.log2(size) for size in quantizer.codebook_sizes))

    def test_continuous_is_close_and_masked(self, quantizer: Quantizer) -> None:
        x, mask = vectors_for(quantizer, 50, 4), ragged_mask(50, 4)
        continuous, vectors = quantizer.continuous(x, mask), quantizer(x, mask).vectors
        assert continuous.shape == vectors.shape
        assert (continuous[~mask] == 0).all()
        assert torch.equal(quantizer.continuous(x)[mask], continuous[mask])
        # Rounding keeps the sign or goes to 0, and to the lower of two values at 2 levels; a table is random still.
        least = 0.4 if any(isinstance(module, TableQuantizer) for module in quantizer.modules()) else 0.7
        assert torch.corrcoef(torch.stack((continuous[mask].flatten(), vectors[mask].flatten())))[0, 1] > least


class TestGradient:
    def test_is_that_of_the_continuous_path(self, quantizer: Quantizer) -> None:
        x = vectors_for(quantizer, 6, 5, dtype=torch.float64).requires_grad_()
        upstream = vectors_for(quantizer, 6, 5, dtype=torch.float64, seed=1)
        (through,) = torch.autograd.grad(quantizer(x).vectors, x, upstream)
        (plain,) = torch.autograd.grad(quantizer.continuous(x), x, upstream)
        if all(getattr(module, "gradient", "straight_through") == "straight_through" for module in quantizer.modules()):
            torch.testing.assert_close(through, plain, rtol=1e-12, atol=1e-15)
        assert (through != 0).all()

    def test_a_vector_without_length_has_an_ordinary_one(self, quantizer: Quantizer) -> None:
        x = torch.zeros(3, quantizer.dim, dtype=torch.float64, requires_grad=True)
        out = quantizer(x)
        (out.vectors.sum() + total_loss(quantizer, out.stats)).backward()
        assert x.grad.abs().max() < 1e4

    def test_losses_reach_the_input(self, quantizer: Quantizer) -> None:
        x = vectors_for(quantizer, 6, 5, dtype=torch.float64).requires_grad_()
        losses = quantizer.losses(quantizer(x).stats)
        assert set(quantizer.loss_weights) == set(losses)
        for loss in losses.values():
            gradients = torch.autograd.grad(loss, [x, *quantizer.parameters()], retain_graph=True, allow_unused=True)
            found = [gradient for gradient in gradients if gradient is not None]
            assert all(torch.isfinite(gradient).all() for gradient in found)
            assert any((gradient != 0).any() for gradient in found)

    @pytest.mark.parametrize("name", ["lfq", "lfq of 2^63 codes", "bsq", "product of lfq", "fsq", "vq"])
    def test_second_derivatives_are_refused(self, name: str) -> None:
        """The incoming gradient of a loss is a constant, so that one left out would pass as 0."""
        quantizer = CONFIGS[name].build()
        x = vectors_for(quantizer, 3).requires_grad_()
        out = quantizer(x)
        losses = [quantizer.losses(out.stats)[loss] for loss in quantizer.loss_weights if "entropy" in loss]
        for scalar in losses or [out.vectors.sum()]:
            with pytest.raises(ConfigError, match="create_graph=True, expected False.*no second derivatives"):
                torch.autograd.grad(scalar, x, create_graph=True)

    def test_survives_activation_checkpointing(self, quantizer: Quantizer) -> None:
        x = vectors_for(quantizer, 6, 5, dtype=torch.float64).requires_grad_()
        gradients = []
        for run in (quantizer, lambda x: checkpoint(quantizer, x, use_reentrant=False)):
            out = run(x)
            loss = out.vectors.square().sum() + total_loss(quantizer, out.stats)
            gradients.append(torch.autograd.grad(loss, x)[0])
        assert torch.equal(*gradients)


class TestMask:
    def test_masked_equals_cropped(self, quantizer: Quantizer) -> None:
        mask = ragged_mask(5, 8)
        garbage = torch.tensor([0.3, 1e38, math.nan, math.inf], dtype=torch.float64).repeat(10).view(5, 8, 1)
        real = vectors_for(quantizer, int(mask.sum()), dtype=torch.float64)
        padded = garbage.repeat(1, 1, quantizer.dim)
        padded[mask] = real
        real.requires_grad_()
        padded.requires_grad_()
        a, b = quantizer(padded, mask), quantizer(real)
        assert torch.equal(a.vectors[mask], b.vectors)
        assert torch.equal(a.ids[mask], b.ids)
        assert (a.vectors[~mask] == 0).all()
        assert (a.ids[~mask] == -1).all()
        assert_same_stats(a.stats, b.stats)
        for out in (a, b):
            (out.vectors.square().sum() + total_loss(quantizer, out.stats)).backward()
        assert (padded.grad[~mask] == 0).all()
        torch.testing.assert_close(padded.grad[mask], real.grad, rtol=1e-10, atol=1e-12)

    def test_more_padding_draws_the_same_tokens(self, quantizer: Quantizer) -> None:
        mask = ragged_mask(5, 8)
        x = vectors_for(quantizer, 5, 8, dtype=torch.float64)
        a = quantizer(x, mask).stats
        b = quantizer(F.pad(x, (0, 0, 2, 3), value=7.0), F.pad(mask, (2, 3))).stats
        order = Order(torch.arange(5), 5)
        assert_same_stats(a.sync(order), b.sync(order))

    def test_nothing_to_quantize(self, quantizer: Quantizer) -> None:
        """No samples, no tokens, and tokens that are all masked."""
        for shape in ((0, 4), (3, 0), (3, 4)):
            x = vectors_for(quantizer, *shape, dtype=torch.float64).requires_grad_()
            out = quantizer(x, torch.zeros(shape, dtype=torch.bool))
            losses, metrics = quantizer.losses(out.stats), quantizer.metrics(out.stats)
            assert metrics["tokens"] == 0
            assert all(value == 0 for value in losses.values())
            assert all(torch.isfinite(value) for value in metrics.values())
            (out.vectors.sum() + sum(losses.values())).backward()
            assert (x.grad == 0).all()
            assert quantizer(x).ids.shape == (*shape, len(quantizer.codebook_sizes))


class TestStatistics:
    def test_add_up_over_micro_batches(self, quantizer: Quantizer) -> None:
        x, mask = vectors_for(quantizer, 6, 5, dtype=torch.float64), ragged_mask(6, 5)
        whole = quantizer(x, mask).stats
        parts = [quantizer(x[i:j], mask[i:j]).stats for i, j in ((0, 1), (1, 4), (4, 6))]
        assert_same_stats(parts[0] + parts[1] + parts[2], whole)

    def test_losses_are_not_negative(self, quantizer: Quantizer) -> None:
        for x in (vectors_for(quantizer, 300), 100 * vectors_for(quantizer, 3), torch.zeros(4, quantizer.dim)):
            assert all(value >= 0 for value in quantizer.losses(quantizer(x).stats).values())

    def test_usage_counts_exactly(self, quantizer: Quantizer) -> None:
        x, mask = vectors_for(quantizer, 40, 5), ragged_mask(40, 5)
        out = whole(quantizer)(x, mask)
        metrics = quantizer.metrics(out.stats)
        assert metrics["tokens"] == mask.sum()
        if not quantizer.codebook_sizes or max(quantizer.codebook_sizes) > 2**20:
            assert "usage" not in metrics
            return
        usages, perplexities = [], []
        for ids, size in zip(out.ids[mask].unbind(-1), quantizer.codebook_sizes, strict=True):
            counts = ids.bincount(minlength=size).double()
            share = counts[counts > 0] / counts.sum()
            usages.append((counts > 0).double().mean())
            perplexities.append((-share * share.log()).sum().exp())
        torch.testing.assert_close(metrics["usage"], torch.stack(usages).mean())
        torch.testing.assert_close(metrics["perplexity"], torch.stack(perplexities).mean())
        if len(usages) > 1:
            parts = [name for name in metrics if name.endswith("/usage")]
            leaves = [a for a in parts if not any(b != a and b.startswith(a.removesuffix("usage")) for b in parts)]
            each = torch.stack([metrics[name] for name in leaves])
            torch.testing.assert_close(each.sort().values, torch.stack(usages).sort().values)

    def test_in_evaluation_mode_nothing_changes(self, quantizer: Quantizer) -> None:
        quantizer.eval()
        before = copy.deepcopy(quantizer.state_dict())
        quantizer.update(quantizer(vectors_for(quantizer, 4)).stats)
        assert all(torch.equal(value, before[name]) for name, value in quantizer.state_dict().items())


class TestPrecision:
    def test_autocast_changes_nothing(self, quantizer: Quantizer) -> None:
        """Around all methods, as Lightning's bf16-mixed and `Accelerator.autocast` have it."""
        half, brain = torch.float16, torch.bfloat16
        for dtype, cast_to in ((half, half), (brain, brain), (torch.float32, brain)):
            x = 1e3 + vectors_for(quantizer, 20, 5, dtype=dtype)  # coarse in 16 bits
            found = []
            for is_cast in (True, False):
                copied = copy.deepcopy(quantizer)
                with torch.autocast("cpu", cast_to, enabled=is_cast):
                    out = copied(x)
                    vectors = copied.decode(out.ids) if copied.codebook_sizes else out.vectors
                    losses = copied.losses(out.stats)
                    copied.update(out.stats)
                assert out.vectors.dtype == torch.float32
                assert torch.equal(vectors, out.vectors)
                found.append((out.ids, vectors, losses, dict(out.stats.local()), dict(copied.state_dict())))
            torch.testing.assert_close(*found, rtol=0, atol=0)

    def test_backward_within_autocast_changes_no_gradient(self, quantizer: Quantizer) -> None:
        x, gradients = vectors_for(quantizer, 20, 5).requires_grad_(), []
        for is_cast in (True, False):
            out = quantizer(x)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                total = sum(quantizer.losses(out.stats).values(), out.vectors.square().sum())
                gradients += torch.autograd.grad(total, x)
        torch.testing.assert_close(*gradients, rtol=0, atol=0)

    def test_casting_the_module_changes_nothing(self, quantizer: Quantizer) -> None:
        x = vectors_for(quantizer, 20, 5)
        plain = quantizer(x)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            cast = copy.deepcopy(quantizer).to(dtype)(x)
            assert torch.equal(plain.ids, cast.ids)
            if dtype == torch.float64:  # codes that are computed have more digits then
                torch.testing.assert_close(plain.vectors, cast.vectors)
            else:
                assert torch.equal(plain.vectors, cast.vectors)

    def test_double_stays_double(self, quantizer: Quantizer) -> None:
        """And a mask without padding changes nothing."""
        x = vectors_for(quantizer, 3, 4, dtype=torch.float64)
        out, masked = quantizer(x), quantizer(x, torch.ones(3, 4, dtype=torch.bool))
        assert out.vectors.dtype == torch.float64
        assert all(total.dtype in (torch.float64, torch.int64) for total in dict(out.stats).values())
        assert torch.equal(out.vectors, masked.vectors)
        assert torch.equal(out.ids, masked.ids)
        assert_same_stats(out.stats, masked.stats)

    @pytest.mark.parametrize("length", [1.0, 1e25, 3e38])
    @pytest.mark.parametrize("name", ["bsq", "vq, cosine", "residual of bsq", "product of bsq"])
    def test_only_the_direction_counts_at_any_length(self, name: str, length: float) -> None:
        """In float32 as in float64, ids, vectors and gradients alike."""
        quantizer = CONFIGS[name].build()
        x = vectors_for(quantizer, 40)
        x = (x / x.abs().max()) * length
        found = []
        for dtype in (torch.float32, torch.float64):
            given = x.to(dtype).requires_grad_()
            out = quantizer(given)
            (gradient,) = torch.autograd.grad((out.vectors.sum(dim=0) * torch.arange(quantizer.dim)).sum(), given)
            found.append((out.ids, out.vectors.detach().double(), gradient.double() * length))
        assert torch.equal(found[0][0], found[1][0])
        for one, other in zip(*(each[1:] for each in found), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())
            assert other.abs().max() > 1e-3

    def test_gradient_keeps_the_dtype_of_the_input(self, quantizer: Quantizer) -> None:
        x = vectors_for(quantizer, 20, dtype=torch.bfloat16).requires_grad_()
        quantizer(x).vectors.sum().backward()
        assert x.grad.dtype == torch.bfloat16

    def test_nan_shows_in_vectors_and_losses_but_not_in_ids(self, quantizer: Quantizer) -> None:
        x = vectors_for(quantizer, 6, 5)
        x[1, 2, 0] = math.nan
        for training in (True, False):
            out = whole(quantizer).train(training)(x)
            assert out.vectors[1, 2].isnan().any()
            assert not out.vectors[0].isnan().any()
            for ids, size in zip(out.ids.unbind(-1), quantizer.codebook_sizes, strict=True):
                assert ((ids >= 0) & (ids <= size - 1)).all()
            losses = quantizer.losses(out.stats)
            assert all(loss.isnan() for loss in losses.values())


@pytest.mark.parametrize("config", TRACED)
class TestGraphs:
    @pytest.mark.parametrize(("training", "masked"), [(True, True), pytest.param(False, False, marks=pytest.mark.slow)])
    def test_compiles_without_a_break(self, config: QuantizerConfig, training: bool, masked: bool) -> None:
        torch._dynamo.reset()
        quantizer = config.build().train(training)
        x = vectors_for(quantizer, 4, 6, dtype=torch.float64).requires_grad_(training)
        mask = ragged_mask(4, 6) if masked else None
        # What evaluation traces goes through AOTAutograd in `test_exports_in_eval`.
        compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager" if training else "eager")
        a, b = compiled(x, mask), quantizer(x, mask)
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.vectors, b.vectors)
        assert_same_stats(a.stats, b.stats)
        if training:
            losses = [out.vectors.square().sum() + total_loss(quantizer, out.stats) for out in (a, b)]
            torch.testing.assert_close(*(torch.autograd.grad(loss, x) for loss in losses), rtol=1e-12, atol=1e-12)
            if quantizer.codebook_sizes:
                decode = torch.compile(quantizer.decode, fullgraph=True, backend="aot_eager")
                assert torch.equal(decode(b.ids), quantizer.decode(b.ids))

    def test_exports_in_eval(self, config: QuantizerConfig) -> None:
        quantizer = config.build()
        x, mask = vectors_for(quantizer, 4, 6), ragged_mask(4, 6)
        batch = torch.export.Dim("batch", min=2, max=64)
        torch.export.export(quantizer.eval(), (x,), dynamic_shapes=({0: batch},))
        program = torch.export.export(quantizer, (x, mask), dynamic_shapes=({0: batch}, {0: batch}))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        larger, larger_mask = vectors_for(quantizer, 7, 6), ragged_mask(7, 6)
        a, b = torch.export.load(file).module()(larger, larger_mask), quantizer(larger, larger_mask)
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.vectors, b.vectors)


class TestErrors:
    def test_vectors_and_masks(self, quantizer: Quantizer) -> None:
        width, x = quantizer.dim, vectors_for(quantizer, 3, 4)
        for wrong, message in (
            (torch.zeros(4, width + 1), rf"\(4, {width + 1}\), expected \(\.\.\., {width}\)"),
            (torch.zeros(()), r"shape \(\)"),
            (torch.zeros(4, width, dtype=torch.int64), r"torch\.int64.*floating-point"),
        ):
            with pytest.raises(ShapeError, match=message):
                quantizer(wrong)
        with pytest.raises(ShapeError, match=r"shape \(3, 5\).*shape \(3, 4\)"):
            quantizer(x, torch.ones(3, 5, dtype=torch.bool))
        with pytest.raises(ShapeError, match=r"mask is torch\.float32"):
            quantizer(x, torch.ones(3, 4))
        for call in (quantizer.encode, quantizer.continuous):
            with pytest.raises(ShapeError, match="mask"):
                call(x, torch.ones(3, dtype=torch.bool))

    def test_ids(self, quantizer: Quantizer) -> None:
        if not quantizer.codebook_sizes:
            with pytest.raises(ShapeError, match=r"Identity has no codebook.*use FSQ or LFQ"):
                quantizer.decode(torch.zeros(3, 0, dtype=torch.int64))
            with pytest.raises(ShapeError, match="got codebook 0, expected none: it has no codebook"):
                codebook_matrix(quantizer, 0)
            return
        ids = quantizer(vectors_for(quantizer, 3)).ids
        with pytest.raises(ShapeError, match=r"torch\.float32, expected integers"):
            quantizer.decode(ids.float())
        for dtype in (torch.int8, torch.uint8, torch.int16):
            assert torch.equal(quantizer.decode(torch.zeros_like(ids, dtype=dtype)), quantizer.decode(ids * 0))
        with pytest.raises(ShapeError, match=r"expected \(\.\.\., \d+\): one id per codebook"):
            quantizer.decode(torch.cat((ids, ids), dim=-1))
        for wrong in (-2, quantizer.codebook_sizes[-1]):
            if wrong < 2**63:
                broken = ids.clone()
                broken[1, -1] = wrong
                with pytest.raises(ShapeError, match=rf"got id {wrong}, expected codebook {ids.shape[-1] - 1}: 0 to"):
                    quantizer.decode(broken)


def test_every_family_is_here() -> None:
    assert {config.kind for config in CONFIGS.values()} == set(kinds_of(QuantizerConfig))


def short_lived(config: QuantizerConfig) -> Quantizer:
    """One whose unused codes die at once."""
    quantizer = config.build()
    for part in quantizer.parts():
        if isinstance(part, VQ):
            part.decay, part.dead_below = 0.5, 0.9
            part._refresh_draws()
    quantizer.set_seed(7)
    return quantizer


NESTED = {
    "residual of residual of vq": ResidualConfig(layer=CONFIGS["residual of vq"], depth=2, dropout=True),
    "product of residual of product of vq": ProductConfig(layer=CONFIGS["residual of product of vq"], codebooks=2),
}


@pytest.mark.parametrize("config", (CONFIGS | NESTED).values(), ids=(CONFIGS | NESTED).keys())
def test_state_dict_holds_all_state(config: QuantizerConfig) -> None:
    """After any number of steps a loaded module equals the saved one in every attribute, and so does its next step."""
    saved = short_lived(config)
    for number in range(8):
        loaded, file = short_lived(config), io.BytesIO()
        torch.save(saved.state_dict(), file)
        file.seek(0)
        loaded.load_state_dict(torch.load(file, weights_only=True), strict=True)
        assert differences(saved, loaded) == []
        x = vectors_for(saved, 10, 3, seed=number)
        x[5:] = x[0] + 10 * number  # fewer vectors than codes, elsewhere in every step
        outputs = [quantizer(x) for quantizer in (saved, loaded)]
        assert differences(*outputs) == []
        for quantizer, out in zip((saved, loaded), outputs, strict=True):
            quantizer.update(out.stats)
        assert differences(saved, loaded) == []
