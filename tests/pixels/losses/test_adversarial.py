"""The adversarial term: who gets which gradient, from which step on, and with which weight."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.pixels.losses.test_contract import L1, PATCH, build, images, total_of
from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.quantizers import Stats, sync


def test_values_and_gradients_by_hand():
    """Of two passes with weights and images detached in turn."""
    losses, (made, real) = build([L1, PATCH]), images(4)
    judge = losses.adversaries["adversarial"].judge
    terms, weights = losses.terms(losses(made, real, 0), 0)
    logits = [judge([each]) for each in (made.detach(), real.double() / 255)]
    hinge = (F.relu(1 + logits[0]) + F.relu(1 - logits[1])).mean() / 2
    torch.testing.assert_close(terms["adversarial/discriminator"], hinge)
    trained = list(losses.adversaries.parameters())
    theirs = torch.autograd.grad(terms["adversarial/discriminator"], trained, retain_graph=True)
    for one, other in zip(theirs, torch.autograd.grad(hinge, trained), strict=True):
        torch.testing.assert_close(one, other)

    generator = -judge([made]).mean()
    torch.testing.assert_close(terms["adversarial"], generator)
    (at_pixels,) = torch.autograd.grad(generator, made)
    torch.testing.assert_close(torch.autograd.grad(terms["adversarial"], made, retain_graph=True)[0], at_pixels)

    (of_l1,) = torch.autograd.grad(terms["l1"], made, retain_graph=True)
    torch.testing.assert_close(weights["adversarial"], 0.5 * of_l1.norm() / at_pixels.norm())
    assert weights["adversarial/discriminator"] == 1


def test_neither_network_gets_the_gradient_of_the_other():
    losses, (made, real) = build([L1, PATCH]), images(4)
    sums = losses(made, real, 0)
    trained = list(losses.parameters())
    of_generator = torch.autograd.grad(sums["adversarial"], trained, retain_graph=True, allow_unused=True)
    assert of_generator == (None,) * len(trained)
    assert torch.autograd.grad(sums["adversarial/discriminator"], made, allow_unused=True) == (None,)
    assert not sums["squares"].requires_grad


def test_late_start():
    losses, (made, real) = build([L1, PATCH | {"start_step": 5}]), images(2)
    assert losses.move_to_step(4)
    assert not losses.move_to_step(4)
    assert not any(weight.requires_grad for weight in losses.parameters())
    assert losses(made, real, 4).keys() == {"count", "l1"}
    assert losses.move_to_step(5)
    total_of(losses, losses(made, real, 5), 5).backward()
    assert all(weight.grad is not None for weight in losses.parameters())
    assert losses.move_to_step(0)
    assert all(weight.grad is None for weight in losses.parameters())


def test_weights_are_drawn_by_key():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    one, other = build([L1, PATCH]), build([L1, PATCH])
    assert torch.equal(torch.rand(2), expected)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_adaptive_weight_is_bounded():
    losses, (made, real) = build([L1, PATCH]), images(2)
    for weight in losses.parameters():
        weight.data.zero_()  # so that the generator's term has no gradient
    _, weights = losses.terms(losses(made, real, 0), 0)
    assert weights["adversarial"] == 0.5 * 1e4


def test_images_that_are_too_small_for_the_layers():
    with pytest.raises(ConfigError, match=r"losses\[1\]: discriminator.layers: got 3, which halve images of 16"):
        build([L1, PATCH | {"discriminator": {"kind": "patch"}}])


class Student(nn.Module):
    """A decoder of one layer, and the losses: what a task trains."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Conv2d(3, 3, 1).double()
        for weight in self.decoder.parameters():
            nn.init.constant_(weight, 0.3)
        self.losses = build([L1, PATCH])

    def forward(self, inputs, real):
        return self.losses(self.decoder(inputs), real, 0)


def step_of_parts(bounds):
    """Adaptive weight and gradients of a step in which each rank has its part of the images."""
    student, (inputs, real) = Student(), images(7)
    rows = slice(*bounds[dist.rank() : dist.rank() + 2])
    parallel = dist.wrap_ddp(student)
    (sums,) = sync([Stats(parallel(inputs.detach()[rows], real[rows]))])
    total_of(student.losses, sums).backward()
    weights = student.losses.terms(sums, 0)[1]
    return [weights["adversarial"], *(weight.grad for weight in student.parameters())]


@pytest.mark.parametrize("bounds", [(0, 3, 7), (0, 2, 2, 7)])
def test_a_step_is_equal_on_any_number_of_ranks(ranks, bounds):
    expected = step_of_parts((0, 7))
    for found in ranks(len(bounds) - 1, step_of_parts, bounds):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
