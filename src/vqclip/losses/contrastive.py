"""Losses on the similarities of images and texts: their contract, their configuration, and a readable reference.

Each loss has two computations of the same number: the reference with all G × G logits, in ``_of_logits`` of its class
(``impl: gather``), and the one without them, in `vqclip.losses.tiled`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import FREE, Config
from vqclip.errors import ConfigError, ShapeError
from vqclip.losses.tiled import gather_keys, tiled_loss
from vqclip.nn.precision import full_precision

Implementation = Literal["tiled", "ring", "gather"]
"""``tiled``: logits in tiles, gradients computed in forward; memory grows with the batch.
``ring``: like ``tiled``, without all texts on every rank, with up to twice the traffic.
``gather``: the readable reference, which gathers all features with their gradients: all G × G logits on every rank."""

Positives = Literal["sample_id", "caption"]
"""Rule for pairs that are not negatives of each other: the same sample (which a batch contains twice if it has more
samples of a source than the source has, or as a substitute for a bad one), or the same text tokens. They are left out
of each other's sums, but are not made positives."""


class Loss(nn.Module, ABC):
    """Contrastive loss over the global batch.

    Every rank returns the same value; see `vqclip.dist` for the scale of its gradients.

    Args:
        impl: see `Implementation`.
        positives: how the ``keys`` of `forward` are computed; see `pair_keys`.

    Raises:
        ConfigError: unknown implementation or rule for positives.
    """

    name: str
    needs_bias = False
    label_smoothing = 0.0

    def __init__(self, impl: Implementation = "tiled", positives: Positives | None = None):
        super().__init__()
        _check_implementation(impl)
        _check_positives(positives)
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
        if self.needs_bias and bias is None:
            raise ConfigError("the sigmoid loss needs a bias; set model.temperature.bias (SigLIP starts at -10)")
        if not self.needs_bias and bias is not None:  # a softmax does not change with a constant
            raise ConfigError(
                "the softmax loss takes no bias; set model.temperature.bias to null, or loss.kind to sigmoid"
            )
        image, text = _to_full_precision(image, text)
        if keys is not None and (keys.shape != image.shape[:1] or keys.dtype != torch.int64):
            raise ShapeError(
                f"keys: got {tuple(keys.shape)} of {keys.dtype}, expected ({len(image)},) of torch.int64: one for each "
                "pair"
            )
        _check_scalars(scale=scale, **({} if bias is None else {"bias": bias}))
        with full_precision(image.device):
            if self.impl != "gather":
                loss = tiled_loss(self.name, self.impl, image, text, scale, bias, keys, sizes=sizes)
                if not self.label_smoothing:
                    return loss
                return loss + self.label_smoothing * _smoothing_term(image, text, scale)
            images, texts = _gather_features(image, text, sizes)
            logits = scale.to(images.dtype) * images @ texts.T
            keys = None if keys is None else gather_keys(keys, sizes)
            left_out = None if keys is None else (keys[:, None] == keys).fill_diagonal_(False)
            return self._of_logits(logits, bias, left_out)

    @abstractmethod
    def chance(self, batch_size: int) -> float:
        """Return the lowest loss of a global batch with equal logits and without keys."""

    def lowest(self, batch_size: int) -> float:
        """Return the lowest loss of a global batch without keys: the entropy of the smoothed targets."""
        other = self.label_smoothing / batch_size
        shares = [1 - (batch_size - 1) * other, *[other] * (batch_size - 1)]
        return sum(share * math.log(1 / share) for share in shares if share)

    @abstractmethod
    def _of_logits(self, logits: Tensor, bias: Tensor | None, left_out: Tensor | None) -> Tensor:
        """Return the loss of ``(G, G)`` logits without bias, of which some, bool, are not negatives."""


class ContrastiveLoss(Loss):
    """Symmetric cross-entropy of every image over all texts and of every text over all images: their mean.

    The softmax loss of CLIP (Radford et al. 2021).

    Args:
        impl: see `Loss`.
        label_smoothing: ε, 0 to 1: the target is 1 - ε for the partner, plus ε / G for each of the G, also for those
            that ``positives`` leaves out of the sums (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567).
        positives: see `Loss`.

    Raises:
        ConfigError: unknown implementation, or a smoothing below 0 or above 1.
    """

    name = "contrastive"

    def __init__(
        self, impl: Implementation = "tiled", label_smoothing: float = 0.0, positives: Positives | None = None
    ):
        super().__init__(impl, positives)
        if not 0 <= label_smoothing <= 1:
            raise ConfigError(f"label_smoothing: got {label_smoothing}, expected a number from 0 to 1")
        self.label_smoothing = label_smoothing

    def chance(self, batch_size: int) -> float:
        """Return the loss of a global batch with equal logits and without keys: ``log G``."""
        return math.log(batch_size)

    def _of_logits(self, logits: Tensor, bias: Tensor | None, left_out: Tensor | None) -> Tensor:
        negatives = logits if left_out is None else logits.masked_fill(left_out, -torch.inf)
        targets = torch.arange(len(logits), device=logits.device)
        by_row, by_column = (F.cross_entropy(scores, targets) for scores in (negatives, negatives.T))
        return (by_row + by_column) / 2 + self.label_smoothing * (logits.diagonal().mean() - logits.mean())


def _smoothing_term(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Return the mean logit of pairs minus the mean of all logits, which ε scales, without the (G, G) matrix."""
    count = image.new_full((1,), len(image))
    sums = torch.cat((image.sum(dim=0), text.sum(dim=0), (image * text).sum().view(1), count))
    images, texts, pairs, count = dist.replicated_sum(sums).split((*2 * [image.shape[1]], 1, 1))
    return scale.to(image.dtype) * (pairs / count - (images @ texts) / count.square()).squeeze()


class SigmoidLoss(Loss):
    """Binary cross-entropy of every image with every text: do they belong together?

    The loss of SigLIP (Zhai et al. 2023): the sum over all G² pairs of the global batch, divided by G. SigLIP's bias
    starts at -10. Arguments: see `Loss`.
    """

    name = "sigmoid"
    needs_bias = True

    def chance(self, batch_size: int) -> float:
        """Return the lowest loss of a global batch with equal logits and without keys."""
        return math.log(batch_size) - (batch_size - 1) * math.log1p(-1 / batch_size)

    def _of_logits(self, logits: Tensor, bias: Tensor | None, left_out: Tensor | None) -> Tensor:
        assert bias is not None
        answers = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
        losses = -F.logsigmoid(answers * (logits + bias.to(logits.dtype)))
        return (losses if left_out is None else losses.masked_fill(left_out, 0)).sum() / len(logits)


class DistillationLoss(nn.Module):
    """Cross-entropy of the student's softmax against the teacher's, over rows and columns.

    A separate term, to be added to a contrastive loss: the distillation part of open_clip's ``DistillClipLoss``, over
    the global batch (CLIP-KD: Yang et al. 2024, https://arxiv.org/abs/2307.12732). Every rank returns the same value.

    Args:
        impl: see `Loss`.

    Raises:
        ConfigError: unknown implementation.
    """

    def __init__(self, impl: Implementation = "tiled"):
        super().__init__()
        _check_implementation(impl)
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
            sizes: see `Loss.forward`.

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
        image, text = _to_full_precision(image, text)
        _check_scalars(scale=scale, teacher_scale=teacher_scale)
        teacher = [*_to_full_precision(teacher_image.detach(), teacher_text.detach()), teacher_scale.detach()]
        teacher = [each.to(image.dtype) for each in teacher]
        with full_precision(image.device):
            if self.impl != "gather":
                return tiled_loss("distillation", self.impl, image, text, scale, teacher=teacher, sizes=sizes)
            images, texts = _gather_features(image, text, sizes)
            teacher_images, teacher_texts = _gather_features(teacher[0], teacher[1], sizes)
            logits, wanted = scale.to(images.dtype) * images @ texts.T, teacher[2] * teacher_images @ teacher_texts.T
            by_column, by_row = (-(wanted.softmax(dim) * logits.log_softmax(dim)).sum() for dim in (0, 1))
            return (by_column + by_row) / (2 * len(logits))


def _check_implementation(name: str) -> None:
    if name not in get_args(Implementation):
        raise ConfigError(f"impl: got {name!r}, expected one of {', '.join(get_args(Implementation))}")


def _check_positives(rule: Positives | None) -> None:
    if rule is not None and rule not in get_args(Positives):
        raise ConfigError(f"positives: got {rule!r}, expected one of {', '.join(get_args(Positives))}, or None")


def _to_full_precision(image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Check both ``(B, E)`` features and return them in fp32 (fp64 for fp64)."""
    if image.ndim != 2 or image.shape != text.shape:
        raise ShapeError(
            f"features: got image {tuple(image.shape)} and text {tuple(text.shape)}, expected (B, E) for both"
        )
    dtype = torch.float64 if torch.float64 in (image.dtype, text.dtype) else torch.float32
    return image.to(dtype), text.to(dtype)


def _check_scalars(**numbers: Tensor) -> None:
    for name, number in numbers.items():
        if number.ndim:
            raise ShapeError(f"{name}: got shape {tuple(number.shape)}, expected (): pass {name}.squeeze()")


def _gather_features(image: Tensor, text: Tensor, sizes: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """Gather both ``(B, E)`` features of all ranks, ``(G, E)`` each, with their gradients. A collective."""
    image, text = dist.all_gather(torch.stack([image, text], dim=1), sizes).unbind(1)  # one collective for both
    return image, text


def pair_keys(positives: Positives | None, sample_ids: Tensor, tokens: Tensor) -> Tensor | None:
    """Return ``(B,)`` int64 keys, equal for pairs that are not negatives of each other; None for None.

    Args:
        positives: the rule.
        sample_ids: ``(B,)`` int64.
        tokens: ``(B, N)`` int64, the texts. Their key is a 64-bit polynomial hash: two different texts have equal keys
            with a probability of about 2^-64, and are then not negatives of each other.

    Raises:
        ConfigError: unknown rule.
    """
    _check_positives(positives)
    if positives is None:
        return None
    if positives == "sample_id":
        return sample_ids
    multiplier = 6364136223846793005  # of Knuth's 64-bit linear congruential generator (MMIX); products wrap around
    bits = (tokens + 1) * multiplier
    bits = (bits ^ (bits >> 32)) * multiplier  # spreads the bits of small numbers over all 64
    powers = torch.full_like(tokens[:1], multiplier).cumprod(dim=1)
    return (bits * powers).sum(dim=1)


def weighted_total(terms: Mapping[str, Tensor], weights: Mapping[str, float | Tensor]) -> Tensor:
    """Return Σ weight × term, of all terms of the training loss.

    Args:
        terms: name → () unweighted loss over the global batch.
        weights: name → weight; the same names as ``terms``.

    Returns:
        () in the widest dtype of the terms. A term is left out, with its gradient, if its weight is the number 0; a
        weight on a device is not read.
    """
    assert terms.keys() == weights.keys(), f"terms {set(terms)} and weights {set(weights)}"
    present = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor) or weight != 0}
    return torch.stack([present[name] * term for name, term in terms.items() if name in present]).sum()


class _PairLossConfig(Config):
    impl: Annotated[Implementation, FREE] = "tiled"
    """Implementation; all give the same result. tiled: memory grows with the batch; ring: like tiled, without all texts
    on every rank; gather: memory grows with the square of the batch."""
    positives: Positives | None = "sample_id"
    """Pairs of equal samples (sample_id) or equal texts (caption) are not negatives of each other; null: all are."""
    needs_bias: ClassVar[bool] = False
    """Whether the model must have `temperature.bias`."""


class ContrastiveConfig(_PairLossConfig):
    """CLIP's softmax loss."""

    kind: Literal["contrastive"] = "contrastive"
    """The softmax loss."""
    label_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of the target that is spread evenly over all texts (images) of the global batch."""

    def build(self) -> ContrastiveLoss:
        """Make the loss."""
        return ContrastiveLoss(self.impl, self.label_smoothing, self.positives)


class SigmoidConfig(_PairLossConfig):
    """SigLIP's sigmoid loss."""

    kind: Literal["sigmoid"] = "sigmoid"
    """The sigmoid loss."""
    needs_bias: ClassVar[bool] = True

    def build(self) -> SigmoidLoss:
        """Make the loss."""
        return SigmoidLoss(self.impl, self.positives)


LossConfig = Annotated[ContrastiveConfig | SigmoidConfig, Field(discriminator="kind")]
"""Configuration of any contrastive loss, chosen by ``kind``."""
