"""What every term of the loss on pixels keeps. A new one is a line in TERMS."""

import itertools

import pytest
import torch
from pydantic import TypeAdapter
from torch.func import functional_call

from vqclip.errors import ConfigError, ShapeError
from vqclip.pixels.losses import PixelLosses, PixelLossesConfig, require_starts

SIZE = 16
L1 = {"kind": "l1"}
TOKENIZER = {"kind": "tokenizer", "folder": "tokenizer"}
TIMM = {
    "kind": "timm",
    "name": "vit_tiny_patch16_224",
    "image_size": 24,
    "args": {"patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2},
    "checkpoint": "vit.safetensors",
}
PATCH = {"kind": "adversarial", "start_step": 0, "discriminator": {"kind": "patch", "channels": 16, "layers": 1}}
TERMS = {
    "l1": [L1],
    "l2": [{"kind": "l2"}],
    "both": [{"kind": "l1", "weight": 0.5}, {"kind": "l2"}],
    "patches": [L1, PATCH],
    "patches, fixed weight": [L1, PATCH | {"adaptive": False}],
    "perceptual, tokenizer": [{"kind": "perceptual", "network": TOKENIZER}],
    "perceptual, timm": [{"kind": "perceptual", "network": TIMM, "layers": [0, -1]}],
    "heads": [L1, PATCH | {"discriminator": {"kind": "features", "network": TOKENIZER, "width": 8}}],
}


def build(terms, dtype=torch.float64) -> PixelLosses:
    losses = PixelLosses(TypeAdapter(PixelLossesConfig).validate_python(terms), SIZE, seed=0).to(dtype)
    for weight in losses.parameters():
        weight.data *= 3  # so that some patches are outside of the hinge's margins
    return losses


@pytest.fixture(params=TERMS)
def losses(request) -> PixelLosses:
    return build(TERMS[request.param])


def images(count, dtype=torch.float64):
    """Made images, some numbers outside of 0..1, and real ones."""
    generator = torch.Generator().manual_seed(0)
    made = torch.rand(count, 3, SIZE, SIZE, generator=generator, dtype=torch.float64).to(dtype) * 1.2 - 0.1
    return made.requires_grad_(), torch.randint(256, made.shape, generator=generator, dtype=torch.uint8)


def total_of(losses, sums, step=0):
    terms, weights = losses.terms(sums, step)
    assert terms.keys() == weights.keys()
    return sum(weights[name] * term for name, term in terms.items())


def gradients(losses, made, real, bounds, step=0):
    """Total and gradients of a batch in parts, as in microbatches or on ranks."""
    made = made.detach().requires_grad_()
    parts = [losses(made[a:b], real[a:b], step) for a, b in itertools.pairwise(bounds)]
    sums = {name: sum(part[name] for part in parts) for name in parts[0]}
    total = total_of(losses, sums, step)
    trained = [weight for weight in losses.parameters() if weight.requires_grad]
    return sums, total, torch.autograd.grad(total, [made, *trained])


def test_sums_and_gradients_add_up(losses):
    made, real = images(7)
    whole = gradients(losses, made, real, [0, 7])
    parts = gradients(losses, made, real, [0, 2, 2, 7])  # an empty one, too
    assert int(whole[0]["count"]) == int(parts[0]["count"]) == 7
    for name, total in whole[0].items():
        torch.testing.assert_close(total, parts[0][name], rtol=1e-9, atol=1e-12)
    for one, other in zip(whole[2], parts[2], strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_gradients_are_right(losses):
    """Of each sum at the pixels, and of the discriminator's at its weights."""
    made, real = images(2)
    weights = {name: weight.detach().requires_grad_() for name, weight in losses.named_parameters()}

    def sums(made, *values):
        return functional_call(losses, dict(zip(weights, values, strict=True)), (made, real, 0))

    for name in [name for name, total in sums(made, *weights.values()).items() if total.requires_grad]:
        of_weights = name.endswith("discriminator")
        point = (made.detach() if of_weights else made, *(w if of_weights else w.detach() for w in weights.values()))
        assert torch.autograd.gradcheck(lambda *x, name=name: sums(*x)[name], point, fast_mode=True), name


def test_sums_are_equal_under_autocast_and_without_gradient(losses):
    losses, (made, real) = losses.float(), images(3, torch.float32)
    plain = losses(made, real, 0)
    for mode in (torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
        with mode:
            found = losses(made, real, 0)
        assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert not any(each.requires_grad for each in found.values())
    half = losses(made.bfloat16(), real, 0)
    assert all(total.dtype == torch.float64 for name, total in half.items() if name != "count")
    total_of(losses, half).backward()


def test_values_by_hand():
    made, real = images(5)
    apart = made - real.double() / 255
    sums = build([L1, {"kind": "l2"}, L1])(made, real, 0)
    assert list(sums) == ["count", "l1", "l2", "l1_2"]
    torch.testing.assert_close(sums["l1"] / 5, apart.abs().mean())
    torch.testing.assert_close(sums["l2"] / 5, apart.square().mean())


def test_terms_begin_at_their_step():
    losses = build([{"kind": "l1"}, {"kind": "l2", "start_step": 3}])
    assert [sorted(losses(*images(2), step)) for step in (2, 3)] == [["count", "l1"], ["count", "l1", "l2"]]
    with pytest.raises(ConfigError, match="losses: got no term that compares images"):
        build([{"kind": "l1", "start_step": 1}])
    configs = losses.configs.values()
    require_starts([*configs], 4)
    with pytest.raises(ValueError, match=r"losses\[1\].start_step: got 3; expected fewer than the 3 steps"):
        require_starts([*configs], 3)


def test_images_must_pair_up():
    made, real = images(3)
    for wrong in (real[:2], real.float() / 255, real[0]):
        with pytest.raises(ShapeError, match="expected float and uint8"):
            build(TERMS["l1"])(made, wrong, 0)
