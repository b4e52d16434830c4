"""Distillation of a teacher's similarities (CLIP-KD: Yang et al. 2024, https://arxiv.org/abs/2307.12732)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vqclip.errors import ShapeError
from vqclip.losses.features import (
    Implementation,
    check_implementation,
    check_scalars,
    gather_features,
    to_full_precision,
)
from vqclip.losses.tiled import tiled_loss
from vqclip.nn.precision import full_precision


class DistillationLoss(nn.Module):
    """Cross-entropy of the student's softmax against the teacher's, over rows and columns.

    A separate term, to be added to a contrastive loss: the distillation part of open_clip's ``DistillClipLoss``, over
    the global batch. Every rank returns the same value.

    Args:
        impl: see `vqclip.losses.ContrastiveLoss`.

    Raises:
        ConfigError: unknown implementation.
    """

    name = "distillation"

    def __init__(self, impl: Implementation = "tiled"):
        super().__init__()
        check_implementation(impl)
        self.impl = impl

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        teacher_image: Tensor,
        teacher_text: Tensor,
        teacher_scale: Tensor,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the mean over rows and columns of the global batch. A collective; with ``gather`` its backward too.

        Args:
            image: this rank's ``(B, E)`` unit-norm features; B may differ between ranks and be 0.
            text: ``(B, E)``; row i is the text of image i.
            scale: () positive factor of the logits.
            teacher_image: ``(B, F)`` the teacher's features of the same images; they get no gradient.
            teacher_text: ``(B, F)``.
            teacher_scale: () factor of the teacher's logits.
            sizes: see `vqclip.losses.ContrastiveLoss`.

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
                return self._reference_loss(image, text, scale, *teacher, sizes)
            return tiled_loss("distillation", self.impl, image, text, scale, teacher=teacher, sizes=sizes)

    def _reference_loss(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        teacher_image: Tensor,
        teacher_text: Tensor,
        factor: Tensor,
        sizes: Sequence[int] | None,
    ) -> Tensor:
        images, texts = gather_features(image, text, sizes)
        teacher_images, teacher_texts = gather_features(teacher_image, teacher_text, sizes)
        logits, wanted = scale * images @ texts.T, factor * teacher_images @ teacher_texts.T
        parts = [-(wanted.softmax(dim) * logits.log_softmax(dim)).sum() for dim in (0, 1)]
        return (parts[0] + parts[1]) / (2 * len(logits))
