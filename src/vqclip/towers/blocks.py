"""Blocks of a tower: in their order from input to output, recomputed in the backward pass, compiled.

They are found in the module tree alone, so that this fits any library: `blocks` of a timm ViT, the blocks of each stage
of an EfficientNet or ConvNeXt, `resblocks` of open_clip, `encoder.layer` of transformers. Modules are taken to run in
the order in which they are registered. To recompute or compile a block its forward is replaced; names of weights stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from vqclip.errors import ConfigError

_LISTS = (nn.Sequential, nn.ModuleList)

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
    contexts: dict[str, Any] = {}
    if which == "operators":
        kept = [getattr(torch.ops.aten, name).default for name in _KEPT if hasattr(torch.ops.aten, name)]
        contexts["context_fn"] = partial(_make_contexts, kept)
    chosen: list[Any] = [block for each in blocks for block in each[every - 1 :: every]]
    for block in chosen:
        for module in block.modules() if contexts else ():
            if getattr(module, "inplace", False):  # activations make new tensors, of the same bits: kept ones stay
                module.inplace = False
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


def _make_contexts(kept: list[Any]) -> tuple[Any, Any]:
    forward, recomputation = create_selective_checkpoint_contexts(kept)
    if torch.compiler.is_compiling():  # compiled code changes nothing in place
        return forward, recomputation
    return _both(forward, _RefusedChanges(kept)), recomputation


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


class _RefusedChanges(TorchDispatchMode):
    """Refuse to change outputs that are kept, also through views.

    torch compares versions of tensors; that of ``torch.matmul``'s result is not the one of the product it is made of,
    so that gradients were wrong without an error (torch 2.8 to 2.15).
    """

    def __init__(self, kept: list[Any]):
        super().__init__()
        self._kept = frozenset(kept)
        self._storages: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            for value, argument in zip(args, function._schema.arguments, strict=False):
                is_changed = argument.alias_info is not None and argument.alias_info.is_write
                if is_changed and isinstance(value, Tensor) and self._storage(value) in self._storages:
                    raise ConfigError(
                        "train.activation_checkpointing: got operators, but a block changes the output of a matrix "
                        f"product, a convolution or attention in place ({function}), so that it cannot be kept; "
                        "expected true, or a number"
                    )
        outputs = function(*args, **kwargs)
        if function in self._kept:
            self._storages.update(self._storage(each) for each in tree_leaves(outputs) if isinstance(each, Tensor))
        return outputs

    @staticmethod
    def _storage(value: Tensor) -> StorageWeakRef:
        return StorageWeakRef(value.untyped_storage())


def _recompute(forward: Callable[..., Any], contexts: dict[str, Any], *args: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, **contexts, **options)
