"""DDP by the convention of `vqclip.dist`: mean of W times the gradient is the gradient."""

import pytest
import torch
from torch import nn

from vqclip import dist


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x), self.scale


def loss_of(features, scale):
    """A loss over the global batch, with a parameter in it, that every rank computes alike."""
    y = dist.all_gather(features)
    mean = dist.replicated_sum(features.square().sum(0)) / len(y)
    return (scale * y @ y.T).sin().mean() + scale * mean.sum()


def gradients(x, sizes):
    tower = dist.wrap_ddp(build())
    loss = loss_of(*tower(x.split(list(sizes))[dist.rank()]))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in dist.unwrap_ddp(tower).named_parameters() if p.grad is not None}


def build():
    torch.manual_seed(0)
    tower = Tower()
    tower.norm.requires_grad_(False)  # unused here; its buffers must not be broadcast
    return tower


@pytest.mark.parametrize("sizes", [(4, 2), (2, 1, 3), (1, 0, 2, 3)], ids=str)
def test_gradients_equal_one_process(ranks, sizes):
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss, expected = gradients(x, (6,))
    for value, got in ranks(len(sizes), gradients, x, sizes):
        assert value == pytest.approx(loss, rel=1e-12)
        assert got.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-11, atol=1e-13)


class OutOfOrder(nn.Module):
    """Its gradients do not arrive in the reverse order of its parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(6))

    def forward(self, x):
        for number in (3, 0, 5, 1, 4, 2):
            x = self.layers[number](x).tanh()
        return x


def gradients_of_equal_steps(count):
    tower = dist.wrap_ddp(OutOfOrder())
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(dist.rank()))
    steps = []
    for _ in range(count):
        tower.zero_grad()
        tower(x).square().sum().backward()
        steps.append(torch.cat([p.grad.flatten() for p in tower.parameters()]))
    return steps


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_first_step_sums_like_all_others(ranks, world_size):
    """DDP rearranges its buckets once, which changes the order of summing: not after a step that counts."""
    for first, *others in ranks(world_size, gradients_of_equal_steps, 3):
        assert all(torch.equal(first, other) for other in others)


def forward_on_rank_zero_alone():
    """Before and after the first step."""
    for module, x in ((build(), torch.ones(2, 3, dtype=torch.float64)), (OutOfOrder(), torch.ones(2, 7))):
        tower = dist.wrap_ddp(module).train()
        for _ in range(2):
            if dist.is_main():
                tower(x)
                with torch.no_grad():
                    tower(x)
            out = tower(x)
            (out if isinstance(module, OutOfOrder) else out[0] * out[1]).sum().backward()
    return type(tower).__name__


def test_a_forward_on_one_rank_waits_for_nobody(ranks):
    assert ranks(2, forward_on_rank_zero_alone, timeout=30.0) == ["DistributedDataParallel"] * 2


def wrap_again():
    """Return the number of hooks that are left by wrappers that were released, and of gradients."""
    locked = build().requires_grad_(False)
    assert dist.wrap_ddp(locked) is locked
    module = build()
    for _ in range(3):
        wrapped = dist.wrap_ddp(module)
        dist.release_ddp(wrapped)
    hooks = sum(len(each._backward_hooks or ()) for each in module.parameters())
    return hooks, sum(each.grad is not None for each in module.parameters())


def test_wrapping_leaves_no_hook_and_no_gradient_and_without_weights_to_train_nothing_is_wrapped(ranks):
    assert ranks(2, wrap_again) == [(0, 0), (0, 0)]
    tower = build()
    assert dist.wrap_ddp(tower) is tower
    assert dist.unwrap_ddp(tower) is tower
