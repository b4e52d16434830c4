"""Use a vqclip model in code that was written for open_clip.

    model, preprocess, tokenizer = load("runs/base", mode="codes_only")

The vqclip embedding cannot be written as an open_clip model. open_clip builds a model from a configuration, in which a
tower ends with a pooling and one projection; what vqclip adds (projection to the quantizer, quantizer, positions,
attention pooling) has no name there, not even with the quantizer bypassed. `load` therefore returns a module with
open_clip's methods around the vqclip model. Towers alone can be written: `vqclip.export.open_clip`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.evaluation.encode import MODES, Mode, id_dtype
from vqclip.model import CLIP
from vqclip.nn.precision import autocast, full_precision
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.tokenizer.encoder import Preprocess
from vqclip.train.ema import Weights
from vqclip.train.export import load_model

if TYPE_CHECKING:
    from vqclip.towers.vocabulary import Vocabulary

Precision = Literal["fp32", "bf16", "fp16"]
"""Autocast type of the towers, as of ``vqclip evaluate``; fp32: no autocast."""


class OpenCLIPModel(NamedTuple):
    """Parts that open_clip's ``create_model_from_pretrained`` and ``get_tokenizer`` return."""

    model: OpenCLIPWrapper
    """Module with ``encode_image`` and ``encode_text``, in evaluation mode."""
    preprocess: Preprocess
    """PIL image → ``(3, H, W)`` float in 0..1."""
    tokenizer: Tokenize
    """Captions → ``(B, N)`` int64."""


def load(
    name: str | Path,
    mode: Mode = "codes_only",
    device: str | torch.device = "cpu",
    precision: Precision = "fp32",
    weights: Weights = "averaged",
) -> OpenCLIPModel:
    """Load a vqclip model as a model with open_clip's methods.

    Args:
        name: folder of a run, a checkpoint or a tokenizer of both modalities, or a hub name ``owner/name``.
        mode: embeddings, as in `vqclip.evaluation`. ``codes_only``: from stored ids alone; ``quantized``: the training
            path; ``continuous``: with the quantizers bypassed.
        device: of the model.
        precision: of the towers, whatever autocast the caller uses.
        weights: of a run or checkpoint with moving averages: averaged ones, or those of its step.

    Raises:
        CheckpointError: there is no model, it is damaged, or it has only one modality.
        ConfigError: unknown mode or precision, or a tokenizer that has no codes for ``codes_only``.
    """
    clip, folder, _ = load_model(str(name), weights)
    try:
        model = OpenCLIPWrapper(clip.to(device), mode, precision)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    return OpenCLIPModel(model.eval(), Preprocess(clip.image.transform), Tokenize(clip.text.preprocess))


class OpenCLIPWrapper(nn.Module):
    """A vqclip model with the methods and attributes of an ``open_clip.CLIP``; arguments as of `load`."""

    def __init__(self, clip: CLIP, mode: Mode = "codes_only", precision: Precision = "fp32"):
        super().__init__()
        require_mode((clip.image, clip.text), mode, precision)
        self.clip, self.mode, self.precision = clip, mode, precision
        self.image_size = clip.image.tower.image_size  # refuses images of any shape
        self.context_length = clip.text.preprocess.context_length
        self.vocab_size = clip.text.preprocess.size

    @property
    def visual(self) -> Visual:
        """Image side: called, it embeds images; it has ``image_size`` and ``output_dim``."""
        return Visual(self)

    @property
    def logit_scale(self) -> Tensor:
        """() logarithm of the scale."""
        return self.clip.logit_scale

    @property
    def logit_bias(self) -> Tensor | None:
        """() bias of the logits, or None."""
        return self.clip.logit_bias

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Embed ``(B, 3, H, W)`` in 0..1, as `Preprocess` makes it, or uint8 → ``(B, E)``.

        Embeddings have unit norm whatever ``normalize`` is.

        Raises:
            ShapeError: another shape, or pixels outside 0..1: the model normalises them itself.
        """
        return embed(self.clip.image, self.clip.image.batch(image), self.mode, self.precision)

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Embed ``(B, N)`` token numbers of `Tokenize` → ``(B, E)``, unit-norm whatever ``normalize`` is."""
        return embed(self.clip.text, self.clip.text.batch(text), self.mode, self.precision)

    def get_logits(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits ``(B, T)`` of images over texts, and their transpose."""
        images, texts = self.encode_image(image), self.encode_text(text)
        with full_precision(images.device):
            logits = self.logit_scale.exp() * images @ texts.T
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        return logits, logits.T

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return the embeddings of images and texts, None for a missing one, the scale, and the bias if any."""
        images = None if image is None else self.encode_image(image)
        texts = None if text is None else self.encode_text(text)
        found = (images, texts, self.logit_scale.exp())
        return found if self.logit_bias is None else (*found, self.logit_bias)


def require_mode(tokenizers: Iterable[ImageTokenizer | TextTokenizer], mode: Mode, precision: Precision) -> None:
    """Raise ConfigError for an unknown mode or precision, or a tokenizer that has no codes for ``codes_only``."""
    if mode not in MODES:
        raise ConfigError(f"mode: got {mode!r}, expected one of {', '.join(MODES)}")
    if precision not in get_args(Precision):
        raise ConfigError(f"precision: got {precision!r}, expected one of {', '.join(get_args(Precision))}")
    if mode == "codes_only":
        for tokenizer in tokenizers:
            tokenizer.require_codes("mode: got 'codes_only', but")


def embed(tokenizer: ImageTokenizer | TextTokenizer, inputs: Tensor, mode: Mode, precision: Precision) -> Tensor:
    """Embed inputs as `tokenizer.batch` makes them → ``(B, E)`` unit-norm."""
    with autocast(tokenizer.device, precision):
        if mode == "continuous":
            return tokenizer.continuous(inputs)
        if mode == "quantized":
            return tokenizer(inputs).embedding
        stored = tokenizer.encode(inputs, precision).to(id_dtype(tokenizer.codebook_sizes))
        return tokenizer.embed(stored, precision)


class Visual(nn.Module):
    """The image side of an `OpenCLIPWrapper`, as ``open_clip.CLIP.visual``.

    Attributes:
        image_size: height and width of images in pixels.
        output_dim: E, width of the embedding.
        image_mean, image_std: None: pixels are in 0..1, and the tower normalises them.
    """

    image_mean = image_std = None

    def __init__(self, model: OpenCLIPWrapper):
        super().__init__()
        self.tokenizer = model.clip.image
        self.image_size = model.image_size
        self.output_dim = self.tokenizer.embed_dim
        self._encode = model.encode_image

    def forward(self, image: Tensor) -> Tensor:
        """Return `OpenCLIPWrapper.encode_image`."""
        return self._encode(image)


class Tokenize:
    """Captions → ``(B, N)`` int64, as open_clip's tokenizers."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.context_length = vocabulary.context_length
        self.vocab_size = vocabulary.size

    def __call__(self, texts: str | Sequence[str], context_length: int | None = None) -> Tensor:
        """Tokenize one caption or several; raise ConfigError for another context length than the model's."""
        if context_length not in (None, self.context_length):
            raise ConfigError(f"context_length: got {context_length}, expected {self.context_length}, the model's")
        return self.vocabulary([texts] if isinstance(texts, str) else texts)
