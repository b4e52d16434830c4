"""Conversion of trained quantizers of vector-quantize-pytorch: equal ids for equal vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.quantizers.base import Quantizer
from vqclip.quantizers.fsq import FSQ
from vqclip.quantizers.lfq import LFQ
from vqclip.quantizers.product import Product
from vqclip.quantizers.residual import Residual
from vqclip.quantizers.vq import VQ


def from_vector_quantize_pytorch(module: nn.Module, inner: bool = False) -> Quantizer:
    """Convert a quantizer of that library, which is not imported.

    Copies the codebooks, their moving averages and all settings that determine ids; of the training settings, the
    decay, the learning method and quantize dropout. Losses and replacement of dead codes follow `VQ`. Ids are equal in
    evaluation, except for vectors within a rounding error of the border between two codes. In a ResidualFSQ this
    concerns the last stages once the product of a channel's levels over the stages exceeds 10^6.

    Args:
        module: a ``VectorQuantize``, ``ResidualVQ``, ``FSQ``, ``ResidualFSQ`` or ``LFQ`` (version 1.29 and later).
        inner: convert only the part between a module's ``project_in`` and ``project_out``, which you apply yourself:
            ``ours(module.project_in(x))``.

    Returns:
        In evaluation mode, on the module's device. Ids have one column per codebook, ``(..., C)``.

    Raises:
        ConfigError: another class, or an option without a counterpart here; the message names it.
    """
    name = type(module).__name__
    if name not in _MAKERS:
        raise ConfigError(f"from_vector_quantize_pytorch: got a {name}, expected one of {', '.join(_MAKERS)}")
    if getattr(module, "has_projections", False) and not inner:
        raise ConfigError(
            f"from_vector_quantize_pytorch: this {name} projects its input, which quantizers here do not; pass "
            "inner=True, and call the result between module.project_in and module.project_out"
        )
    quantizer = _MAKERS[name](module).eval()
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return quantizer.to(devices.pop()) if len(devices) == 1 else quantizer


def _vq(module: Any) -> Quantizer:
    book = module._codebook
    _refuse(module, affine_param=book.affine_param, vq_bridge=book.vq_bridge is not None)
    _refuse(
        module,
        channels_before_positions=not module.channel_last or module.accept_image_fmap or module.accept_3d_fmap,
        freeze_codebook=module.freeze_codebook,
        a_codebook_that_does_not_learn=not (book.ema_update or book.learnable_codebook),
    )
    _refuse(module, kmeans_init_not_done=not bool(book.initted))
    heads, size, dim = book.embed.shape
    _refuse(module, heads_that_share_a_codebook=module.heads > 1 and heads == 1)
    layer = VQ(
        dim,
        size,
        learning="gradient" if book.learnable_codebook else "ema",
        decay=book.decay,
        cosine=bool(module.use_cosine_sim),
        kmeans=False,
        gradient="rotation" if module.rotation_trick else "straight_through",
    )
    quantizer: Quantizer = Product(layer, heads) if heads > 1 else layer
    target = quantizer.layer if isinstance(quantizer, Product) else quantizer
    assert isinstance(target, VQ)
    with torch.no_grad():
        target.codebook.copy_(book.embed)
        target.sizes.copy_(book.cluster_size)
        if target.learning == "ema":
            target.totals.copy_(book.embed * book.cluster_size[..., None])
    return quantizer


def _residual_vq(module: Any) -> Quantizer:
    stages = [_vq(layer) for layer in module.layers]
    first = stages[0]
    _refuse(
        module,
        implicit_neural_codebook=module.implicit_neural_codebook,
        codebook_sizes_that_differ=not module.uniform_codebook_size,
        several_heads=not isinstance(first, VQ),
        # That library normalises the remainder again at every stage.
        use_cosine_sim=isinstance(first, VQ) and first.cosine and len(stages) > 1,
        beam_search=(module.eval_beam_size or 1) > 1,
    )
    quantizer = Residual(first, len(stages), bool(module.quantize_dropout), _least(module))
    for mine, theirs in zip(quantizer.stages, stages, strict=True):
        mine.load_state_dict(theirs.state_dict())
    return quantizer


def _fsq(module: Any) -> Quantizer:
    _refuse(module, orthogonal_rotation=module.orthogonal_rotation, bound_hard_clamp=module.bound_hard_clamp)
    _refuse(module, channels_before_positions=module.channel_first)
    layer = FSQ(_integers(module._levels), "symmetric" if module.preserve_symmetry else "original")
    return _product_of(layer, module.num_codebooks)


def _residual_fsq(module: Any) -> Quantizer:
    first = module.layers[0]
    _refuse(module, bound_hard_clamp_off=not first.bound_hard_clamp, several_codebooks=first.num_codebooks > 1)
    _refuse(module, orthogonal_rotation=first.orthogonal_rotation, channels_before_positions=module.is_channel_first)
    layer = FSQ(_integers(first._levels), "uniform")
    return Residual(layer, module.num_quantizers, bool(module.quantize_dropout), _least(module))


def _least(module: Any) -> int:
    """Return the number of stages that quantize dropout never drops."""
    if not module.quantize_dropout:
        return 1
    _refuse(module, quantize_dropout_multiple_of=module.quantize_dropout_multiple_of > 1)
    return module.quantize_dropout_cutoff_index + 1


def _lfq(module: Any) -> Quantizer:
    _refuse(
        module,
        spherical=module.spherical,
        channels_before_positions=module.channel_first,
        orthogonal_rotation=getattr(module, "orthogonal_rotation", False),
    )
    return _product_of(LFQ(module.codebook_dim, scale=module.codebook_scale), module.num_codebooks)


_MAKERS: dict[str, Callable[[Any], Quantizer]] = {
    "VectorQuantize": _vq,
    "ResidualVQ": _residual_vq,
    "FSQ": _fsq,
    "ResidualFSQ": _residual_fsq,
    "LFQ": _lfq,
}


def _product_of(layer: Quantizer, codebooks: int) -> Quantizer:
    return Product(layer, codebooks) if codebooks > 1 else layer


def _integers(levels: Tensor) -> tuple[int, ...]:
    return tuple(int(level) for level in levels)


def _refuse(module: nn.Module, **options: Any) -> None:
    for option, present in options.items():
        if present:
            raise ConfigError(
                f"from_vector_quantize_pytorch: this {type(module).__name__} has {option.replace('_', ' ')}, for "
                "which the quantizers here have no counterpart with equal ids"
            )
