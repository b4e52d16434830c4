"""Dropout and noise that do not depend on the number of processes and microbatches.

`torch.nn.Dropout` draws from the generator of its process, so a run on two processes differs from one on a single
process. Here a mask is a hash of (run seed, step, layer, place of the sample in the global batch, number of the
feature): the same wherever and however often the sample is computed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vqclip.errors import ShapeError
from vqclip.seeds import derive_seed

_BITS = 0xFFFFFFFF


class KeyedDropout(nn.Module):
    """Set features to 0 at random in training, and divide the others by ``1 - p``.

    Until `set_dropout_keys` was called, for example in a training loop of your own, the masks are those of
    `torch.nn.Dropout`, from torch's global generator.

    Args:
        p: probability that a feature is set to 0, 0 to below 1.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.keys: Tensor | None = None
        """``(B,)`` int64, 0 to 2^32 - 1: keys of the samples of the next forward."""

    def forward(self, x: Tensor) -> Tensor:
        """``(B, ...)`` → ``(B, ...)``."""
        if not self.training or self.p == 0:
            return x
        if self.keys is None:
            return F.dropout(x, self.p)
        shape = x.shape[1:]
        features = torch.arange(shape.numel(), device=x.device).view(shape)
        drawn = hash32(hash32(features) ^ self.keys.view(-1, *[1] * len(shape)))
        return torch.where(drawn < round(self.p * 2**32), 0, x / (1 - self.p))

    def extra_repr(self) -> str:
        """Return the probability."""
        return f"p={self.p}"


class GaussianNoise(nn.Module):
    """Normal random numbers for the features of each sample, in training and where `set_dropout_keys` has set keys.

    Args:
        std: standard deviation.
    """

    def __init__(self, std: float):
        super().__init__()
        self.std = std
        self.keys: Tensor | None = None
        """``(B,)`` int64, as of `KeyedDropout`."""

    def forward(self, x: Tensor) -> Tensor | None:
        """``(B N, ...)``, N tokens of each sample → noise of this shape, the same for any padding; None without keys.

        By the method of Box and Muller from two hashed numbers for each feature.

        Raises:
            ShapeError: the number of rows is not a multiple of B.
        """
        if not self.training or self.keys is None or not len(x):
            return None
        if not len(self.keys) or len(x) % len(self.keys):
            raise ShapeError(
                f"GaussianNoise: got {len(x)} rows with the keys of {len(self.keys)} samples, expected the same number "
                "of tokens for each; call set_dropout_keys with the places of the samples of this forward"
            )
        features = torch.arange(2 * x.numel() // len(self.keys), device=x.device)
        drawn = (hash32(hash32(features) ^ self.keys[:, None]).to(x.dtype) + 0.5) / 2**32
        length, turn = drawn.view(len(self.keys), -1, 2).unbind(-1)
        return (self.std * (-2 * length.log()).sqrt() * (2 * math.pi * turn).cos()).view_as(x)


class PatchDropout(KeyedDropout):
    """Leave out some patches of each sample between the embedding of the patches and the blocks of a ViT.

    The number of patches that stay is the same for all samples (Liu et al. 2023, https://arxiv.org/abs/2208.07220).
    Patches are only left out in training and where `set_dropout_keys` has set keys.

    Args:
        p: share of the patches that is left out, 0 to below 1; at least one stays.
        patches: N, patches of an image.
        prefix: further tokens before them, which stay.
    """

    def __init__(self, p: float, patches: int, prefix: int):
        super().__init__(p)
        self.patches, self.prefix = patches, prefix

    def choose_patches(self) -> Tensor | None:
        """Return the numbers of the patches that stay, ``(B, M)`` int64, ascending; None: all."""
        if not self.training or self.keys is None:
            return None
        numbers = torch.arange(self.patches, device=self.keys.device)
        drawn = hash32(hash32(numbers) ^ self.keys[:, None])
        stay = max(1, self.patches - round(self.p * self.patches))
        return drawn.argsort(dim=1, stable=True)[:, :stay].sort(dim=1).values

    def mask(self) -> Tensor | None:
        """Return ``(B, N)`` bool, True at the patches that stay; None: all."""
        kept = self.choose_patches()
        return (
            None if kept is None else kept.new_zeros(len(kept), self.patches, dtype=torch.bool).scatter(1, kept, True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(B, prefix + N, D)`` → ``(B, prefix + M, D)``."""
        kept = self.choose_patches()
        if kept is None or len(kept) != len(x):  # a tower runs one image in place of none
            return x
        patches = x[:, self.prefix :].gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[2]))
        return torch.cat([x[:, : self.prefix], patches], dim=1)

    def restore(self, x: Tensor) -> Tensor:
        """``(B, M, D)`` → ``(B, N, D)``, 0 at the patches that were left out."""
        kept = self.choose_patches()
        if kept is None or len(kept) != len(x):
            return x
        return x.new_zeros(len(x), self.patches, x.shape[2]).scatter(1, kept.unsqueeze(-1).expand_as(x), x)


class DropoutLinear(nn.Linear):
    """Linear layer behind a `KeyedDropout`.

    Args:
        before: width of the input.
        after: width of the output.
        p: probability that a feature of the input is set to 0 in training.
    """

    def __init__(self, before: int, after: int, p: float):
        super().__init__(before, after)
        self.dropout = KeyedDropout(p)

    def forward(self, input: Tensor) -> Tensor:
        """``(B, ..., before)`` → ``(B, ..., after)``."""
        return super().forward(self.dropout(input))


def hash32(x: Tensor) -> Tensor:
    """Map int64 from 0 to 2^32 - 1 to pseudo-random numbers of this range, one to one.

    The constants are those of `hash-prospector <https://github.com/skeeto/hash-prospector>`_ (Wellons and others, 2018)
    whose products fit int64, so that nothing overflows on any device.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _BITS
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _BITS
    return x ^ (x >> 15)


def set_dropout_keys(model: nn.Module, seed: int, step: int, places: Tensor | None) -> None:
    """Set the masks and noise of the next forward of `KeyedDropout` and `GaussianNoise`, and of its recomputation.

    Args:
        model: whose names of modules are keys, the same on every process.
        seed: run seed.
        step: number of the step.
        places: ``(B,)`` int64, places of the samples in the global batch, on the device of the features; None: masks
            are drawn from torch's generator again, and there is no noise.
    """
    for name, module in model.named_modules():
        if isinstance(module, GaussianNoise) or (isinstance(module, KeyedDropout) and module.p > 0):
            layer = derive_seed(seed, "dropout", name, step) & _BITS
            module.keys = None if places is None else hash32(hash32(places) ^ layer)
