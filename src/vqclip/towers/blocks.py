"""Blocks of a tower that are compiled, and whose activations are recomputed in the backward pass.

The forward of a block is replaced, whatever library the block comes from; names of weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from vqclip.errors import ConfigError
from vqclip.towers.depth import block_names

Recomputed = bool | Annotated[int, Field(ge=1)] | Literal["operators"]
"""True: every block; N: every N-th block; `operators`: all but the products of matrices of every block."""

_KEPT = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operators whose outputs are kept, where torch has them: they take most of the time of a block."""


def recompute_blocks(towers: Iterable[nn.Module], which: Recomputed) -> None:
    """Recompute the activations of the blocks of towers in the backward pass, with the same random numbers.

    A forward without gradients is as before.

    Args:
        towers: changed in place; their blocks are those of `vqclip.towers.depth.block_names`.
        which: blocks, counted in each tower, or operators, that are recomputed.

    Raises:
        ConfigError: every tower has fewer blocks than ``which``.
    """
    if which is False:
        return
    every = 1 if isinstance(which, bool | str) else which
    blocks = [[each.get_submodule(name) for name in block_names(each)] for each in towers]
    most = max(map(len, blocks), default=every)
    if every > most:
        raise ConfigError(
            f"train.activation_checkpointing: got {every}, but no tower that trains has more than {most} blocks; "
            f"expected at most {most}, or true for every block"
        )
    contexts = _contexts_of_operators() if which == "operators" else {}
    chosen: list[Any] = [block for each in blocks for block in each[every - 1 :: every]]
    for block in chosen:
        if contexts:
            _compute_out_of_place(block)
        block.forward = partial(_recompute, block.forward, contexts)  # no closure: copies of the tower copy it


def compiled_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward, compiled; a block that is recomputed runs its compiled code again.

    Modules of one class share the code, as far as their settings are equal.
    """
    forward: Any = module.forward
    if isinstance(forward, partial) and forward.func is _recompute:
        inner, *others = forward.args
        return partial(_recompute, torch.compile(inner), *others)
    return torch.compile(forward)


def _contexts_of_operators() -> dict[str, Any]:
    kept = [getattr(torch.ops.aten, name).default for name in _KEPT if hasattr(torch.ops.aten, name)]
    return {"context_fn": partial(create_selective_checkpoint_contexts, kept)}


def _compute_out_of_place(block: nn.Module) -> None:
    """Have activations make new tensors, of the same bits: an output that is kept must not change."""
    for each in block.modules():
        if getattr(each, "inplace", False):
            each.inplace = False  # type: ignore[assignment]


def _recompute(forward: Callable[..., Any], contexts: dict[str, Any], *args: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    if contexts and not torch.compiler.is_compiling():
        forward = partial(_named_errors, forward)
    return checkpoint(forward, *args, use_reentrant=False, **contexts, **options)


def _named_errors(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return forward(*args, **options)
    except RuntimeError as error:
        if "selective activation checkpoint" not in str(error):
            raise
        raise ConfigError(
            "train.activation_checkpointing: got operators, but a block changes the output of a matrix product, a "
            f"convolution or attention in place, so that it cannot be kept ({error}); expected true, or a number"
        ) from error
