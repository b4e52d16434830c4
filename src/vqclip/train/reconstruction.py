"""Reconstruction of images beside the contrastive loss (`model.image.pixels`).

    images ─→ tower ─→ quantizer ─→ vectors of the codes ─┬→ embedding ─→ contrastive loss
                                                          └→ pixel decoder ─→ losses on pixels

The vectors have straight-through gradients, so the tower learns from both. `weight` is a factor on the gradient that
the losses on pixels have for the vectors; the decoder trains with the whole gradient, whatever the weight is, and its
gradient is clipped apart. The target is the image that the tower saw, with its augmentation. The decoder is a part of
the image tokenizer: it is in checkpoints, moving averages and exports. Discriminators are in checkpoints alone.

Before its first step, the decoder is frozen and not run: the step computes what it computes without one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vqclip.model import CLIP, CLIPOutput
from vqclip.pixels.losses import PixelLosses
from vqclip.pixels.training import PixelTrainingConfig
from vqclip.quantizers import Stats
from vqclip.train.pixel_sums import sums_of_decoded

__all__ = ["ReconstructingCLIP"]


class ReconstructingCLIP(nn.Module):
    """CLIP whose forward also decodes images from the vectors of their codes and compares them.

    Args:
        model: built with `image.pixels`.
        losses: compare decoded images with real ones.
    """

    def __init__(self, model: CLIP, losses: PixelLosses):
        super().__init__()
        assert model.image.pixels is not None
        assert model.image.config.pixels is not None
        self.model, self.decoder, self.losses = model, model.image.pixels, losses
        self.config: PixelTrainingConfig = model.image.config.pixels

    def forward(self, images: Tensor, *others: Any, places: Tensor, step: int) -> tuple[CLIPOutput, dict[str, Stats]]:
        """Run the training path; return its output and `sums_of_decoded`, empty before the first step.

        Args:
            images: ``(B, 3, H, W)`` uint8.
            others: further arguments of `CLIP.forward`.
            places: ``(B,)`` positions of the samples in the global batch.
            step: number of the step, from 0.
        """
        out: CLIPOutput = self.model(images, *others)
        if step < self.config.start_step:
            return out, {}
        vectors = out.image.vectors
        assert vectors is not None
        vectors = vectors.detach().lerp(vectors, self.config.weight)  # scales the gradient alone
        if self.config.one_in > 1:
            rows = ((places + step) % self.config.one_in == 0).nonzero().squeeze(1)
            vectors, images, places = vectors[rows], images[rows], places[rows]
        return out, sums_of_decoded(self.decoder, self.losses, vectors, images, places, step)

    def terms(self, sums: Mapping[str, Stats], step: int) -> tuple[dict[str, Tensor], dict[str, float | Tensor]]:
        """Return the unweighted terms over the global batch, and their weights, both as ``pixels/<term>``.

        Args:
            sums: those of `forward`, of all ranks.
            step: number of the step, from 0.
        """
        if "pixels" not in sums:
            return {}, {}
        terms, weights = self.losses.terms(sums["pixels"].sums, step)
        return (
            {f"pixels/{name}": term for name, term in terms.items()},
            {f"pixels/{name}": weight for name, weight in weights.items()},
        )

    def move_to_step(self, step: int) -> bool:
        """Freeze or unfreeze decoder and discriminators as in step number ``step``; return whether any changed."""
        trains = step >= self.config.start_step
        changing = [each for each in self.decoder.parameters() if each.requires_grad != trains]
        for parameter in changing:
            parameter.requires_grad_(trains)
            parameter.grad = None
        return self.losses.move_to_step(step if trains else -1) or bool(changing)

    @property
    def changing_steps(self) -> set[int]:
        """First steps of the decoder and of the terms."""
        return {max(self.config.start_step, step) for step in (0, *self.losses.starts)}
