"""Plan of a training step before it runs: memory of a process by part, and bytes of every exchange.

    activations of a microbatch    what autograd saves of a forward on `meta`: tensors with a shape and no memory
    the rest                       formulas of the numbers of weights, samples and processes

Memory is planned at three moments, of which the fullest counts: in the loss, at the beginning of the backward pass, and
at its end. The step is one at the end of a run, in which all towers train and captions fill their context.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vqclip.checkpoint.optimizer import state_bytes
from vqclip.data.batch import share_sizes
from vqclip.errors import ConfigError
from vqclip.model import CLIP, ModelConfig
from vqclip.nn.precision import AUTOCAST_DTYPES
from vqclip.towers.blocks import block_names
from vqclip.train.config import TaskConfig
from vqclip.train.main import build_task, require_samples
from vqclip.train.tasks.contrastive import TrainConfig


class StepPlan(NamedTuple):
    """Memory and exchanges of a process in a step: that of rank 0, which has as many samples as any other."""

    samples: int
    """Samples of the process."""
    parts: dict[str, int]
    """Name of a part → bytes at the moment in which most memory is in use."""
    exchanges: dict[str, int]
    """Name of an exchange → bytes that a process sends, if the processes form a ring; empty with one process."""

    @property
    def peak(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def plan_step(config: TaskConfig, processes: int, of_machine: int = 8, gpu: int | None = None) -> StepPlan:
    """Plan a step without its data and without memory for its model.

    Args:
        config: of the run.
        processes: of the job.
        of_machine: processes of a machine, for `train.parallel: hsdp`.
        gpu: memory of a GPU in bytes, by which the loss is cut into tiles; None for a CPU.

    Raises:
        ConfigError: the batch or the machines do not fit, or a run that cannot be planned: `task: pixels`,
            `model.image.pixels`, `distillation`, or a module that reads values of tensors.
    """
    if not isinstance(config, TrainConfig) or config.distillation or config.model.image.pixels:
        raise ConfigError("only contrastive runs without distillation and model.image.pixels can be planned")
    require_samples(config.train, processes)
    train, width = config.train, config.model.embed_dim * config.dtype.itemsize  # bytes of an embedding
    shards = {"ddp": 1, "fsdp": processes, "hsdp": min(of_machine, processes)}[train.parallel]
    if train.parallel == "hsdp" and (shards == processes > 1 or processes % shards):
        raise ConfigError(
            f"train.parallel: got hsdp, with {shards} processes on a machine and {processes} in all; expected several "
            "machines with the same number of processes, or fsdp"
        )
    samples, several = share_sizes(train.batch_size, processes)[0], train.micro_batches > 1
    model = _outline(config)
    optimizer = config.optim.build(model)
    batch, saved, statistics = _forward(config, model, samples, math.ceil(samples / train.micro_batches))

    # FSDP cuts the weights of the towers that train. Two blocks are whole at a time, and what is outside of the blocks;
    # a gradient is whole, beside a copy, until it is sent.
    towers = [each for each in (model.image.tower, model.text.tower) if not each.is_frozen]
    trained = _size(each for each in model.parameters() if each.requires_grad)
    cut = _size(p for each in towers for p in each.parameters() if p.requires_grad) if shards > 1 else 0
    blocks = [[_size(block.parameters()) for block in _blocks(each)] or [0] for each in towers]
    outside = [_size(each.parameters()) - sum(sizes) for each, sizes in zip(towers, blocks, strict=True)]
    whole = max((2 * max(sizes) + rest for sizes, rest in zip(blocks, outside, strict=True)), default=0) if cut else 0
    sending = 2 * max(*outside, *(size for sizes in blocks for size in sizes)) if cut else 0
    own = trained - cut + math.ceil(cut / shards)
    always = {
        "weights": _size(model.parameters()) + _size(model.buffers()) - trained + own + whole,
        "optimizer": state_bytes(optimizer) * own // trained,
        "moving averages": own if train.ema else 0,
        "statistics": 2 * statistics,
        "batch": batch + (2 * samples * width if several else 0),
    }
    # DDP averages gradients in flat tensors that always exist; those of microbatches are summed beside them, and each
    # new one is copied into them.
    flat, summed = trained if processes > 1 and not cut else 0, trained if several else 0
    copied = max(each.nbytes for each in model.parameters() if each.requires_grad) if flat else 0
    loss, sent = _loss(config, processes, samples, width, gpu)
    moments = [
        {"gradients": flat, "activations": 0 if several else saved.size, "loss": loss},
        {"gradients": flat + summed, "activations": saved.size + saved.working, "loss": 0},
        {"gradients": max(own + copied, summed + sending), "activations": 0, "loss": 0},
    ]
    parts = max((always | moment for moment in moments), key=lambda each: sum(each.values()))

    exchanges = {"statistics": _ring_bytes(2 * statistics, processes), "loss": sent}
    exchanges["gradients"] = _ring_bytes(2 * (trained - cut), processes)
    if cut:
        passes = 3 * train.micro_batches if several else 2  # each gathers all weights
        muon = _size(each for group in optimizer.param_groups if group.get("muon") for each in group["params"])
        exchanges["weights in shards"] = _ring_bytes(passes * cut + muon, shards)
        exchanges["gradients in shards"] = _ring_bytes(cut, shards) + _ring_bytes(
            2 * cut // shards, processes // shards
        )
    return StepPlan(samples, parts, exchanges if processes > 1 else {})


def _ring_bytes(size: int, processes: int) -> int:
    """Return the bytes that a process sends to gather or scatter tensors in a ring; a sum takes twice as many."""
    return size * (processes - 1) // processes


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def _blocks(tower: nn.Module) -> list[nn.Module]:
    return [tower.get_submodule(name) for name in block_names(tower)]


def _loss(config: TrainConfig, processes: int, samples: int, width: int, gpu: int | None) -> tuple[int, int]:
    """Return the memory of the loss (`vqclip.losses`), and the bytes that a process sends for it."""
    rows, own = config.train.batch_size, 4 * samples * width
    sums = 8 if config.loss.kind == "contrastive" else 0  # bytes of the sum of a column, in float64
    keys = 0 if config.loss.positives is None else _ring_bytes(8 * rows, processes)
    logits = samples * rows * config.dtype.itemsize
    if config.loss.impl == "gather":
        return own + 4 * rows * width + 3 * processes * logits, keys + _ring_bytes(4 * rows * width, processes)
    tiles = min(5 * (2**22 if gpu is None else gpu // 1024), 2 * logits)  # four are kept
    if config.loss.impl == "ring":
        hops = (processes - 1) * ((2 if sums else 1) * width + sums) + processes * (width + sums)
        return own + 6 * samples * width + tiles, keys + samples * hops
    return own + 2 * rows * width + tiles, keys + _ring_bytes(rows * (2 * width + 4 * sums), processes)


def _outline(config: TrainConfig) -> CLIP:
    """Build the model of the last step on `meta`, without pretrained weights."""
    if config.model.text.tower.kind == "transformers":
        raise ConfigError(
            "model.text.tower: got one of transformers, which cannot be planned: it reads values of tensors"
        )
    tree = config.model.model_dump()
    for modality, part in (("image", config.model.image), ("text", config.model.text)):
        # A network of transformers is described in its own folder.
        known = {"pretrained": False} if part.tower.kind == "transformers" else part.tower.random_weights
        tree[modality]["tower"] |= known
    if tree["towers"] is not None:
        tree["towers"] |= {"pretrained": None}
    with torch.device("meta"):
        random = config.model_copy(update={"model": ModelConfig.model_validate(tree)})
        task = build_task(random, torch.device("meta"))
    task.move_to_step(config.train.steps - 1)
    for stage in (each for quantizer in task.quantizers().values() for each in quantizer.parts()):
        stage.set_turn(False)  # its codebook is initialised
    assert isinstance(task.evaluated, CLIP)
    return task.evaluated


def _forward(config: TrainConfig, model: CLIP, samples: int, rows: int) -> tuple[int, _Saved, int]:
    """Run ``rows`` of the samples of a process.

    Returns:
        Bytes of all samples with the features of frozen towers, what autograd saves, and bytes of the sums over ranks.
    """
    image, text, features = model.image, model.text, dict[str, Tensor]()
    saved = _Saved(config, model)
    try:
        with torch.device("meta"):
            pixels = torch.empty(samples, *image.tower.example().shape[1:], dtype=torch.uint8)
            tokens = torch.empty(samples, text.preprocess.context_length, dtype=torch.int64)
            for tokenizer in (image, text):
                if tokenizer.tower.is_frozen:
                    with torch.no_grad():
                        shape = tokenizer.tower_features(tokenizer.tower.example()).shape[1:]
                    features[tokenizer.modality] = torch.empty(samples, *shape, dtype=config.dtype)
            few = {name: each[:rows] for name, each in features.items()}
            with saved, torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
                out = model(pixels[:rows], tokens[:rows], few.get("image"), few.get("text"))
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"model: it cannot be planned, as a module of it reads values of tensors: {error}") from error
    both = (out.image.stats, out.text.stats)
    numbers = 2 * config.model.embed_dim + 1 + sum(each.numel() for stats in both for each in stats.sums.values())
    for draw in (each for stats in both for each in stats.draws.values() if each.shared):
        numbers += int(draw.count) * (draw.vectors[0].numel() + 1)
    batch = _size([tokens, *features.values()]) + (0 if "image" in config.cached_modalities else pixels.nbytes)
    return batch, saved, 8 * numbers


_PRODUCTS = {
    *(F.linear, F.conv1d, F.conv2d, F.conv3d, torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.bmm),
    *(Tensor.__matmul__, F.scaled_dot_product_attention, F.multi_head_attention_forward),
}
_IN_FULL = {F.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax}


class _Saved(TorchFunctionMode):
    """Bytes that autograd saves of a forward of a model on `meta`, with autocast and attention as on a GPU.

    Attributes:
        size: bytes that wait for the backward pass.
        working: bytes that it needs beside them at its beginning.
    """

    def __init__(self, config: TrainConfig, model: CLIP):
        super().__init__()
        half, recomputed = AUTOCAST_DTYPES.get(config.train.precision), config.train.activation_checkpointing
        self.size, self.working, self._half = 0, 0, half
        own = [each.untyped_storage() for each in (*model.parameters(), *model.buffers())]
        self._seen = {id(each): each for each in own}  # alive, so that no other storage gets its id
        for quantizer in model.quantizers().values():  # in full precision
            quantizer.register_forward_pre_hook(lambda *_: setattr(self, "_half", None))
            quantizer.register_forward_hook(lambda *_: setattr(self, "_half", half))
        every = 1 if isinstance(recomputed, bool) else recomputed
        for tower in (model.image.tower, model.text.tower):
            if recomputed and not tower.is_frozen:
                for block in _blocks(tower)[every - 1 :: every]:
                    self._recompute(block)

    def _recompute(self, block: nn.Module) -> None:
        """Count the inputs of a block instead of what it saves; that is made again."""
        begun: list[int] = []

        def end(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            size = begun.pop()
            self.working = max(self.working, self.size - size)
            self.size = size + _size(each for each in inputs if isinstance(each, Tensor))

        block.register_forward_pre_hook(lambda *_: begun.append(self.size))
        block.register_forward_hook(end)

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves, once with all its views."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._seen:
            self._seen[id(storage)] = storage
            self.size += storage.nbytes()
            self.working = max(self.working, storage.nbytes())
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function in the precision of autocast, and attention as a fused kernel, which saves no weights."""
        kwargs = kwargs or {}
        if self._half is not None and func in _PRODUCTS | _IN_FULL:
            dtype = self._half if func in _PRODUCTS else torch.float32
            args = [each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
        if func is F.scaled_dot_product_attention:
            out = _Attention.apply(*args[:3])
        elif func is F.multi_head_attention_forward and args[5] is not None and not kwargs["need_weights"]:
            parts = F.linear(args[0], args[5], args[6]).chunk(3, dim=-1)  # queries, keys and values
            out = F.linear(_Attention.apply(*parts), args[11], args[12]), None
        else:
            out = func(*args, **kwargs)
        return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out
