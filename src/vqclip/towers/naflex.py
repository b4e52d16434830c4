"""Image towers for images of any shape: timm's NaFlexVit over the patches of `vqclip.nn.shapes.PatchBudget`.

After NaViT (Dehghani et al. 2023) and SigLIP 2 (Tschannen et al. 2025). Every image has a budget of its own and is
padded to it, so its features depend neither on the others of its batch nor on the number of processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqclip.errors import ConfigError, ShapeError
from vqclip.nn.precision import full_precision
from vqclip.nn.shapes import LONGEST, PatchBudget, mark_columns, shape_mask
from vqclip.towers.base import set_training
from vqclip.towers.image import ImageTower, TimmConfig

_HIDDEN = -1e4
"""Added to the scores of padding: the softmax of it is 0 in every precision, and finite without any patch."""


class NaFlexNetwork(nn.Module):
    """A NaFlexVit of timm, with its learned positions interpolated for each image by products of matrices.

    timm interpolates them once for each shape in the batch, which reads shapes on the host, and whose gradient has no
    fixed order of sums on a GPU. The features are equal up to rounding.

    Args:
        model: the timm model.
        sides: largest number of rows or columns.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, model: Any, sides: int):
        super().__init__()
        self.model = model
        embeds = model.embeds
        self.keeps_proportions = bool(embeds.pos_embed_ar_preserving)
        options = {
            "mode": embeds.pos_embed_interp_mode,
            "antialias": getattr(embeds, "pos_embed_antialias", True),
            "align_corners": getattr(embeds, "pos_embed_align_corners", False),
        }
        # Row 0 is that of padding.
        for name, cells in zip(("rows", "columns"), embeds.pos_embed.shape[1:3], strict=True):
            self.register_buffer(name, _interpolations(cells, sides, options), persistent=False)

    def forward(self, pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Map patches ``(B, T, 3 P²)`` with rows and columns ``(B, T)``, from 1, or 0 of padding, to ``(B, T, D)``."""
        model, embeds = self.model, self.model.embeds
        x = embeds.norm(embeds.proj(pixels)) + self._positions(rows, columns)
        prefix = [each.expand(len(x), -1, -1) for each in (embeds.cls_token, embeds.reg_token) if each is not None]
        x = model.norm_pre(embeds.pos_drop(torch.cat([*prefix, x], dim=1)))
        hidden = F.pad(rows == 0, (model.num_prefix_tokens, 0))
        mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill(hidden, _HIDDEN)
        for block in model.blocks:
            x = block(x, attn_mask=mask[:, None, None, :])
        return model.norm(x)[:, model.num_prefix_tokens :]

    def _positions(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return positions ``(B, T, D)``: the table of ``(1, H, W, D)``, resized to the shape of each image."""
        shape = torch.stack([rows.amax(dim=1), columns.amax(dim=1)])
        if self.keeps_proportions:
            shape = shape.amax(dim=0).expand(2, -1)
        high, wide = self.rows[shape[0, :, None], rows], self.columns[shape[1, :, None], columns]
        table = self.model.embeds.pos_embed[0]
        with full_precision(table.device):
            return (high[..., None] * wide[..., None, :]).flatten(2).to(table.dtype) @ table.flatten(0, 1)


def _interpolations(cells: int, sides: int, options: dict[str, Any]) -> Tensor:
    """Return weights ``(n, place, cell)`` of a row of cells resized to n = 0 to ``sides`` places, counted from 1."""
    weights = torch.zeros(sides + 1, sides + 1, cells)
    for size in range(1, sides + 1):
        # Two equal columns: torch 2.14 resizes an antialiased image of one column as if it were empty below its top.
        resized = F.interpolate(torch.eye(cells)[None, :, :, None].expand(-1, -1, -1, 2), size=(size, 2), **options)
        weights[size, 1 : size + 1] = resized[0, :, :, 0].T
    return weights


class NormalizePatches(nn.Module):
    """Checks patches and normalises each channel, as `vqclip.towers.image.Normalize` does.

    Args:
        size: patches of an image.
        mean, std: per-channel mean and deviation of pixels in 0..1.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: PatchBudget, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pixels ``(B, t, 3 P²)`` in the dtype of the weights, and rows and columns ``(B, t)`` int64 of patches.

        Raises:
            ShapeError: wrong shape or dtype.
        """
        most, numbers = self.size.shape
        if images.ndim != 3 or not 1 <= images.shape[1] <= most or images.shape[2] != numbers:
            raise ShapeError(
                f"images: got shape {tuple(images.shape)}, expected patches (B, 1 to {most}, {numbers}) of images of "
                "any shape; tokenizer.preprocess makes such a tensor from a PIL image"
            )
        if images.dtype != torch.uint8:
            raise ShapeError(f"images: got dtype {images.dtype}, expected uint8, as tokenizer.preprocess makes it")
        pixels = images[..., :-2].unflatten(2, (-1, 3)).to(self.mean.dtype).div_(255).sub_(self.mean).div_(self.std)
        return pixels.flatten(2), images[..., -2].long(), images[..., -1].long()


class NaFlexTower(ImageTower):
    """A ViT over the patches of images of any shape.

    Args:
        backbone: the network.
        normalize: normalisation of the pixels.

    Attributes:
        num_tokens: N, one more than the largest number of patches: see `vqclip.nn.shapes`.
    """

    normalize: NormalizePatches
    fewest_tokens = 1

    @property
    def size(self) -> PatchBudget:
        """Patches of an image, for transforms."""
        return self.normalize.size

    @property
    def image_size(self) -> int:
        """Raise ConfigError: images have no common size."""
        raise ConfigError(
            "image.tower.kind: got naflex, whose images have any shape, where square images of one size are needed; "
            "expected a tower with an image_size, such as kind: timm"
        )

    def mask(self, images: Tensor) -> Tensor:
        """Return ``(B, t + 1)`` bool, True at the tokens of patches."""
        return shape_mask(images[..., -2:].long().amax(dim=1), images.shape[1] + 1)

    def require_places(self, images: Tensor) -> None:
        """Check the rows and columns of patches; `forward` does not, to save time.

        Raises:
            ShapeError: wrong shape or dtype, or other places than those of an image's patches, row by row.
        """
        _, rows, columns = self.normalize(images)
        width = columns.amax(dim=1, keepdim=True).clamp(min=1)
        number = torch.arange(images.shape[1], device=images.device)
        inside = number < rows.amax(dim=1, keepdim=True) * width
        right = (rows == (number // width + 1) * inside) & (columns == (number % width + 1) * inside)
        for row in (~right).any(dim=1).nonzero().flatten().tolist():
            raise ShapeError(
                f"images[{row}]: got other rows and columns of patches than those of an image, row by row, and padding "
                "after them; tokenizer.preprocess makes such a tensor from a PIL image"
            )

    def forward(self, images: Tensor) -> Tensor:
        """``(B, t, 3 P² + 2)`` uint8, see `PatchBudget` → features ``(B, t + 1, D)``; those of padding are undefined.

        The last patches may be left out if they are padding in every image.
        """
        if images.shape[0] == 0:  # weights need their (zero) gradient
            return self(images.new_zeros(1, *images.shape[1:]))[:0]
        pixels, rows, columns = self.normalize(images)
        return mark_columns(self.backbone(pixels, rows, columns), columns.amax(dim=1))

    def example(self) -> Tensor:
        """Return a black image of one row ``(1, T, 3 P² + 2)``."""
        side = self.size.patch_size
        columns = min(self.size.max_tokens, LONGEST)
        image = torch.zeros(3, side, side * columns, dtype=torch.uint8)
        return self.size.cut(image)[None].to(self.normalize.mean.device)


class NaFlexTowerConfig(TimmConfig):
    """A ViT for images of any shape: timm's NaFlexVit, with learned positions and a budget of patches an image."""

    kind: Literal["naflex"] = "naflex"
    name: str = "naflexvit_base_patch16_gap"
    """Name of the timm model, which begins with `naflexvit_`."""
    max_tokens: int = Field(ge=4, le=4096)
    """Patches of an image at most. An image is resized, at its own proportions, to as many whole patches as fit; ids
    have one position more."""

    @torch.inference_mode(False)
    def build(self) -> NaFlexTower:
        """Make the tower.

        Raises:
            ConfigError: a name or arguments that timm refuses, a model with other positions or patches, or a checkpoint
                that does not fit.
        """
        from timm import create_model
        from timm.models.naflexvit import NaFlexVitCfg

        with self.name_errors(f"with max_tokens {self.max_tokens}"):
            model = create_model(self.name, pretrained=self.pretrained, num_classes=0, global_pool="", **self.args)
            known = {field.name for field in dataclasses.fields(NaFlexVitCfg)}
            if unknown := [name for name in self.args if name not in known]:  # older versions of timm ignore them
                raise TypeError(f"unexpected argument {unknown[0]!r}")
            side = self._patch_size(model)
            mean, std = self.load_weights(model)
            size = PatchBudget(side, self.max_tokens)
            network = NaFlexNetwork(model, min(self.max_tokens, LONGEST))
            tower = NaFlexTower(network, NormalizePatches(size, mean, std))
        return set_training(tower, self.train)

    def _patch_size(self, model: Any) -> int:
        """Return the side of the patches; raise ConfigError for a model that the tower cannot run."""
        embeds: Any = getattr(model, "embeds", None)
        if not hasattr(embeds, "pos_embed_type"):
            raise ConfigError(f"tower.name: got {self.name!r}; expected a NaFlexVit of timm, such as naflexvit_*")
        refused = {
            "rope_type": model.rope is not None,
            "pos_embed": embeds.pos_embed is None,
            "pos_embed_use_grid_sample": embeds.pos_embed_use_grid_sample,
            "embed_proj_type": not embeds.is_linear,
            "patch_drop_rate": model.patch_drop is not None,
            "patchify_channels_last": not getattr(embeds, "channels_last", True),
            "patch_size": embeds.patch_size[0] != embeds.patch_size[1],
        }
        if wrong := [name for name, is_wrong in refused.items() if is_wrong]:
            raise ConfigError(
                f"tower.args.{wrong[0]}: got a value that this tower cannot run with {self.name!r}; expected learned "
                "positions without rotary ones, linear embeddings of square patches with channels last, and no patch "
                "dropout"
            )
        return int(embeds.patch_size[0])
