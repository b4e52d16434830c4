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

from typing import Any

import torch
from torch import Tensor, nn

from vqclip.model import CLIP, CLIPOutput
from vqclip.pixels import PixelDecoder
from vqclip.pixels.losses import PixelLosses, PixelTrainingConfig
from vqclip.pixels.metrics import psnr
from vqclip.quantizers import Stats


class Reconstruction(nn.Module):
    """A pixel decoder and the losses of its images, for every task that has one.

    Args:
        decoder: its detail codebooks are keyed.
        losses: compare decoded images with real ones.
    """

    def __init__(self, decoder: PixelDecoder, losses: PixelLosses):
        super().__init__()
        self.decoder, self.losses = decoder, losses

    def forward(self, vectors: Tensor, images: Tensor, places: Tensor, step: int) -> dict[str, Stats]:
        """Decode images as in training and compare them with the real ones. No collective.

        Args:
            vectors: ``(B, N, D)`` of the codes.
            images: ``(B, 3, H, W)`` uint8.
            places: ``(B,)`` int64, positions of the samples in the global batch.
            step: number of the step, from 0.

        Returns:
            Sums of the losses as ``pixels``; of the squared error and of what the variance of all pixels is made of, as
            ``errors``; and of detail codebooks, if any, as ``detail``.
        """
        made, detail = self.decoder.reconstruct(vectors, images, places, step)
        sums = {"pixels": Stats(self.losses(made, images, step))}
        with torch.no_grad():
            real = images.double() / 255
            errors = {
                "count": torch.full((), len(images), device=images.device),
                "squares": (made.double().clamp(0, 1) - real).square().mean(dim=(1, 2, 3)).sum(),
                "colour": real.mean(dim=(2, 3)).sum(dim=0),
                "power": real.square().mean(dim=(1, 2, 3)).sum(),
            }
        return sums | {"errors": Stats(errors)} | ({"detail": detail} if detail else {})


def error_metrics(errors: Stats) -> dict[str, Tensor]:
    """Return the mean squared error of all pixels, its PSNR in dB, and the variance of the images.

    The variance is the error of one image of the mean colour.
    """
    mse, colour, power = (errors[name] / errors["count"] for name in ("squares", "colour", "power"))
    return {
        "pixels/mse": mse,
        "pixels/psnr": psnr(mse),
        "pixels/variance": power - colour.square().mean(),
    }


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
        self.model, self.pixels = model, Reconstruction(model.image.pixels, losses)
        self.config: PixelTrainingConfig = model.image.config.pixels

    def forward(self, images: Tensor, places: Tensor, step: int, **others: Any) -> tuple[CLIPOutput, dict[str, Stats]]:
        """Run the training path; return its output and the sums of `Reconstruction`, none before the first step.

        Args:
            images: ``(B, 3, H, W)`` uint8.
            places: ``(B,)`` positions of the samples in the global batch.
            step: number of the step, from 0.
            others: further arguments of `CLIP.forward`.
        """
        out: CLIPOutput = self.model(images, **others)
        if step < self.config.start_step:
            return out, {}
        vectors = out.image.vectors
        assert vectors is not None
        vectors = vectors.detach().lerp(vectors, self.config.weight)  # scales the gradient alone
        if self.config.one_in > 1:
            rows = ((places + step) % self.config.one_in == 0).nonzero().squeeze(1)
            vectors, images, places = vectors[rows], images[rows], places[rows]
        return out, self.pixels(vectors, images, places, step)

    def move_to_step(self, step: int) -> bool:
        """Freeze or unfreeze decoder and discriminators as in step number ``step``; return whether any changed."""
        trains = step >= self.config.start_step
        changing = [each for each in self.pixels.decoder.parameters() if each.requires_grad != trains]
        for parameter in changing:
            parameter.requires_grad_(trains)
            parameter.grad = None
        return self.pixels.losses.move_to_step(step if trains else -1) or bool(changing)
