"""Distillation of a teacher's similarities (CLIP-KD: Yang et al. 2024, https://arxiv.org/abs/2307.12732).

Computed as `vqclip.losses.tiles` does, on the student's and the teacher's tiles side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vqclip import dist
from vqclip.errors import ShapeError
from vqclip.losses.exchange import Block, Exchange
from vqclip.losses.features import (
    Implementation,
    check_implementation,
    check_scalars,
    gather_features,
    to_full_precision,
)
from vqclip.losses.tiled import EXCHANGES, Outputs, outputs_like, without_gradients
from vqclip.losses.tiles import FeatureGradients, Gradients, Tiles, add_logsumexp_, attach_gradients, softmaxes
from vqclip.nn.precision import full_precision


class DistillationLoss(nn.Module):
    """Cross-entropy of the student's softmax against the teacher's, over rows and columns.

    A separate term, to be added to a contrastive loss: the distillation part of open_clip's ``DistillClipLoss``, over
    the global batch. Every rank returns the same value.

    Args:
        impl: see `vqclip.losses.ContrastiveLoss`.
        group: the ranks whose batches make the global batch; all ranks by default.

    Raises:
        ConfigError: unknown implementation.
    """

    name = "distillation"

    def __init__(self, impl: Implementation = "tiled", group: dist.Group = None):
        super().__init__()
        check_implementation(impl)
        self.impl, self.group = impl, group

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        teacher_image: Tensor,
        teacher_text: Tensor,
        teacher_scale: Tensor,
    ) -> Tensor:
        """Return the mean over rows and columns of the global batch. A collective; with ``gather`` its backward too.

        Args:
            image: this rank's ``(B, E)`` unit-norm features; B may differ between ranks and be 0.
            text: ``(B, E)``; row i is the text of image i.
            scale: () positive factor of the logits.
            teacher_image: ``(B, F)`` the teacher's features of the same images; they get no gradient.
            teacher_text: ``(B, F)``.
            teacher_scale: () factor of the teacher's logits.

        Returns:
            () float32, or float64 for float64 features.

        Raises:
            ShapeError: the features do not pair up.
        """
        if len(teacher_image) != len(image):
            raise ShapeError(
                f"features: got {len(image)} pairs from the student and {len(teacher_image)} from the teacher; "
                "expected the teacher's features of the student's pairs, in their order"
            )
        image, text = to_full_precision(image, text)
        check_scalars(scale=scale, teacher_scale=teacher_scale)
        teacher_image, teacher_text = to_full_precision(teacher_image.detach(), teacher_text.detach())
        scale = scale.to(image.dtype)
        teacher = (teacher_image.to(image.dtype), teacher_text.to(image.dtype), teacher_scale.detach().to(image.dtype))
        with full_precision(image.device):
            if self.impl == "gather":
                return self._reference_loss(image, text, scale, *teacher)
            inputs = (image, text, scale, torch.zeros_like(scale))
            wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
            known = torch.ops.vqclip.tiled_distillation(
                image.detach(),
                text.detach(),
                scale.detach(),
                *teacher,
                self.impl,
                dist.group_name(self.group),
                wants_grad,
            )
            return attach_gradients(*inputs, Gradients(*known))

    def _reference_loss(
        self, image: Tensor, text: Tensor, scale: Tensor, teacher_image: Tensor, teacher_text: Tensor, factor: Tensor
    ) -> Tensor:
        images, texts = gather_features(image, text, self.group)
        teacher_images, teacher_texts = gather_features(teacher_image, teacher_text, self.group)
        logits, wanted = scale * images @ texts.T, factor * teacher_images @ teacher_texts.T
        parts = [-(wanted.softmax(dim) * logits.log_softmax(dim)).sum() for dim in (0, 1)]
        return (parts[0] + parts[1]) / (2 * len(logits))


def _distill(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    teacher_image: Tensor,
    teacher_text: Tensor,
    teacher_scale: Tensor,
    exchange: Exchange,
    wants_grad: bool,
) -> Gradients:
    """``exchange`` holds the student's and the teacher's texts, concatenated along the width."""
    student = Tiles(image, exchange.start, scale, pairs_apart=False)
    teacher = Tiles(teacher_image, exchange.start, teacher_scale, pairs_apart=False)
    widths = (text.shape[1], teacher_text.shape[1])

    def halves(block: Block) -> tuple[Block, Block]:
        mine, theirs = block.texts.split(widths, dim=1)
        return block._replace(texts=mine), block._replace(texts=theirs)

    rows = [image.new_full((len(image),), -torch.inf, dtype=torch.float64) for _ in range(2)]
    of_columns = [exchange.empty(each, -torch.inf) for each in rows]
    for block in exchange.blocks(*of_columns):
        for side, half, row, column in zip((student, teacher), halves(block), rows, block.carried, strict=True):
            for tile in side.of(half):
                add_logsumexp_(row[tile.rows], tile.logits, dim=1)
                add_logsumexp_(column[tile.columns], tile.logits, dim=0)
    columns = [exchange.collect_logsumexp(each) for each in of_columns]

    share = 1 / (2 * exchange.count)
    loss = share * (rows[0].sum() + columns[0].sum())
    gradients = FeatureGradients(image, text, exchange) if wants_grad else None
    for block in exchange.blocks(
        *map(exchange.to_carried, columns), *([] if gradients is None else [gradients.of_texts])
    ):
        mine, theirs = halves(block)
        for tile, wanted in zip(student.of(mine), teacher.of(theirs), strict=True):
            target = softmaxes(wanted.logits, rows[1][wanted.rows], block.carried[1][wanted.columns], share)
            loss -= (target * tile.logits).sum()
            if gradients is not None:
                softmaxes(tile.logits, rows[0][tile.rows], block.carried[0][tile.columns], share).sub_(target)
                gradients.add(mine, block.carried[2], tile)
    if gradients is None:
        return without_gradients(dist.reduce_(loss, group=exchange.group).to(scale.dtype))
    return gradients.finish(loss, scale, torch.zeros_like(scale))


@torch.library.custom_op("vqclip::tiled_distillation", mutates_args=())
def _distillation_op(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    teacher_image: Tensor,
    teacher_text: Tensor,
    teacher_scale: Tensor,
    impl: str,
    group: str,
    wants_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    both = torch.cat((text, teacher_text), dim=1)
    exchange = EXCHANGES[impl](both, dist.group_by_name(group), wants_grad)
    found = _distill(image, text, scale, teacher_image, teacher_text, teacher_scale, exchange, wants_grad)
    return found.separate()


@_distillation_op.register_fake
def _like(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    teacher_image: Tensor,
    teacher_text: Tensor,
    teacher_scale: Tensor,
    impl: str,
    group: str,
    wants_grad: bool,
) -> Outputs:
    return outputs_like(image, text, scale, wants_grad)
