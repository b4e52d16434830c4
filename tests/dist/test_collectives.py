"""Every collective on 2 and 4 ranks against one process: values, and gradients in fp64."""

import itertools
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as c10d
import torch.nn.functional as F

from tests.ranks import RankError, for_each
from vqclip import dist
from vqclip.dist import _collectives
from vqclip.dist._torch_versions import TORCH_VERSION
from vqclip.errors import DistributedError, ShapeError

SIZES = {2: [(3, 3), (5, 2), (4, 0), (0, 3)], 4: [(2, 2, 2, 2), (3, 1, 4, 2), (2, 0, 3, 1)]}


def share(x, sizes, rank):
    """The rows of `x` that belong to `rank` when the ranks hold `sizes` rows each."""
    return x.split(list(sizes))[rank]


def loss_of(y):
    """A loss in which all entries meet, with a different weight each."""
    weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape).cos()
    return (weights * y.sin()).sum() + y.sum() ** 2 / 7


def gather_loss(x, sizes):
    return loss_of(dist.all_gather(x, sizes))


def replicated_sum_loss(x, sizes):
    return loss_of(dist.replicated_sum(x.square().sum(0)))


LOSSES = {"all_gather": gather_loss, "replicated_sum": replicated_sum_loss}
OPS = list(LOSSES)


def run_op(op, x, sizes, backend=None, tell_sizes=False):
    loss_fn, whole = LOSSES[op], tell_sizes and TORCH_VERSION >= (2, 12)
    if backend is not None:
        loss_fn = torch.compile(loss_fn, backend=backend, fullgraph=whole)
    mine = share(x, sizes, dist.rank()).clone().requires_grad_()
    loss = loss_fn(mine, list(sizes) if tell_sizes else None)
    loss.backward()
    return loss.item(), mine.grad


def check_against_one_process(op, x, sizes, results):
    """All ranks hold one loss, and W times the gradient of one process."""
    full = x.clone().requires_grad_()
    loss = LOSSES[op](full, None)
    loss.backward()
    for rank, (value, grad) in enumerate(results):
        assert value == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(grad, len(sizes) * share(full.grad, sizes, rank), rtol=1e-11, atol=1e-12)


def rows(sizes, seed=0):
    return torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("world_size", SIZES)
def test_value_and_gradient_equal_one_process(ranks, world_size):
    cases = [(op, rows(sizes), sizes) for op in OPS for sizes in SIZES[world_size]]
    found = ranks(world_size, for_each, run_op, cases)
    for case, results in zip(cases, zip(*found, strict=True), strict=True):
        check_against_one_process(*case, results)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_without_a_graph_break_where_sizes_are_told(ranks, backend):
    cases = [(op, rows((4, 1)), (4, 1), backend, True) for op in OPS]
    cases += [("all_gather", rows((1, 3)), (1, 3), backend, False)]
    found = ranks(2, for_each, run_op, cases, timeout=560.0)
    for case, results in zip(cases, zip(*found, strict=True), strict=True):
        check_against_one_process(*case[:3], results)


def both_gathers(x, sizes):
    """Values and gradients through torch's function and through our own, and how often torch's was called for each."""
    functional, found, calls = torch.distributed.nn.functional, [], []
    for uses_torch in (True, False):
        mine = share(x, sizes, dist.rank()).clone().requires_grad_()
        counted = mock.patch.object(functional, "all_gather", wraps=functional.all_gather)
        with counted as theirs, mock.patch.object(_collectives, "HAS_NN_ALL_GATHER", uses_torch):
            gathered = dist.all_gather(mine)
            dist.all_gather(mine.detach())  # without gradients there is nothing to keep
        calls.append(theirs.call_count)
        # Each rank its own loss: the sum over ranks must be seen in backward.
        ((1 + dist.rank()) * loss_of(gathered)).backward()
        found.append((gathered.detach(), mine.grad))
    return *found, calls


@pytest.mark.parametrize("world_size", SIZES)
def test_both_ways_to_gather_are_equal(ranks, world_size):
    cases = [(rows(sizes), sizes) for sizes in SIZES[world_size]]
    for theirs, ours, calls in itertools.chain(*ranks(world_size, for_each, both_gathers, cases)):
        assert calls == [1, 0]
        assert torch.equal(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-14, atol=0)


def softmax_loss(image, text, gather):
    logits = 5 * gather(image) @ gather(text).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def contrastive_gradients(image, text):
    gradients = []
    for gather in (dist.all_gather, cut_gather):
        mine = [t.chunk(dist.world_size())[dist.rank()].clone().requires_grad_() for t in (image, text)]
        loss = softmax_loss(*mine, gather)
        gradients.append([t.grad for t in mine] if loss.requires_grad and not loss.backward() else None)
    return gradients


def cut_gather(x):
    """What open_clip's users got from torch.distributed.all_gather: the values without the graph."""
    out = [torch.empty_like(x) for _ in range(dist.world_size())]
    c10d.all_gather(out, x.detach())
    return torch.cat(out)


def test_bug_5_the_contrastive_gather_keeps_its_gradient(ranks):
    full = [F.normalize(rows((8,), seed=s)).requires_grad_() for s in (1, 2)]
    softmax_loss(*full, lambda x: x).backward()
    for rank, (ours, cut) in enumerate(ranks(2, contrastive_gradients, *[t.detach() for t in full])):
        assert cut is None
        for grad, whole in zip(ours, full, strict=True):
            torch.testing.assert_close(grad, 2 * whole.grad.chunk(2)[rank], rtol=1e-12, atol=1e-14)


def all_with_warnings():
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if _collectives.HAS_NN_ALL_GATHER:  # which warns at our own line, from torch 2.12 on
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"vqclip\.dist\._collectives$")
        x = torch.randn(2 + dist.rank(), 3, requires_grad=True)
        for op in OPS:
            LOSSES[op](x, None).backward()
        dist.reduce_(x.detach().sum(0))
        dist.barrier()
        dist.shared_seed()
        dist.gather_json({"rank": dist.rank()})
    torch.set_warn_always(False)
    return [str(w.message) for w in seen]


def test_nothing_warns(ranks):
    assert ranks(2, all_with_warnings) == [[], []]


def gather_dtypes():
    r = dist.rank()
    out = {}
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32):
        out[str(dtype)] = dist.all_gather(torch.full((r + 1, 2), r, dtype=dtype))
    out["columns"] = dist.all_gather(torch.arange(6.0).view(2, 3).T + r)  # not contiguous
    out["no columns"] = dist.all_gather(torch.zeros(r + 1, 0)).shape
    out["no rows"] = dist.all_gather(torch.zeros(0, 2)).shape
    return out


def test_gather_of_any_dtype_and_layout(ranks):
    results = ranks(2, gather_dtypes)
    for out in results:
        columns, no_columns, no_rows = (out.pop(k) for k in ("columns", "no columns", "no rows"))
        assert torch.equal(columns, torch.cat([torch.arange(6.0).view(2, 3).T + r for r in (0, 1)]))
        assert (no_columns, no_rows) == ((3, 0), (0, 2))
        for name, gathered in out.items():
            assert str(gathered.dtype) == name
            assert gathered.float().tolist() == [[0, 0], [1, 1], [1, 1]]
    assert len(out) == 6


def half_precision_backward():
    x = torch.full((1,), 1.0, dtype=torch.bfloat16, requires_grad=True)
    weight = 256.0 if dist.rank() == 0 else 0.625
    (dist.all_gather(x)[0] * weight).backward()
    return x.grad


def test_gradients_in_half_precision_are_summed_in_fp32(ranks):
    # Four ranks: 256 + 3 × 0.625 is 258 in bf16; added up in bf16 the small ones would each be lost.
    assert ranks(4, half_precision_backward)[0].item() == 258.0


def reduce_and_broadcast_in_place():
    r = dist.rank()
    results = [dist.reduce_(torch.tensor([r, 3 - r]), op) for op in ("sum", "max")]
    values = [torch.tensor(r == 0), torch.tensor([r, 3 - r]), torch.nn.Parameter(torch.tensor([-0.0, r + 0.5]))]
    results += [dist.broadcast_(value).detach() for value in values]
    for function in (dist.reduce_, dist.broadcast_):
        strided = torch.zeros(2, 2).add(r + 1)[:, 0]
        assert function(strided) is strided
        results.append(strided)
    return [each.tolist() for each in results], results[4].signbit().tolist()


def test_reduce_and_broadcast_in_place(ranks):
    for found, signs in ranks(3, reduce_and_broadcast_in_place):
        assert found == [[3, 6], [2, 3], True, [0, 3], [0, 0.5], [6, 6], [1, 1]]
        assert signs == [True, False]
    assert dist.broadcast_(torch.ones(2)).tolist() == [1, 1]


def scatter_uneven(sizes):
    x = torch.arange(sum(sizes) * 2, dtype=torch.bfloat16).view(-1, 2) * (1 + dist.rank())
    return dist.reduce_scatter(x, sizes), dist.reduce_scatter(x[:, 1], sizes)


def test_reduce_scatter_is_the_other_way_round(ranks):
    cases = [[2, 2, 2], [3, 0, 1], [0, 0, 0]]
    found = ranks(3, for_each, scatter_uneven, [(sizes,) for sizes in cases])
    for sizes, parts in zip(cases, zip(*found, strict=True), strict=True):
        mine, columns = zip(*parts, strict=True)
        assert [len(rows) for rows in mine] == sizes
        expected = 6 * torch.arange(sum(sizes) * 2, dtype=torch.bfloat16).view(-1, 2)
        assert torch.equal(torch.cat(mine), expected)
        assert torch.equal(torch.cat(columns), expected[:, 1])
        assert torch.equal(dist.reduce_scatter(expected, [len(expected)]), expected)
    with pytest.raises(ShapeError, match=r"sizes \[1, 2\] do not fit 1 ranks and 3 rows"):
        dist.reduce_scatter(torch.ones(3, 2), [1, 2])


def shift_many(sizes, started):
    """Shifts of several tensors, which begin in one order and end in another."""
    rank = dist.rank()
    made = [[torch.full((sizes[rank],), 10 * k + rank), torch.full((sizes[rank], 3), k == 1)] for k in range(started)]
    ends = [dist.start_ring_shift(tensors, sizes[rank - 1]) for tensors in made]
    return [end() for end in reversed(ends)][::-1]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (2, 0, 3, 1), (0, 0)], ids=str)
def test_ring_shifts_are_in_flight_side_by_side(ranks, sizes):
    for rank, found in enumerate(ranks(len(sizes), shift_many, sizes, 5)):
        before = (rank - 1) % len(sizes)
        for k, (numbers, flags) in enumerate(found):
            assert numbers.tolist() == [10 * k + before] * sizes[before]
            assert torch.equal(flags, torch.full((sizes[before], 3), k == 1))
    x = torch.ones(3, 2)
    assert dist.start_ring_shift([x], 3)()[0] is x


def test_tensors_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="at least one dimension"):
        dist.all_gather(torch.tensor(1.0))
    with pytest.raises(DistributedError, match=r"requires a gradient.*replicated_sum"):
        dist.reduce_(torch.ones(2, requires_grad=True) * 2)


def gather_without_gradients_on_rank_one():
    with torch.set_grad_enabled(dist.rank() == 0):
        dist.all_gather(torch.ones(2, 3, requires_grad=True))


def gather_unlike_rows():
    dist.all_gather(torch.ones(2, 3 + dist.rank()))


def gather_with_wrong_sizes():
    dist.all_gather(torch.ones(2, 3), [2, 3])


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (gather_without_gradients_on_rank_one, r"rank 1 of 2: (?s:.)*only ranks \[0\] of 2 need gradients"),
        (gather_unlike_rows, r"rank 0 has rows \(3,\) of torch.float32, ranks \[1\] have different rows"),
        (gather_with_wrong_sizes, r"sizes \[2, 3\] do not fit rank 1 of 2, which has 2 rows"),
    ],
    ids=["one rank without gradients", "unlike rows", "wrong sizes"],
)
def test_a_gather_that_would_hang_or_mix_up_is_refused(ranks, fn, message):
    with pytest.raises(RankError, match=message):
        ranks(2, fn, timeout=20.0)


def test_one_process_is_the_identity():
    x = torch.randn(3, requires_grad=True)
    for op in (dist.all_gather, dist.replicated_sum, dist.reduce_):
        y = x.detach() if op is dist.reduce_ else x
        assert op(y) is y
    assert dist.gather_sizes(x) == [3]
