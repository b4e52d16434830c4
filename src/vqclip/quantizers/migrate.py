"""Conversion of trained quantizers of vector-quantize-pytorch: equal ids for equal vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.quantizers.base import Quantizer
from vqclip.quantizers.bsq import BSQ
from vqclip.quantizers.fsq import FSQ
from vqclip.quantizers.lfq import LFQ
from vqclip.quantizers.product import Product
from vqclip.quantizers.residual import Residual
from vqclip.quantizers.simvq import SimVQ
from vqclip.quantizers.vq import VQ

_CHANNELS_FIRST = (
    *((option, True) for option in ("accept_image_fmap", "accept_3d_fmap", "channel_first", "is_channel_first")),
    ("channel_last", False),
)
"""Options of modules that take ``(B, D, ...)``, with the value at which they do."""


def from_vector_quantize_pytorch(module: nn.Module, inner: bool = False) -> Quantizer:
    """Convert a quantizer of that library, which is not imported.

    Copies the codebooks, their moving averages and all settings that determine ids; of the training settings, the
    decay, the learning method and quantize dropout. Losses and replacement of dead codes follow `VQ`. Ids are equal in
    evaluation, except for vectors within a rounding error of the border between two codes. In a ResidualFSQ this
    concerns the last stages once the product of a channel's levels over the stages exceeds 10^6.

    Args:
        module: a ``VectorQuantize``, ``SimVQ``, ``FSQ``, ``LFQ``, or the residual or grouped residual form of one
            (version 1.29 and later). An ``LFQ`` with ``spherical`` becomes a `BSQ`.
        inner: convert only the part between a module's ``project_in`` and ``project_out``, which you apply yourself:
            ``ours(module.project_in(x))``, with the channels of images moved to the end.

    Returns:
        In evaluation mode, on the module's device. Ids have one column per codebook, ``(..., C)``; those of groups are
        side by side, ``rearrange(ids, "g b n q -> b n (g q)")``. A codebook that does not learn there does not here.

    Raises:
        ConfigError: another class, or an option without a counterpart here; the message names it.
    """
    name = type(module).__name__
    if name not in _MAKERS:
        raise ConfigError(f"from_vector_quantize_pytorch: got a {name}, expected one of {', '.join(_MAKERS)}")
    parts = list(module.modules())
    if any(getattr(part, "has_projections", False) for part in parts) and not inner:
        raise ConfigError(
            f"from_vector_quantize_pytorch: this {name} projects its input, which quantizers here do not; pass "
            "inner=True, and call the result between module.project_in and module.project_out"
        )
    if any(getattr(part, option, None) is value for part in parts for option, value in _CHANNELS_FIRST) and not inner:
        raise ConfigError(
            f"from_vector_quantize_pytorch: this {name} has channels before positions, which quantizers here do not; "
            "pass inner=True, and call the result on vectors (..., D)"
        )
    quantizer = _MAKERS[name](module).eval()
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return quantizer.to(devices.pop()) if len(devices) == 1 else quantizer


def _vq(module: Any) -> Quantizer:
    book = module._codebook
    _refuse(module, affine_param=book.affine_param, vq_bridge=book.vq_bridge is not None)
    _refuse(module, kmeans_init_not_done=not bool(book.initted))
    heads, size, dim = book.embed.shape
    _refuse(module, heads_that_share_a_codebook=module.heads > 1 and heads == 1)
    frozen = module.freeze_codebook or not (book.ema_update or book.learnable_codebook)
    layer = VQ(
        dim,
        size,
        learning="gradient" if book.learnable_codebook or frozen else "ema",
        decay=book.decay,
        **({"dead_below": 0.0} if frozen else {}),
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
    if frozen:
        target.codebook.requires_grad_(False)
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
    return _residual(module, stages)


def _fsq(module: Any) -> Quantizer:
    _refuse(module, orthogonal_rotation=module.orthogonal_rotation, bound_hard_clamp=module.bound_hard_clamp)
    layer = FSQ(_integers(module._levels), "symmetric" if module.preserve_symmetry else "original")
    return _product_of(layer, module.num_codebooks)


def _residual_fsq(module: Any) -> Quantizer:
    first = module.layers[0]
    _refuse(module, bound_hard_clamp_off=not first.bound_hard_clamp, several_codebooks=first.num_codebooks > 1)
    _refuse(module, orthogonal_rotation=first.orthogonal_rotation)
    return _residual(module, [FSQ(_integers(first._levels), "uniform")] * module.num_quantizers)


def _lfq(module: Any) -> Quantizer:
    _refuse(
        module,
        codebook_scale_beside_spherical=module.spherical and module.codebook_scale != 1,
        orthogonal_rotation=getattr(module, "orthogonal_rotation", False),
    )
    bits, scale = module.codebook_dim, module.codebook_scale
    return _product_of(BSQ(bits) if module.spherical else LFQ(bits, scale=scale), module.num_codebooks)


def _residual_lfq(module: Any) -> Quantizer:
    # That library normalises the remainder again at every stage.
    _refuse(module, spherical=module.layers[0].spherical)
    return _residual(module, [_lfq(layer) for layer in module.layers])


def _simvq(module: Any) -> Quantizer:
    size, dim = module.frozen_codebook.shape
    matrix = getattr(module.code_transform, "weight", None)
    _refuse(
        module,
        a_transform_other_than_a_square_matrix=type(module.code_transform) is not nn.Linear
        or module.code_transform.bias is not None
        or matrix.shape != (dim, dim),
    )
    quantizer = SimVQ(dim, size, "rotation" if module.rotation_trick else "straight_through")
    with torch.no_grad():
        quantizer.codebook.copy_(module.frozen_codebook)
        quantizer.transform.copy_(matrix.T)
    return quantizer


def _residual_simvq(module: Any) -> Quantizer:
    return _residual(module, [_simvq(layer) for layer in module.layers])


def _grouped(module: Any) -> Quantizer:
    _refuse(module, projections_in_its_groups=any(getattr(part, "has_projections", False) for part in module.rvqs))
    groups = [_MAKERS[type(part).__name__](part) for part in module.rvqs]
    quantizer = Product(groups[0], len(groups))
    _copy(groups, quantizer.layer)
    return quantizer


def _residual(module: Any, stages: list[Quantizer]) -> Quantizer:
    least = 1
    if module.quantize_dropout:
        _refuse(module, quantize_dropout_multiple_of=module.quantize_dropout_multiple_of > 1)
        least = module.quantize_dropout_cutoff_index + 1
    quantizer = Residual(stages[0], len(stages), bool(module.quantize_dropout), least)
    for theirs, mine in zip(stages, quantizer.stages, strict=True):
        _copy([theirs], mine)
    return quantizer


def _copy(groups: list[Quantizer], target: Quantizer) -> None:
    """Copy the tensors of equal quantizers to one with as many groups, and what learns by gradient."""
    states = [each.state_dict() for each in groups]
    whole = {name: torch.cat([each[name] for each in states]) if one.ndim else one for name, one in states[0].items()}
    target.load_state_dict(whole)
    for theirs, mine in zip(groups[0].parameters(), target.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)


_MAKERS: dict[str, Callable[[Any], Quantizer]] = {
    "VectorQuantize": _vq,
    "ResidualVQ": _residual_vq,
    "GroupedResidualVQ": _grouped,
    "SimVQ": _simvq,
    "ResidualSimVQ": _residual_simvq,
    "FSQ": _fsq,
    "ResidualFSQ": _residual_fsq,
    "GroupedResidualFSQ": _grouped,
    "LFQ": _lfq,
    "ResidualLFQ": _residual_lfq,
    "GroupedResidualLFQ": _grouped,
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
