"""A vector becomes the nearest code of a table: the base class of VQ and SimVQ, and SimVQ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import Config
from vqclip.config.bounds import MAX_LAYERS, MAX_WIDTH
from vqclip.dist import is_torch_compiling
from vqclip.errors import ConfigError
from vqclip.nn.layers import Block
from vqclip.nn.precision import full_precision
from vqclip.quantizers.base import Quantizer, resolve_weights
from vqclip.quantizers.gradients import rotation
from vqclip.quantizers.stats import Stats
from vqclip.quantizers.vectors import CHUNK, MAX_COUNTED_CODES, squared_error, straight_through, tokens_at_a_time

PATCH = 16
"""Number of codes that `CodebookProjector` joins to a token."""
PROJECTOR_WIDTH = 256
"""Width of its transformer."""

GradientPath = Literal["straight_through", "rotation"]
"""Gradient from a code to its vector: unchanged, or rotated (`rotation`)."""


class TableQuantizer(Quantizer):
    """Replaces each vector by the nearest of the codes that `codes` returns.

    Losses, each a mean over the tokens of all ranks:

    - ``commitment``: mean squared distance of the vector from its code; its gradient moves the vector.
    - ``codebook``: the same number; its gradient moves the code. Only if codes are learned by gradient.

    `update` counts the steps since each code was used; `metrics` has the largest count as ``oldest``.

    Args:
        dim: D, at least 1.
        codebook_size: K, at least 2.
        groups: G, the number of codebooks; more than 1 in a `Product`.
        gradient: gradient from codes to vectors, ``rotation`` or ``straight_through``; None if a subclass has another.
        loss_weights: name → weight of the loss; one with weight 0 is not computed.

    Raises:
        ConfigError: a number out of range, or unknown ``gradient``.
    """

    age: Tensor
    step: Tensor

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        groups: int,
        gradient: GradientPath | None,
        loss_weights: Mapping[str, float],
    ):
        name = type(self).__name__
        if dim < 1 or not 2 <= codebook_size <= MAX_COUNTED_CODES or groups < 1:
            raise ConfigError(
                f"{name}: dim is {dim}, codebook_size {codebook_size} and groups {groups}; expected dim >= 1, "
                f"codebook_size from 2 to {MAX_COUNTED_CODES} and groups >= 1"
            )
        if gradient not in (*get_args(GradientPath), None):
            raise ConfigError(f"{name}: gradient is {gradient!r}, expected one of {', '.join(get_args(GradientPath))}")
        super().__init__(dim, (codebook_size,), {name: weight for name, weight in loss_weights.items() if weight > 0})
        self.groups = groups
        self.gradient = gradient
        self.register_buffer("age", torch.zeros(groups, codebook_size, dtype=torch.int64))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    @abstractmethod
    def codes(self) -> Tensor:
        """Return the codes ``(G, K, D)``, with gradient if they are learned by gradient."""

    def _losses(self, stats: Stats) -> dict[str, Tensor]:
        """Return the losses of the class."""
        count = stats["tokens"].clamp(min=1)
        return {name: (stats[name].double() / count).mean() for name in self.loss_weights}

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: codes must stay near the vectors."""
        return {"codebook", "transform"}

    @property
    def refinement(self) -> float | None:
        """1: the codes of each stage learn the scale of the remainder."""
        return 1.0

    def metrics(self, stats: Stats) -> dict[str, Tensor]:
        """Return the metrics of `Quantizer`, and ``oldest``: steps since the least recently used code was used."""
        return {**super().metrics(stats), "oldest": self.age.max()}

    def _update(self, stats: Stats, start: bool) -> None:
        """Count the step, and the steps since each code was used."""
        self._count_step(stats.sync()["codes"])

    def _count_step(self, counts: Tensor) -> None:
        waited = torch.where(counts.sum() > 0, self.age + 1, self.age)
        self.age.copy_(torch.where(counts > 0, 0, waited))
        self.step.add_(1)

    def _nearest(self, bounded: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            codes = self.codes()
            ids = nearest(bounded, codes.to(bounded.dtype))
            return look_up(codes, ids), ids.unsqueeze(-1)

    def _decode(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return look_up(self.codes(), ids.squeeze(-1).clamp(min=0)).masked_fill(ids < 0, 0)

    def _pass_gradient(self, values: Tensor, bounded: Tensor) -> Tensor:
        through = rotation(bounded, values) if self.gradient == "rotation" else bounded
        return straight_through(values, through)

    def _statistics(self, bounded: Tensor, values: Tensor, ids: Tensor, keep: Tensor | None) -> Stats:
        counts = super()._statistics(bounded, values, ids, keep)
        sums = counts.sums | counts.histograms  # `update` reads the histogram
        sums["commitment"] = squared_error(bounded, values.detach(), keep)
        if "codebook" in self.loss_weights:
            learned = look_up(self.codes().to(bounded.dtype), ids.squeeze(-1).clamp(min=0))
            sums["codebook"] = squared_error(bounded.detach(), learned, keep)
        return Stats(sums)


def whole(weight: Tensor) -> Tensor:
    """Return a weight that codes are made of; raise a `ConfigError` if it is in shards."""
    if dist.local_rows(weight) is not weight:
        raise ConfigError(
            "quantizer: got codes in shards (fully_shard), expected all of them on every rank; use VQ with learning: "
            "ema, or fully_shard(model, ignored_params=set(quantizer.parameters())) and average their gradients"
        )
    return weight


def nearest(x: Tensor, codes: Tensor, among: Tensor | None = None) -> Tensor:
    """Return the id of the nearest code, the first of equals: ``(T, G, D)``, ``(G, K, D)`` → ``(T, G)`` int64.

    ``among`` ``(G, K)`` bool restricts the search to some codes. A vector with NaN gets any id in range.

    Computed as ``argmax <x, c> - |c|² / 2``, one matrix product. Except in an exported graph, a limited number of
    scores is computed at a time: `CHUNK` on a CPU, a 64th of a GPU's memory.
    """
    return nearest_few(x, codes, 1, among).squeeze(-1)


def nearest_few(x: Tensor, codes: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    """Return the ids of the ``count`` nearest codes, nearest first, ``(T, G, count)`` int64; see `nearest`."""
    # An operator of its own in a compiled graph, whose number of parts would be part of the graph.
    if is_torch_compiling():
        return _nearest_in_graph(x, codes, count, among)
    # Relative to the median of the codes, for precision when all codes are far from 0. A single distant code would
    # move the mean.
    middle = codes.median(dim=1, keepdim=True).values
    x, codes = x - middle.transpose(0, 1), codes - middle
    half_norm = codes.square().sum(dim=-1).div_(2)[:, None]
    if among is not None:
        half_norm = half_norm.masked_fill(~among[:, None], torch.inf)
    table = codes.transpose(1, 2)
    groups, size, _ = codes.shape
    found = []
    parts = (x,) if torch.compiler.is_exporting() else x.split(tokens_at_a_time(x.device, groups * size, CHUNK))
    for part in parts:
        scores = torch.baddbmm(half_norm, part.transpose(0, 1), table, beta=-1)
        best = scores.argmax(dim=-1, keepdim=True) if count == 1 else scores.topk(count, dim=-1).indices
        found.append(best.transpose(0, 1))
    return torch.cat(found) if len(found) > 1 else found[0]


@torch.library.custom_op("vqclip::nearest", mutates_args=())
def _nearest_in_graph(x: Tensor, codes: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    return nearest_few(x, codes, count, among).contiguous()


@_nearest_in_graph.register_fake
def _(x: Tensor, codes: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:2], count), dtype=torch.int64)


def look_up(codes: Tensor, ids: Tensor) -> Tensor:
    """Return the codes of ids: ``(G, K, D)``, ``(T, G)`` → ``(T, G, D)``."""
    groups, size, _ = codes.shape
    rows = ids + size * torch.arange(groups, device=ids.device)
    return F.embedding(rows, codes.flatten(0, 1)) + 0.0  # a sum of codes never gives -0.0


class SimVQ(TableQuantizer):
    """Vector quantization with a learned linear layer over a frozen table (Zhu et al. 2024, arXiv 2411.02038).

    The layer moves all codes, also unused ones. With ``blocks`` a transformer over groups of codes follows it, after
    the projector of FVQ (Chang et al. 2025, arXiv 2509.10140). In a `Product` each codebook has a table and a layer of
    its own, and all have the same transformer. Codes are computed in every forward and decode. Losses: ``commitment``
    and ``codebook``, see `TableQuantizer`. Other arguments: see `SimVQConfig`.

    Args:
        loss_weights: name → weight, by default as of `SimVQConfig`; only ``commitment`` may be 0.
        groups: G, the number of codebooks; more than 1 in a `Product`.

    Raises:
        ConfigError: a value out of range, or a weight for a loss that does not exist.
    """

    codebook: Tensor

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        gradient: GradientPath = "rotation",
        loss_weights: Mapping[str, float] | None = None,
        blocks: int = 0,
        groups: int = 1,
    ):
        weights = resolve_weights("SimVQ", SimVQLossWeights().model_dump(), loss_weights)
        if not weights["codebook"] > 0:
            raise ConfigError("SimVQ: loss_weights.codebook is 0, expected more: only that loss moves the codes")
        super().__init__(dim, codebook_size, groups, gradient, weights)
        self.register_buffer("codebook", torch.randn(groups, codebook_size, dim, dtype=torch.float32) * dim**-0.5)
        self.transform = nn.Parameter(torch.eye(dim, dtype=torch.float32).repeat(groups, 1, 1))
        self.projector = CodebookProjector(dim, blocks).float() if blocks else None
        self._settings = (dim, codebook_size, gradient, weights, blocks)

    def spawn(self, groups: int = 1) -> SimVQ:
        """See `Quantizer.spawn`."""
        return SimVQ(*self._settings, groups)

    def codes(self) -> Tensor:
        """Return the codes ``(G, K, D)``, with gradient for the layers."""
        with full_precision(self.codebook.device):
            codes = self.codebook @ whole(self.transform)
            return codes if self.projector is None else self.projector(codes)


class CodebookProjector(nn.Module):
    """A change of all codes together: groups of codes are compressed to tokens, which pass through a transformer.

        tokens = blocks(compress(codes of a group, side by side))
        codes + recover(tokens)                         # recover is 0 at the start

    Args:
        dim: D.
        blocks: number of transformer blocks.
    """

    def __init__(self, dim: int, blocks: int):
        super().__init__()
        self.compress = nn.Linear(PATCH * dim, PROJECTOR_WIDTH)
        self.blocks = nn.ModuleList(Block(PROJECTOR_WIDTH, heads=4) for _ in range(blocks))
        self.recover = nn.Linear(PROJECTOR_WIDTH, PATCH * dim)
        nn.init.zeros_(self.recover.weight)
        nn.init.zeros_(self.recover.bias)

    def forward(self, codes: Tensor) -> Tensor:
        """``(G, K, D)`` → ``(G, K, D)``."""
        size = codes.shape[1]
        tokens = self.compress(rearrange(F.pad(codes, (0, 0, 0, -size % PATCH)), "g (n p) d -> g n (p d)", p=PATCH))
        for block in self.blocks:
            tokens = block(tokens, None)
        return codes + rearrange(self.recover(tokens), "g n (p d) -> g (n p) d", p=PATCH)[:, :size]


class TableConfig(Config):
    """Settings that VQ and SimVQ share."""

    dim: Annotated[int, Field(ge=1, le=MAX_WIDTH)]
    """Width of the vectors and codes."""
    codebook_size: Annotated[int, Field(ge=2, le=MAX_COUNTED_CODES)] = 1024
    """Number of codes."""


class SimVQLossWeights(Config):
    """Weights of SimVQ's losses in the training loss."""

    commitment: Annotated[float, Field(ge=0)] = 0.25
    """Weight of the mean squared distance that moves vectors to their codes."""
    codebook: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the same distance, moving codes to their vectors."""


class SimVQConfig(TableConfig):
    """Vector quantization with a frozen table of codes behind a learned linear layer."""

    kind: Literal["simvq"] = "simvq"
    gradient: GradientPath = "rotation"
    """Gradient from codes to vectors: straight_through, or rotation (the rotation trick)."""
    blocks: Annotated[int, Field(ge=0, le=MAX_LAYERS)] = 0
    """Number of transformer blocks over groups of 16 codes behind the linear layer (the projector of FVQ)."""
    loss_weights: SimVQLossWeights = SimVQLossWeights()
    """Weights of the two losses."""

    def build(self) -> SimVQ:
        """Make the quantizer; torch's global generator draws its table."""
        return SimVQ(self.dim, self.codebook_size, self.gradient, self.loss_weights.model_dump(), self.blocks)
