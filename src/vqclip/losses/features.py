"""Base of the contrastive losses; checks and the gathering of features, for all losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import Config
from vqclip.errors import ConfigError, ShapeError
from vqclip.nn.precision import full_precision

Implementation = Literal["tiled", "ring", "gather"]
"""``tiled``: logits in tiles, gradients computed in forward; memory grows with the batch.
``ring``: like ``tiled``, without all texts on every rank, with up to twice the traffic.
``gather``: the readable reference, with all G × G logits on every rank."""

Positives = Literal["sample_id", "caption"]
"""Rule for pairs that are not negatives of each other: the same sample (which a batch contains twice at the border of
two epochs, or when a weight repeats it), or the same text tokens. They are left out of each other's sums, but are not
made positives."""


def check_implementation(name: str) -> None:
    """Check the name of an implementation.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in get_args(Implementation):
        raise ConfigError(f"impl: got {name!r}, expected one of {', '.join(get_args(Implementation))}")


def pair_keys(positives: Positives | None, sample_ids: Tensor, tokens: Tensor) -> Tensor | None:
    """Return ``(B,)`` int64 keys, equal for pairs that are not negatives of each other; None for None.

    Args:
        positives: the rule.
        sample_ids: ``(B,)`` int64.
        tokens: ``(B, N)`` int64, the texts. Their key is a 64-bit polynomial hash: two different texts have equal keys
            with a probability of about 2^-64, and are then not negatives of each other.
    """
    if positives is None:
        return None
    if positives == "sample_id":
        return sample_ids
    powers = torch.full_like(tokens[:1], _MULTIPLIER).cumprod(dim=1)
    return (_mix_bits(tokens + 1) * powers).sum(dim=1)


_MULTIPLIER = 6364136223846793005
"""Multiplier of Knuth's 64-bit linear congruential generator (MMIX)."""


def _mix_bits(x: Tensor) -> Tensor:
    """Spread the bits of small numbers over all 64 bits; products wrap around."""
    x = x * _MULTIPLIER
    return (x ^ (x >> 32)) * _MULTIPLIER


def to_full_precision(image: Tensor, text: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Check both ``(B, E)`` features and return them in fp32 (fp64 for fp64).

    Raises:
        ShapeError: the two shapes differ, or there is not one key for each pair.
    """
    if image.ndim != 2 or image.shape != text.shape:
        raise ShapeError(
            f"features: got image {tuple(image.shape)} and text {tuple(text.shape)}, expected (B, E) for both"
        )
    if keys is not None and (keys.shape != image.shape[:1] or keys.dtype != torch.int64):
        raise ShapeError(
            f"keys: got {tuple(keys.shape)} of {keys.dtype}, expected ({len(image)},) of torch.int64: one for each pair"
        )
    dtype = torch.float64 if torch.float64 in (image.dtype, text.dtype) else torch.float32
    return image.to(dtype), text.to(dtype)


def check_scalars(**numbers: Tensor) -> None:
    """Check that scales and biases are scalars.

    Raises:
        ShapeError: one has dimensions.
    """
    for name, number in numbers.items():
        if number.ndim:
            raise ShapeError(f"{name}: got shape {tuple(number.shape)}, expected (): pass {name}.squeeze()")


def gather_features(image: Tensor, text: Tensor, sizes: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Gather both ``(B, E)`` features of all ranks, ``(G, E)`` each, with their gradients. A collective."""
    image, text = dist.all_gather(torch.stack([image, text], dim=1), sizes).unbind(1)  # one collective for both
    return image, text


class Loss(nn.Module, ABC):
    """Contrastive loss over the global batch.

    Every rank returns the same value; see `vqclip.dist` for the scale of its gradients.

    Args:
        impl: ``tiled``: memory grows with the batch; ``ring``: like ``tiled``, without all texts on every rank;
            ``gather``: the readable reference, which gathers all features with their gradients and computes one
            ``(G, G)`` matrix of logits.
        positives: how the ``keys`` of `forward` are computed; see `vqclip.losses.features.pair_keys`.

    Raises:
        ConfigError: unknown implementation.
    """

    name: str

    def __init__(self, impl: Implementation = "tiled", positives: Positives | None = None):
        super().__init__()
        check_implementation(impl)
        self.impl, self.positives = impl, positives

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        keys: Tensor | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the loss of the global batch. A collective; with ``gather`` its backward is one too.

        Args:
            image: this rank's ``(B, E)`` unit-norm features; B may differ between ranks and be 0.
            text: ``(B, E)``; row i is the text of image i.
            scale: () positive factor of the logits.
            bias: () added to the logits of the sigmoid loss; None for the softmax loss.
            keys: ``(B,)`` int64; the image of one pair and the text of another with an equal key are left out. All
                ranks pass keys, or none.
            sizes: all B in rank order, if the caller knows them: the ranks then need not ask each other. They also do
                not check that their features fit together. All ranks pass them, or none.

        Returns:
            () float32, or float64 for float64 features.

        Raises:
            ShapeError: the features do not pair up, or ``sizes`` do not fit.
            ConfigError: a bias too many or too few, or keys that are missing or do not fit the settings.
        """
        if self.positives is not None and keys is None:
            raise ConfigError(
                f"loss.positives: got {self.positives!r}, but no keys were passed; expected those of pair_keys()"
            )
        self._check(bias, keys)
        image, text = to_full_precision(image, text, keys)
        check_scalars(scale=scale, **({} if bias is None else {"bias": bias}))
        with full_precision(image.device):
            if self.impl != "gather":
                return self._compute_tiled(image, text, scale, bias, keys, sizes)
            images, texts = gather_features(image, text, sizes)
            logits = scale.to(images.dtype) * images @ texts.T
            if keys is None:
                return self._of_logits(logits, bias, None)
            keys = dist.all_gather(keys, sizes)
            return self._of_logits(logits, bias, (keys[:, None] == keys).fill_diagonal_(False))

    @abstractmethod
    def chance(self, batch_size: int) -> float:
        """Return the lowest loss of a global batch with equal logits and without keys."""

    @abstractmethod
    def _check(self, bias: Tensor | None, keys: Tensor | None) -> None:
        """Raise ConfigError for arguments that the loss does not have."""

    @abstractmethod
    def _compute_tiled(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        keys: Tensor | None,
        sizes: Sequence[int] | None,
    ) -> Tensor: ...

    @abstractmethod
    def _of_logits(self, logits: Tensor, bias: Tensor | None, left_out: Tensor | None) -> Tensor:
        """Return the loss of ``(G, G)`` logits without bias, of which some, bool, are not negatives."""


class PairLossConfig(Config):
    """Common keys of the contrastive losses."""

    impl: Implementation = "tiled"
    """Implementation; all give the same result. tiled: memory grows with the batch; ring: like tiled, without all texts
    on every rank; gather: memory grows with the square of the batch."""
    positives: Positives | None = None
    """Pairs of equal samples (sample_id) or equal texts (caption) are not negatives of each other; null: all are."""
    needs_bias: ClassVar[bool] = False
    """Whether the model must have `temperature.bias`."""
