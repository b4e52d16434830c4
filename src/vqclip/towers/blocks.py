"""Blocks of a tower: in their order from input to output, recomputed in the backward pass, compiled.

They are found in the module tree alone, so that this fits any library: `blocks` of a timm ViT, the blocks of each stage
of an EfficientNet or ConvNeXt, `resblocks` of open_clip, `encoder.layer` of transformers. Modules are taken to run in
the order in which they are registered. To recompute or compile a block its forward is replaced; names of weights stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint

from vqclip.errors import ConfigError

_LISTS = (nn.Sequential, nn.ModuleList)

Recomputed = bool | Annotated[int, Field(ge=1)]
"""True: every block; N: every N-th block."""


def layers(tower: nn.Module) -> list[list[str]]:
    """Group the names of all parameters from input to output: before the blocks, one entry per block, after them.

    A parameter between two blocks, such as that of a stage's downsampling, belongs to the block after it. Embedding
    tables outside the blocks belong to the first entry. The first and the last entry may be empty.

    Args:
        tower: any module; adapters of `peft` in it belong to the blocks that contain them.
    """
    names = block_names(tower)
    depths = depth_of(tower, (name for name, _ in tower.named_parameters()), names)
    grouped: list[list[str]] = [[] for _ in range(len(names) + 2)]
    for name, depth in depths.items():
        grouped[depth].append(name)
    return grouped


def depth_of(tower: nn.Module, names: Iterable[str], blocks: list[str]) -> dict[str, int]:
    """Return the index in `layers` of each parameter, buffer or module of ``tower``, by its name.

    Args:
        tower: the module whose parts are named.
        names: names in the order of ``named_parameters``, ``named_buffers`` or ``named_modules``.
        blocks: `block_names` of the tower.
    """
    tables = tuple(f"{name}." for name, module in tower.named_modules() if isinstance(module, nn.Embedding))
    number_of = {name: number for number, name in enumerate(blocks, start=1)}
    depths, seen = {}, 0
    for name in names:
        inside = next((number for block, number in number_of.items() if f"{name}.".startswith(f"{block}.")), None)
        if inside is not None:
            depths[name] = seen = inside
        elif f"{name}.".startswith(tables) or seen == 0:
            depths[name] = 0
        else:
            depths[name] = seen + 1
    return depths


def block_names(tower: nn.Module) -> list[str]:
    """Return the names of the tower's blocks, from input to output.

    A list of blocks is an outermost `nn.Sequential` or `nn.ModuleList` of modules that consist of modules. Where one of
    its items holds most of its parameters in another such list, as a stage does, the blocks are the items of that list.
    A tower without such a list has its children as blocks.
    """
    found = [
        block
        for name, stages in _outermost_lists(tower)
        for child, stage in _weighted_children(stages)
        for block in _split(f"{name}.{child}", stage)
    ]
    if found:
        return found
    prefix, children = "", _weighted_children(tower)
    while len(children) == 1 and _weighted_children(children[0][1]):  # down to more than one child
        prefix = _join(prefix, children[0][0])
        children = _weighted_children(children[0][1])
    return [_join(prefix, name) for name, _ in children]


def _split(name: str, stage: nn.Module) -> list[str]:
    """Return the blocks of a stage, or the name of the stage itself if it is a block."""
    for inner, blocks in _outermost_lists(stage, itself=True):
        if 2 * _size(blocks) > _size(stage):
            return [_join(name, inner, child) for child, _ in _weighted_children(blocks)]
    return [name]


def _outermost_lists(module: nn.Module, itself: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield the lists of blocks in a module that are in no other list of blocks; adapted layers are not searched."""
    if itself and _is_list_of_blocks(module):
        yield "", module
        return
    for name, child in _weighted_children(module):
        for inner, found in _outermost_lists(child, itself=True):
            yield _join(name, inner), found


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Return whether a module is a chain of composite modules; those of a `ModuleList` must be of one type."""
    items = [child for _, child in _weighted_children(module)]
    if not isinstance(module, _LISTS) or not items or any(not _weighted_children(child) for child in items):
        return False
    return isinstance(module, nn.Sequential) or len({type(child) for child in items}) == 1


def _weighted_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children that have parameters; none for a layer with an adapter of peft, which counts as one layer."""
    if hasattr(module, "base_layer"):
        return []
    return [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def recompute_blocks(towers: Iterable[nn.Module], which: Recomputed) -> None:
    """Recompute the activations of the blocks of towers in the backward pass, with the same random numbers.

    A forward without gradients is as before.

    Args:
        towers: changed in place; their blocks are those of `vqclip.towers.blocks.block_names`.
        which: blocks, counted in each tower, that are recomputed.

    Raises:
        ConfigError: every tower has fewer blocks than ``which``.
    """
    if which is False:
        return
    every = 1 if which is True else which
    blocks = [[each.get_submodule(name) for name in block_names(each)] for each in towers]
    most = max(map(len, blocks), default=every)
    if every > most:
        raise ConfigError(
            f"train.activation_checkpointing: got {every}, but no tower that trains has more than {most} blocks; "
            f"expected at most {most}, or true for every block"
        )
    chosen: list[Any] = [block for each in blocks for block in each[every - 1 :: every]]
    for block in chosen:
        block.forward = partial(_recompute, block.forward)  # no closure: copies of the tower copy it


def compiled_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward, compiled; a block that is recomputed runs its compiled code again.

    Modules of one class share the code, as far as their settings are equal.
    """
    forward: Any = module.forward
    if isinstance(forward, partial) and forward.func is _recompute:
        return partial(_recompute, torch.compile(forward.args[0]))
    return torch.compile(forward)


def _recompute(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, **options)
