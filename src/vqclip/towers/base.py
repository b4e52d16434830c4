"""Base of image and text towers: which parts train, and from which step on; features of frozen towers.

Batch normalisation never trains. Its batch statistics would tie a sample to the others of its rank (ADR 6), so in every
tower that is not trained from scratch its statistics and its affine map stay as they were loaded, as in torchvision's
``FrozenBatchNorm2d``; convolutions beside it train. ``train: all``, which would train it, is refused.

Adapters are low-rank (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685), made by `peft`. It could adapt
`nn.MultiheadAttention` too, but adds the change to the frozen weight and subtracts it again in every forward, which
rounds: the frozen weights would drift. Such layers are left out.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Self

from vqclip.config import Config
from vqclip.errors import ConfigError, import_extra
from vqclip.io.tensors import first_names
from vqclip.nn.precision import gpu_memory
from vqclip.towers.blocks import block_names, depth_of

TowerT = TypeVar("TowerT", bound="Tower")

_DROPOUT = ".lora_dropout"


class Tower(nn.Module, ABC):
    """Network that maps pixels or token numbers to features ``(B, N, D)``, whole or in part frozen.

    Frozen parameters require no gradient. Modules of frozen parts stay in evaluation mode when the model trains, so
    that dropout, stochastic depth and batch normalisation are fixed maps in them; see `set_training`.

    Attributes:
        still: names of the modules that always stay in evaluation mode.
        constants: names in the state dict that never change in a run; a run stores them once.
        first_step: step from which on the tower trains; before it the whole tower is frozen.
        adapter_scale: factor on the adapters of `peft`; None without adapters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.still: frozenset[str] = frozenset()
        self.constants: frozenset[str] = frozenset()
        self.first_step = 0
        self.adapter_scale: float | None = None
        self._waiting: frozenset[str] = frozenset()
        """Names of the parameters that train from `first_step` on, while they wait for it."""

    @abstractmethod
    def example(self) -> Tensor:
        """Return an input of `forward` with one sample, on the tower's device."""

    def pad_inputs(self, inputs: Tensor) -> Tensor:
        """Return inputs of `forward` in the full shape; captions may lack their last columns."""
        return inputs

    @property
    def is_frozen(self) -> bool:
        """True if no parameter requires a gradient."""
        return not any(parameter.requires_grad for parameter in self.parameters())

    def train(self: TowerT, mode: bool = True) -> TowerT:
        """Set training mode, but for frozen parts; the tower's own ``training`` is always ``mode``."""
        super().train(mode)
        for name, module in self.named_modules():
            if name and (self._waiting or name in self.still):
                module.training = False
        return self

    @contextmanager
    def unfrozen(self) -> Iterator[None]:
        """Put the tower into the state from `first_step` on, for the time of the block."""
        waited = bool(self._waiting)
        self.move_to_step(self.first_step)
        try:
            yield
        finally:
            self.move_to_step(self.first_step - waited)

    def move_to_step(self, step: int) -> bool:
        """Freeze or unfreeze the tower as in step number ``step`` (from 0); return whether this changed anything."""
        waits = step < self.first_step
        if waits == bool(self._waiting):
            return False
        changing = self._waiting or {name for name, each in self.named_parameters() if each.requires_grad}
        for name, parameter in self.named_parameters():
            if name in changing:
                parameter.requires_grad_(not waits)
                parameter.grad = None
        self._waiting = frozenset(changing) if waits else frozenset()
        self.train(self.training)
        return True


class AdapterConfig(Config):
    """Low-rank adapters of linear layers (LoRA, Hu et al. 2021), made by `peft`."""

    rank: int = Field(ge=1, le=4096)
    """Rank of the change of each adapted matrix."""
    alpha: float | None = Field(None, gt=0, le=1e6)
    """The change is multiplied by alpha / rank; null: twice the rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before each adapter."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Regular expressions for names of linear layers, each for a part of the name, such as `mlp`; null: every linear
    layer in the blocks. Layers inside `nn.MultiheadAttention`, as in open_clip's blocks, cannot be adapted."""

    @property
    def scale(self) -> float:
        """Factor on the product of the two matrices."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


class LastBlocks(Config):
    """Training of the last blocks and everything after them; the tower before them is frozen."""

    last: int = Field(ge=1)
    """Number of blocks that train."""


class FromStep(Config):
    """Training of the whole tower but batch normalisation, from a step on."""

    from_step: int = Field(ge=0)
    """First step in which the tower trains, counted from 0; before it the whole tower is frozen."""


class Adapters(Config):
    """Training of low-rank adapters; the tower itself is frozen, and the export contains the merged weights."""

    lora: AdapterConfig
    """Size and place of the adapters."""


TowerTraining = Annotated[Literal["all", "none"] | LastBlocks | FromStep | Adapters, Field(union_mode="smart")]


class TowerConfig(Config):
    """Common keys of all towers."""

    random_weights: ClassVar[dict[str, Any]] = {}
    """Settings to change to build the same network without pretrained weights."""

    train: TowerTraining = "all"
    """Parts that train: `all`; `none`; `{last: 2}` for the last two blocks and what follows them; `{from_step: 1000}`
    for all of it from a step on; `{lora: {rank: 8}}` for adapters. Frozen parts run without gradient in evaluation
    mode, and a run stores them once. Batch normalisation stays as loaded; with `all` it is refused."""

    @property
    def is_pretrained(self) -> bool:
        """Return whether the tower starts from weights that were trained before."""
        return any(getattr(self, name) != value for name, value in self.random_weights.items())

    def architecture(self) -> Self:
        """Return a copy for the network alone: random weights, so that building it fetches none, and nothing frozen."""
        return self.model_copy(update=self.random_weights | {"train": FromStep(from_step=0)})

    def resolve(self) -> Self:
        """Return a copy with the settings that a tower reads from its source of weights, to be exported with it."""
        return self

    def with_stored(self, files: Mapping[str, bytes], shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """Return a copy for a tokenizer folder, from its further files and the shapes of the tower's weights."""
        return self


@contextmanager
def rename_tower_errors(section: str) -> Iterator[None]:
    """Replace ``tower`` at the beginning of a tower's errors by ``section``, its key path in the configuration."""
    try:
        yield
    except ConfigError as error:
        if not str(error).startswith(("tower:", "tower.")):
            raise
        raise ConfigError(section + str(error).removeprefix("tower")) from error


def set_training(tower: TowerT, train: TowerTraining) -> TowerT:
    """Freeze the parts of a tower that do not train, and return the tower.

    Args:
        tower: new, with the weights that it starts from.
        train: the parts that train. With ``from_step`` the tower is frozen by `Tower.move_to_step`.

    Raises:
        ConfigError: more blocks than the tower has, trainable batch normalisation, or adapters that cannot be made.
    """
    norms = {name: module for name, module in tower.named_modules() if isinstance(module, _BatchNorm)}
    if train == "all":
        if norms:  # a sample's features would depend on the other samples of its rank
            raise ConfigError(
                f"tower.train: got 'all' for a model with {len(norms)} batch-normalisation layers (first: "
                f"{next(iter(norms)).removeprefix('backbone.')}), whose statistics differ between one process and "
                "many; with pretrained weights freeze them: train: none, {last: 2}, {from_step: 0} (all but batch "
                "normalisation) or {lora: {rank: 8}}. To train from scratch choose a ViT or ConvNeXt, or for timm "
                "ResNets set group_norm: 8"
            )
        return tower
    if isinstance(train, Adapters):
        add_adapters(tower, train.lora)
    elif isinstance(train, LastBlocks):
        _freeze_before(tower, train.last)
    elif train == "none":
        tower.requires_grad_(False)
        tower.still = frozenset(name for name, _ in tower.named_modules() if name)
    for name, module in norms.items():
        module.requires_grad_(False)
        tower.still |= {name}
    if isinstance(train, FromStep):
        tower.first_step = train.from_step
    else:
        trained = {name for name, each in tower.named_parameters(remove_duplicate=False) if each.requires_grad}
        tower.constants = frozenset(tower.state_dict().keys() - trained)
    return tower.train(tower.training)


def _freeze_before(tower: Tower, last: int) -> None:
    """Freeze everything before the last ``last`` blocks."""
    blocks = block_names(tower)
    if last > len(blocks):
        raise ConfigError(
            f"tower.train.last: got {last}; this tower has {len(blocks)} blocks ({blocks[0]} to {blocks[-1]}); "
            f"expected at most {len(blocks)}, or train: {{from_step: 0}} for the whole tower"
        )
    frozen = len(blocks) - last
    depths = depth_of(tower, (name for name, _ in tower.named_parameters()), blocks)
    for name, parameter in tower.named_parameters():
        if depths[name] <= frozen:
            parameter.requires_grad_(False)
    tower.still = frozenset(_modules_up_to(tower, blocks, frozen))


def _modules_up_to(tower: nn.Module, blocks: list[str], depth: int) -> set[str]:
    """Return the names of the modules up to a depth; a module around blocks counts if all its children do."""
    modules = dict(tower.named_modules())
    depths = depth_of(tower, modules, blocks)
    inside = tuple(f"{block}." for block in blocks)
    found: set[str] = set()
    for name, module in reversed(modules.items()):  # children come after their parents
        children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        whole = not children or f"{name}.".startswith(inside)
        if depths[name] <= depth if whole else found.issuperset(children):
            found.add(name)
    return found - {""}


def add_adapters(tower: Tower, config: AdapterConfig) -> None:
    """Freeze a tower and add adapters to its linear layers, drawn from torch's global generator.

    Raises:
        ConfigError: peft is missing, no layer can be adapted, or an adapter gets no gradient.
    """
    peft = import_extra("peft", "lora", "tower.train.lora: ")
    names = _adapted_layers(tower, config.targets)
    tower.requires_grad_(False)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.scale * config.rank,
        lora_dropout=config.dropout,
        target_modules=names,
    )
    peft.inject_adapter_in_model(settings, tower)
    tower.still = frozenset(name for name, _ in tower.named_modules() if name and _DROPOUT not in name)
    tower.adapter_scale = config.scale
    training = tower.training
    with torch.enable_grad():
        unused = freeze_unused(tower, tower.eval()(tower.example()))
    tower.train(training)
    if unused:  # DDP would wait for their gradients
        layers = dict.fromkeys(name.partition(".lora_")[0] for name in unused)
        raise ConfigError(
            f"tower.train.lora.targets: adapters of {first_names(layers)} do not affect the features; expected names "
            "of layers whose own forward is called"
        )


def _adapted_layers(tower: nn.Module, targets: tuple[str, ...] | None) -> list[str]:
    """Return the names of the linear layers to adapt: those of the blocks, or those that match ``targets``."""
    linear = [name for name, module in tower.named_modules() if isinstance(module, nn.Linear)]
    inside = tuple(f"{name}." for name, module in tower.named_modules() if isinstance(module, nn.MultiheadAttention))
    possible = [name for name in linear if not name.startswith(inside)]
    if targets is None:
        blocks = tuple(f"{name}." for name in block_names(tower))
        # Layers that do not affect the features are frozen.
        found = [n for n in possible if n.startswith(blocks) and tower.get_submodule(n).weight.requires_grad]
        if not found:
            raise ConfigError(
                f"tower.train.lora: the blocks of this tower have no linear layer that can be adapted "
                f"(layers: {first_names(block_names(tower))}); expected a transformer; use train: {{last: 2}}"
            )
        return found
    for pattern in targets:
        try:
            matching = [name for name in possible if re.search(pattern, name)]
        except re.error as error:
            raise ConfigError(f"tower.train.lora.targets: got {pattern!r}, no regular expression: {error}") from error
        if not matching:
            raise ConfigError(
                f"tower.train.lora.targets: got {pattern!r}, which is in the name of no linear layer outside of "
                f"nn.MultiheadAttention; expected a part of {first_names(possible) or 'none: this tower has none'}"
            )
    return [name for name in possible if any(re.search(pattern, name) for pattern in targets)]


def freeze_unused(tower: nn.Module, features: Tensor) -> tuple[str, ...]:
    """Freeze weights that do not affect the features, such as a head's norm: DDP would wait for their gradient.

    Returns:
        Their names.
    """
    weights = {name: weight for name, weight in tower.named_parameters() if weight.requires_grad}
    if not weights:
        return ()
    used: set[nn.Parameter] = set()

    def drop_gradient(weight: nn.Parameter) -> None:  # so that no two gradients are in memory
        used.add(weight)
        weight.grad = None

    hooks = [weight.register_post_accumulate_grad_hook(drop_gradient) for weight in weights.values()]
    if features.requires_grad:
        torch.autograd.backward(features.sum(), inputs=list(weights.values()))
    for hook in hooks:
        hook.remove()
    for weight in weights.values():
        weight.requires_grad_(weight in used)
    return tuple(name for name, weight in weights.items() if not weight.requires_grad)


def chunk_size(device: torch.device) -> int:
    """Return the number of samples in a chunk: 16 on a CPU, 64 on devices with more parallel units."""
    return 16 if device.type == "cpu" and gpu_memory(device) is None else 64


@torch.no_grad()
def frozen_features(tower: Tower, inputs: Tensor, reduce: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """Run a frozen tower without gradient, in evaluation mode, in chunks of one shape.

    Captions are padded to the whole context. Kernels choose their blocking by the shape of their input, and so round
    differently for other batch sizes. In one shape each row gets the same bits, wherever it is in the chunk: measured
    on CPUs for convolutions with batch normalisation, a ViT and a text transformer. Another number of threads may round
    differently.

    Args:
        tower: no parameter of it requires a gradient.
        inputs: ``(B, 3, H, W)`` images or ``(B, T)`` token numbers; B may be 0.
        reduce: of the features ``(chunk, N, D)`` of a chunk, and its padded inputs, to ``(chunk, M, D)``.

    Returns:
        ``(B, N, D)``, for captions ``(B, T, D)``, or ``(B, M, D)``, in the dtype of the tower's weights.
    """
    length = inputs.shape[1] if inputs.ndim == 2 else None
    dtype = next((parameter.dtype for parameter in tower.parameters()), torch.get_default_dtype())

    def run(rows: Tensor) -> Tensor:
        features = tower(rows).to(dtype)
        return features[:, :length] if reduce is None else reduce(features, rows)

    training = [module for module in tower.modules() if module.training]
    try:
        for module in training:
            module.training = False
        return run_in_chunks(run, tower.pad_inputs(inputs))
    finally:
        for module in training:
            module.training = True


def run_in_chunks(run: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return ``run(inputs)``, from chunks of one shape; the last one is filled up with rows of zeros."""
    size, parts = chunk_size(inputs.device), []
    for rows in inputs.split(size):
        padding = rows.new_zeros(size - len(rows), *rows.shape[1:])
        parts.append(run(torch.cat([rows, padding]))[: len(rows)])
    return torch.cat(parts)
