"""Image and text tokenizers: a tower, and everything after it, which `vqclip.tokenizer.decoder` begins.

images or captions → preprocess → tower → (reduce) → project_in → normalize → quantizer → ids
└→ project_out → pool → embedding
"""

from __future__ import annotations

import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor, nn
from typing_extensions import Self

from vqclip.config import Modality
from vqclip.data.decode import pil_to_uint8
from vqclip.data.transforms import EvalTransform, EvalTransformConfig
from vqclip.errors import ShapeError, VqclipError
from vqclip.nn.inputs import require_image, require_images
from vqclip.nn.layers import (
    LinearProjectionConfig,
    Normalization,
    Projection,
    ProjectionConfig,
    Reduction,
    ReductionConfig,
    isometric_,
    normalize_channels,
)
from vqclip.nn.precision import Precision, autocast
from vqclip.pixels.decoder import attach
from vqclip.pixels.losses import PixelTrainingConfig
from vqclip.quantizers import Stats
from vqclip.quantizers.vectors import check_channels
from vqclip.tokenizer.decoder import DecoderConfig, TokenizerDecoder
from vqclip.tokenizer.saving import save_and_push, save_folder
from vqclip.tokenizer.stored import merged_state
from vqclip.towers import ImageTower, ImageTowerConfig, TextTower, TextTowerConfig
from vqclip.towers.base import frozen_features
from vqclip.towers.naflex import NaFlexTower

if TYPE_CHECKING:
    from PIL.Image import Image

_LATER = {"package": None, "pos_embed": "learned", "norm_layer": "layernorm", "mlp_layer": "mlp", "qk_norm": False}
"""Settings of towers that came later, and their defaults, with which a tower is as before."""


class TokenizerOutput(NamedTuple):
    """Output of a tokenizer in training."""

    embedding: Tensor
    """``(B, E)`` unit-norm, through the quantizer, gradients straight-through."""
    ids: Tensor
    """``(B, N, C)`` int64, -1 at padding."""
    stats: Stats
    """This rank's sums for the quantizer's losses and metrics."""
    vectors: Tensor | None = None
    """``(B, N, quantizer.dim)`` vectors of the codes that pixels come from, with straight-through gradients; None where
    outputs were joined."""


class Tokenizer(TokenizerDecoder, ABC):
    """Base of image and text tokenizers: a tower, and everything after it.

    Args:
        config: configuration of everything after the tower.
        tower: `ImageTower` or `TextTower`.
        embed_dim: E, width of the joint embedding.
        fewest_tokens: smallest number of the tower's tokens in a batch.
    """

    modality: Modality
    tower: ImageTower | TextTower
    reduce: Reduction | None
    project_in: Projection
    code_share: Tensor | None
    """() share of the quantized vectors in what is embedded in training mode, the rest being continuous; None: all."""

    def __init__(self, config: TokenizerConfig, tower: ImageTower | TextTower, embed_dim: int, fewest_tokens: int):
        quantizer = config.quantizer.build()
        if config.normalize != "none":
            least = 3 if config.normalize == "layer" else 2  # subtracting the mean costs one more
            check_channels(f"{self.modality}.normalize {config.normalize}", quantizer.dim, least)
        into = config.project_in.layers(tower.width, quantizer.dim)
        project_in = Projection(nn.LayerNorm(tower.width), *into)
        reduction = None if config.reduce is None else config.reduce.build(tower.width)
        num_tokens = tower.num_tokens
        if reduction is not None:
            num_tokens = fewest_tokens = reduction.num_tokens
        project_out, pool = config.build_output(quantizer, num_tokens, embed_dim)
        before: dict[str, nn.Module] = {"reduce": reduction} if reduction is not None else {}
        before["project_in"] = project_in
        for part in (*before.values(), project_out, pool):
            isometric_(part)
        super().__init__(self.modality, quantizer, project_out, pool, fewest_tokens, {"tower": tower, **before})
        if reduction is None:
            self.reduce = None
        # Never while a tower waits for its first step: features of one run must not change their shape.
        fixed = reduction is not None and not any(True for _ in reduction.parameters())
        self.reduces_early = fixed and config.tower.train == "none"
        """True if `tower_features` are reduced: of a tower that never trains, by a reduction without weights."""
        self.config = config
        self.normalize = config.normalize
        self.register_buffer("code_share", None, persistent=False)

    @abstractmethod
    def mask(self, inputs: Tensor) -> Tensor | None:
        """Return ``(B, N)`` bool, True at real tokens, or None if every token is real."""

    def forward(self, inputs: Tensor, tower_features: Tensor | None = None) -> TokenizerOutput:
        """Run the training path on a batch from `preprocess`: embedding, ids, statistics. Contains no collective.

        With ``tower_features`` ``(B, N, D)``, from the method of this name, the tower is not run.
        """
        return self._quantize(*self.features(inputs, tower_features))

    def features(self, inputs: Tensor, tower_features: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the quantizer's input ``(B, N, quantizer.dim)`` and its `mask`; arguments as of `forward`."""
        mask, x = self.mask(inputs), self.tower(inputs) if tower_features is None else tower_features
        if self.reduce is not None:
            x = x if self.reduces_early and tower_features is not None else self.reduce(x, mask)
            # All of them are real. Text keeps a mask, as `ids_mask` gives one, so that sums are the same.
            mask = mask.new_ones(x.shape[:2]) if mask is not None and self.modality == "text" else None
        return normalize_channels(self.project_in(x, mask), self.normalize), mask

    def tower_features(self, inputs: Tensor) -> Tensor:
        """Return the tower's features ``(B, N, D)`` for a batch from `preprocess`, as a training step computes them.

        A frozen tower runs without gradient, in evaluation mode and in chunks of one shape, so that the features of a
        sample do not depend on its batch; see `frozen_features`. Outside of training no such chunks are needed:
        `features` runs any tower on the batch as it is, with a gradient for pixels that require one. If the tower never
        trains and `reduce` has no weights, the features are reduced already: ``(B, M, D)``.
        """
        if not self.tower.is_frozen:
            return self.tower(inputs)
        reduction = self.reduce if self.reduces_early else None
        reduce = None if reduction is None else lambda features, rows: reduction(features, self.mask(rows))
        return frozen_features(self.tower, inputs, reduce)

    def continuous(self, inputs: Tensor) -> Tensor:
        """Return the embedding ``(B, E)`` with the quantizer bypassed, to measure the cost of quantization."""
        return self._continuous(*self.features(inputs))

    def with_continuous(self, inputs: Tensor) -> tuple[TokenizerOutput, Tensor]:
        """Return `forward` and `continuous` from one pass of the tower."""
        features, mask = self.features(inputs)
        return self._quantize(features, mask), self._continuous(features, mask)

    def _quantize(self, features: Tensor, mask: Tensor | None) -> TokenizerOutput:
        out = self.quantizer(features, mask)
        vectors = out.vectors
        if self.training and self.code_share is not None:
            continuous = self.quantizer.continuous(features, mask)
            vectors = continuous.lerp(vectors, self.code_share.to(vectors.dtype))
        stages = None if self.pixels is None else self.pixels.stages
        read = out.vectors if stages is None else self.quantizer.first_stages(features, stages, mask)
        return TokenizerOutput(self._embed(vectors, mask), out.ids, out.stats, read)

    def _continuous(self, features: Tensor, mask: Tensor | None) -> Tensor:
        return self._embed(self.quantizer.continuous(features, mask), mask)

    @torch.no_grad()
    def _encode(self, inputs: Tensor, precision: Precision) -> Tensor:
        with autocast(self.device, precision):
            ids = self.quantizer.encode(*self.features(inputs))
        return ids.contiguous()  # safetensors stores only contiguous tensors

    def save_pretrained(self, folder: str | Path) -> None:
        """Write this tokenizer to a folder that `vqclip.load_tokenizer` reads.

        An existing tokenizer is replaced atomically, together with its card.

        Raises:
            ConfigError: a tokenizer of the other modality, another model, or other files would be lost.
        """
        state = {f"{self.modality}.{key}": value for key, value in merged_state(self).items()}
        save_folder(folder, {self.modality: self.section()} | self.pixels_section(), state, self.files())

    def push_to_hub(
        self, name: str, card: str | None = None, *, private: bool | None = None, revision: str | None = None
    ) -> str:
        """Save this tokenizer, push it to the hub, and return the commit's address.

        ``card`` is Markdown; None for a card without figures. For the other arguments, and for a run's own card, see
        `push_folder`.
        """
        return save_and_push(self.save_pretrained, name, card, private=private, revision=revision)

    def section(self) -> dict[str, object]:
        """Return this tokenizer's section of ``config.json``."""
        tokens = {"num_tokens": self.num_tokens, "fewest_tokens": self.fewest_tokens}
        section = self.config.architecture().model_dump(mode="json", exclude={"pixels"})
        del section["tower"]["train"]  # how it was trained is no part of a tokenizer
        for projection, name in itertools.product(("project_in", "project_out"), ("dropout", "input_dropout")):
            section[projection].pop(name, None)
        # As in the folders and fingerprints from before these settings.
        if self.config.reduce is None:
            del section["reduce"]
        for name, default in _LATER.items():
            if section["tower"].get(name, "") == default:
                del section["tower"][name]
        return section | tokens | {"embed_dim": self.embed_dim}


class TokenizerConfig(DecoderConfig):
    """Common keys of both modalities; each adds its ``tower``."""

    if TYPE_CHECKING:
        tower: Any
    reduce: ReductionConfig | None = None
    """Reduction of the tower's tokens to fewer ones; null keeps them all."""
    project_in: ProjectionConfig = LinearProjectionConfig()
    """From the (reduced) features to the quantizer's channels."""
    normalize: Normalization = "none"
    """Normalisation of those channels before quantization: layer (mean 0, variance 1), l2 (length √D), linf (largest
    magnitude 2), none."""

    def with_tower(self, tower: Any) -> Self:
        """Return a copy with other settings of the tower."""
        return self.model_copy(update={"tower": tower})

    def architecture(self) -> Self:
        """Return a copy whose tower is not frozen and has random weights, so that building it fetches none."""
        return self.with_tower(self.tower.architecture())


class Preprocess:
    """PIL image → ``(3, H, W)``, or patches of any shape, without a model, so that little is pickled for a worker.

    Args:
        transform: transform of evaluation.
        dtype: float32 for 0..1, as open_clip's callers expect; uint8 for 0..255.
    """

    def __init__(self, transform: EvalTransform, dtype: torch.dtype = torch.float32):
        self.transform, self.dtype = transform, dtype

    def __call__(self, image: Image) -> Tensor:
        """Prepare one image of any mode and size.

        Raises:
            ShapeError: not a PIL image.
        """
        require_image(image)
        pixels = self.transform(pil_to_uint8(image))
        return pixels if self.dtype == torch.uint8 else pixels.to(self.dtype).div_(255)


class ImageTokenizer(Tokenizer):
    """Images → ids → vectors and embeddings. Built by `ImageTokenizerConfig.build`.

    Attributes:
        config: its configuration.
        preprocess: one PIL image → ``(3, H, W)`` uint8, as in evaluation: composited on white, resized, cropped; for a
            tower that takes images of any shape, its patches (`vqclip.nn.shapes.PatchBudget`).
    """

    modality: Modality = "image"
    config: ImageTokenizerConfig
    tower: ImageTower

    def __init__(self, config: ImageTokenizerConfig, embed_dim: int):
        config = config.with_tower(config.tower.resolve())
        tower = config.tower.build()
        super().__init__(config, tower, embed_dim, tower.fewest_tokens)
        self.transform = config.preprocess.build(self.tower.size)
        self.preprocess = Preprocess(self.transform, torch.uint8)

    def mask(self, inputs: Tensor) -> Tensor | None:
        """Return None: every patch is real; otherwise ``(B, N)`` bool, as of images of any shape."""
        return self.tower.mask(inputs)

    def encode(self, images: Tensor | Image | Sequence[Image], precision: Precision = "fp32") -> Tensor:
        """Encode images to ids ``(B, N, C)`` int64; where images have any shape, -1 as of `shapes`.

        Args:
            images: ``(B, 3, H, W)`` uint8 (0..255) or float (0..1) at the tower's size, one PIL image, or several; a
                tower that takes images of any shape has ``(B, T, 3 P² + 2)`` uint8, from `preprocess`, in place of it.
            precision: of the tower, whatever autocast the caller uses; see `embed`.

        Raises:
            ShapeError: for a tensor of another shape, dtype or range (which is not checked under `torch.compile`).
        """
        return self._encode(self.batch(images), precision)

    def encode_pixels(self, images: Tensor | Image | Sequence[Image]) -> Tensor:
        """Encode images, given as to `encode`, to all ids that `decode_pixels` can use: ``(B, N, C + Cd)`` int64.

        The first C are those of `encode`, bit for bit; the Cd detail ids follow, stage after stage, if the pixel
        decoder has detail codebooks.
        """
        inputs = self.batch(images)
        ids = self._encode(inputs, "fp32")
        if self.pixels is None or self.pixels.detail is None:
            return ids
        return torch.cat((ids, self.pixels.detail.encode(inputs)), dim=-1)

    def encode_detail(self, images: Tensor | Image | Sequence[Image]) -> Tensor:
        """Encode images to the detail ids alone: ``(B, N, Cd)`` int64; raise VqclipError if there are none."""
        if self.pixels is None or self.pixels.detail is None:
            raise VqclipError("this image tokenizer has no detail codebooks; expected a pixel decoder with `detail`")
        return self.pixels.detail.encode(self.batch(images))

    def batch(self, images: Tensor | Image | Sequence[Image]) -> Tensor:
        """Turn the input of `encode` into that of `features`: a tensor, checked, on the tokenizer's device."""
        if not isinstance(images, Tensor):
            pixels = [self.preprocess(image) for image in require_images(images)]
            images = torch.stack(pixels) if pixels else self.tower.example()[:0].byte()
        elif isinstance(self.tower, NaFlexTower):
            images = images.to(self.device)
            if not torch.compiler.is_compiling():
                self.tower.require_places(images)
        elif (
            images.is_floating_point()
            and not torch.compiler.is_compiling()
            and not bool(((images >= 0) & (images <= 1)).all())  # false for NaN, too
        ):
            raise ShapeError(
                f"images: got floating point from {float(images.min()):g} to {float(images.max()):g}, expected 0 to 1: "
                "neither 0..255 (for which there is uint8) nor normalised, which the tower does; resizing may "
                "overshoot: clamp(0, 1)"
            )
        return images.to(self.device)


class ImageTokenizerConfig(TokenizerConfig):
    """An image tokenizer."""

    tower: ImageTowerConfig
    """From pixels to patch features."""
    preprocess: EvalTransformConfig = EvalTransformConfig()
    """Resizing and cropping to the tower's size, outside training."""
    pixels: PixelTrainingConfig | None = None
    """Pixel decoder that trains together with the tokenizer; null: none."""

    @model_validator(mode="after")
    def _pixels_have_a_grid(self) -> ImageTokenizerConfig:
        if self.pixels is not None and self.tower.kind == "naflex":
            raise ValueError(
                "got pixels with tower.kind naflex, whose images have any shape; expected a tower with an image_size, "
                "or pixels: null"
            )
        return self

    @torch.inference_mode(False)  # so that it can be used outside of inference mode
    def build(self, embed_dim: int) -> ImageTokenizer:
        """Make the tokenizer with a joint embedding of ``embed_dim``."""
        tokenizer = ImageTokenizer(self, embed_dim)
        if self.pixels is not None:
            sizes = tokenizer.quantizer.dim, tokenizer.num_tokens, tokenizer.tower.image_size
            attach(tokenizer, self.pixels.build(*sizes))
        return tokenizer


class TextTokenizer(Tokenizer):
    """Captions → ids → vectors and embeddings. Built by `TextTokenizerConfig.build`.

    Attributes:
        config: its configuration.
        preprocess: captions → token numbers ``(B, N)`` int64 of the tower's `Vocabulary`, padded; longer captions are
            cut. `preprocess.with_lengths` also returns their lengths before the cut.
    """

    modality: Modality = "text"
    tower: TextTower

    def __init__(self, config: TextTokenizerConfig, embed_dim: int):
        config = config.with_tower(config.tower.resolve())
        tower = config.tower.build()
        super().__init__(config, tower, embed_dim, fewest_tokens=tower.num_tokens if tower.sees_padding else 1)
        self.preprocess = tower.vocabulary

    def files(self) -> dict[str, bytes]:
        """Return the vocabulary's files by their names, for the tokenizer folder."""
        return dict(self.preprocess.files())

    def mask(self, inputs: Tensor) -> Tensor:
        """Return ``(B, N)`` bool, True at real tokens."""
        return self.tower.mask(inputs)

    def needed_tokens(self, tokens: Tensor) -> int:
        """Return how many columns of ``(B, N)`` token numbers contain tokens of a caption; the others only cost time.

        A multiple of 8, so that kernels and compiled graphs see few shapes; N if the tower sees the padding. Reads the
        values: call it before they are moved to another device.
        """
        if self.tower.sees_padding:
            return self.tower.num_tokens
        longest = int(self.mask(tokens).any(dim=0).sum())
        return min(self.tower.num_tokens, 8 * max(1, math.ceil(longest / 8)))

    def encode(self, captions: Sequence[str] | Tensor, precision: Precision = "fp32") -> Tensor:
        """Encode captions (``list[str]``, or token numbers ``(B, N)``) to ids ``(B, N, C)`` int64, -1 at padding.

        ``precision`` is that of the tower; see `embed`.

        Raises:
            ShapeError: for anything else; for token numbers outside the vocabulary and rows without an end mark, which
                `preprocess` never makes (the last two are not checked under `torch.compile`).
        """
        return self._encode(self.batch(captions), precision)

    def batch(self, captions: Sequence[str] | Tensor) -> Tensor:
        """Turn the input of `encode` into that of `features`: token numbers, checked, on the tokenizer's device."""
        if isinstance(captions, Tensor):
            tokens = captions
            if not torch.compiler.is_compiling():
                self.tower.require_captions(tokens)
        else:
            tokens, lengths = self.preprocess.with_lengths(captions)
            if max(lengths, default=0) > self.tower.num_tokens:  # always the same text, so that Python warns once
                warnings.warn(
                    f"captions longer than {self.tower.num_tokens} tokens, the text tower's context_length, are cut; "
                    "tokenizer.preprocess.with_lengths(captions) returns their lengths",
                    stacklevel=3,
                )
        return tokens.to(self.device)


class TextTokenizerConfig(TokenizerConfig):
    """A text tokenizer."""

    tower: TextTowerConfig
    """From captions to features of each token."""

    @torch.inference_mode(False)  # so that it can be used outside of inference mode
    def build(self, embed_dim: int) -> TextTokenizer:
        """Make the tokenizer with a joint embedding of ``embed_dim``."""
        return TextTokenizer(self, embed_dim)
