"""For other programs: quantizers of vector-quantize-pytorch become ours, with equal ids, and codebooks matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError, ShapeError
from vqclip.quantizers.base import Quantizer
from vqclip.quantizers.binary import BSQ, LFQ
from vqclip.quantizers.fsq import FSQ
from vqclip.quantizers.nearest import GradientPath, SimVQ
from vqclip.quantizers.nested import Product, Residual
from vqclip.quantizers.vectors import MAX_COUNTED_CODES
from vqclip.quantizers.vq import VQ, Learning

RESIDUAL_NOISE_VARIANCE = 5e-3
"""Variance of the noise of a ``ResidualVQ`` with ``diveq`` in vector-quantize-pytorch."""


@torch.no_grad()
def codebook_matrix(quantizer: Quantizer, codebook: int) -> Tensor:
    """Return the contribution ``(K, D)`` of each code of one codebook, 0 to C - 1, to a quantized vector.

    Channels of other codebooks (of a `Product`) are 0, and codes of a stage (of a `Residual`) are scaled, so that
    ``quantizer.decode(ids)`` is the sum over c of ``codebook_matrix(quantizer, c)[ids[..., c]]``.

    Raises:
        ShapeError: no such codebook, or it has more than `MAX_COUNTED_CODES` (2^20) codes, as implicit ones can.
    """
    name, sizes = type(quantizer).__name__, quantizer.codebook_sizes
    if not 0 <= codebook < len(sizes):
        has = f"0 to {len(sizes) - 1}" if sizes else "none: it has no codebook"
        raise ShapeError(f"{name}: got codebook {codebook}, expected {has}")
    if sizes[codebook] > MAX_COUNTED_CODES:
        raise ShapeError(
            f"{name}: codebook {codebook} has {sizes[codebook]} codes, as a matrix {sizes[codebook]} × {quantizer.dim} "
            f"numbers; expected at most {MAX_COUNTED_CODES} codes: decode only the ids you need, or train a Product of "
            "smaller codebooks"
        )
    device = next((tensor.device for tensor in (*quantizer.parameters(), *quantizer.buffers())), torch.device("cpu"))
    ids = torch.full((sizes[codebook], len(sizes)), -1, device=device)
    ids[:, codebook] = torch.arange(sizes[codebook], device=device)
    return quantizer.decode(ids)


def from_vector_quantize_pytorch(module: nn.Module, inner: bool = False) -> Quantizer:
    """Convert a quantizer of that library, which is not imported.

    Copies the codebooks, their moving averages and all settings that determine ids; of the training settings, the
    decay, the learning method with the variance of DiVeQ's noise, and quantize dropout. Losses and replacement of dead
    codes follow `VQ`. Ids are equal in evaluation, except for vectors within a rounding error of the border between two
    codes.

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
    options = ("accept_image_fmap", "accept_3d_fmap", "channel_first", "is_channel_first")
    last = not any(getattr(each, option, False) for each in parts for option in options)
    last = last and all(getattr(each, "channel_last", True) for each in parts)
    if not inner and (not last or any(getattr(each, "has_projections", False) for each in parts)):
        what = "projects its input" if last else "has channels before positions"
        raise ConfigError(
            f"from_vector_quantize_pytorch: this {name} {what}, which quantizers here do not; pass inner=True, and "
            "call the result on vectors (..., D), between module.project_in and module.project_out"
        )
    quantizer = _MAKERS[name](module).eval()
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return quantizer.to(devices.pop()) if len(devices) == 1 else quantizer


def _vq(module: Any, noise_variance: float | None = None) -> Quantizer:
    """Convert a ``VectorQuantize``; with ``noise_variance``, a stage of a ``ResidualVQ`` that learns by DiVeQ."""
    book = module._codebook
    heads, size, dim = book.embed.shape
    _refuse(
        module,
        affine_param=book.affine_param,
        vq_bridge=book.vq_bridge is not None,
        kmeans_init_not_done=not bool(book.initted),
        heads_that_share_a_codebook=module.heads > 1 and heads == 1,
    )
    frozen = module.freeze_codebook or not (book.ema_update or book.learnable_codebook)
    if getattr(module, "directional_reparam", False):
        noise_variance = module.directional_reparam_variance
    learning: Learning = "ema"
    if book.learnable_codebook or frozen:
        learning = "gradient" if noise_variance is None else "diveq"
    path: GradientPath = "rotation" if module.rotation_trick else "straight_through"
    layer = VQ(
        dim,
        size,
        learning=learning,
        decay=book.decay,
        dead_below=0.0 if frozen else 0.03,
        cosine=bool(module.use_cosine_sim),
        kmeans=False,
        gradient=None if learning == "diveq" else path,
        noise_variance=noise_variance if learning == "diveq" else None,
    )
    quantizer: Quantizer = Product(layer, heads) if heads > 1 else layer
    target = quantizer.layer if isinstance(quantizer, Product) else quantizer
    assert isinstance(target, VQ)
    with torch.no_grad():
        target.codebook.copy_(book.embed)
        target.sizes.copy_(book.cluster_size)
        if target.learning == "ema":
            target.totals.copy_(book.embed * book.cluster_size[..., None])
    target.codebook.requires_grad_(target.learning != "ema" and not frozen)
    return quantizer


def _fsq(module: Any) -> Quantizer:
    _refuse(module, orthogonal_rotation=module.orthogonal_rotation, bound_hard_clamp=module.bound_hard_clamp)
    layer = FSQ(tuple(module._levels.tolist()), "symmetric" if module.preserve_symmetry else "original")
    return Product(layer, module.num_codebooks) if module.num_codebooks > 1 else layer


def _lfq(module: Any) -> Quantizer:
    _refuse(
        module,
        spherical_with_a_codebook_scale=module.spherical and module.codebook_scale != 1,
        orthogonal_rotation=getattr(module, "orthogonal_rotation", False),
    )
    bits, scale = module.codebook_dim, module.codebook_scale
    layer = BSQ(bits) if module.spherical else LFQ(bits, scale=scale)
    return Product(layer, module.num_codebooks) if module.num_codebooks > 1 else layer


def _simvq(module: Any) -> Quantizer:
    (size, dim), layer = module.frozen_codebook.shape, module.code_transform
    square = type(layer) is nn.Linear and layer.bias is None and layer.weight.shape == (dim, dim)
    _refuse(module, a_transform_other_than_a_square_matrix=not square)
    quantizer = SimVQ(dim, size, "rotation" if module.rotation_trick else "straight_through")
    with torch.no_grad():
        quantizer.codebook.copy_(module.frozen_codebook)
        quantizer.transform.copy_(layer.weight.T)
    return quantizer


def _residual(module: Any) -> Quantizer:
    first, dropout = module.layers[0], bool(module.quantize_dropout)
    if type(first).__name__ == "FSQ":
        _refuse(module, bound_hard_clamp_off=not first.bound_hard_clamp, several_codebooks=first.num_codebooks > 1)
        _refuse(module, orthogonal_rotation=first.orthogonal_rotation)
        stages: list[Quantizer] = [FSQ(tuple(first._levels.tolist()), "uniform")] * module.num_quantizers
    elif getattr(module, "diveq", False):
        stages = [_vq(layer, RESIDUAL_NOISE_VARIANCE) for layer in module.layers]
    else:
        stages = [_MAKERS[type(layer).__name__](layer) for layer in module.layers]
    _refuse(
        module,
        implicit_neural_codebook=getattr(module, "implicit_neural_codebook", False),
        codebook_sizes_that_differ=not getattr(module, "uniform_codebook_size", True),
        several_codebooks=isinstance(stages[0], Product),
        # That library normalises the remainder again at every stage.
        use_cosine_sim=isinstance(stages[0], VQ) and stages[0].cosine and len(stages) > 1,
        beam_search_with_another_score=(getattr(module, "eval_beam_size", 1) or 1) > 1,
        quantize_dropout_multiple_of=dropout and module.quantize_dropout_multiple_of > 1,
    )
    least = module.quantize_dropout_cutoff_index + 1 if dropout else 1
    quantizer = Residual(stages[0], len(stages), dropout, least, getattr(module, "shared_codebook", False))
    for theirs, mine in zip(stages, quantizer.stages, strict=True):
        _copy([theirs], mine)
    return quantizer


def _product(module: Any) -> Quantizer:
    _refuse(module, projections_in_its_groups=any(part.has_projections for part in module.rvqs))
    groups = [_MAKERS[type(part).__name__](part) for part in module.rvqs]
    quantizer = Product(groups[0], len(groups))
    _copy(groups, quantizer.layer)
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
    "ResidualVQ": _residual,
    "GroupedResidualVQ": _product,
    "SimVQ": _simvq,
    "ResidualSimVQ": _residual,
    "FSQ": _fsq,
    "ResidualFSQ": _residual,
    "GroupedResidualFSQ": _product,
    "LFQ": _lfq,
    "ResidualLFQ": _residual,
    "GroupedResidualLFQ": _product,
}


def _refuse(module: nn.Module, **options: Any) -> None:
    for option, present in options.items():
        if present:
            raise ConfigError(
                f"from_vector_quantize_pytorch: this {type(module).__name__} has {option.replace('_', ' ')}, for "
                "which the quantizers here have no counterpart with equal ids"
            )
