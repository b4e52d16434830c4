"""Common part of image and text tokenizers: everything after the tower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.nn.pooling import isometric_
from vqclip.nn.precision import Precision, autocast
from vqclip.nn.projection import LinearProjectionConfig, Normalization, Projection, ProjectionConfig, normalize_channels
from vqclip.nn.reduction import Reduction, ReductionConfig
from vqclip.quantizers import Stats
from vqclip.quantizers.vectors import check_channels
from vqclip.tokenizer.decoder import DecoderConfig, TokenizerDecoder
from vqclip.tokenizer.hub import save_and_push
from vqclip.tokenizer.saving import save_folder
from vqclip.tokenizer.stored import merged_state
from vqclip.towers import ImageTower, TextTower
from vqclip.towers.frozen import frozen_features
from vqclip.towers.training import architecture_of

ConfigT = TypeVar("ConfigT", bound="TokenizerConfig")
TokenizerT = TypeVar("TokenizerT", bound="Tokenizer")


class TokenizerOutput(NamedTuple):
    """Output of a tokenizer in training."""

    embedding: Tensor
    """``(B, E)`` unit-norm, through the quantizer, gradients straight-through."""
    ids: Tensor
    """``(B, N, C)`` int64, -1 at padding."""
    stats: Stats
    """This rank's sums for the quantizer's losses and metrics."""
    vectors: Tensor | None = None
    """``(B, N, quantizer.dim)`` vectors of the codes, gradients straight-through; None where outputs were joined."""


class Tokenizer(TokenizerDecoder, ABC):
    """Base of image and text tokenizers: a tower, and everything after it.

    Args:
        config: configuration of everything after the tower.
        tower: `ImageTower` or `TextTower`.
        embed_dim: E, width of the joint embedding.
        fewest_tokens: smallest number of the tower's tokens in a batch.
    """

    modality: str
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
        before: dict[str, nn.Module] = {"tower": tower, "project_in": project_in}
        if reduction is not None:
            before = {"tower": tower, "reduce": reduction, "project_in": project_in}
        for part in (*list(before.values())[1:], project_out, pool):
            isometric_(part)
        super().__init__(self.modality, quantizer, project_out, pool, fewest_tokens, before)
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

        Args:
            inputs: a batch from `preprocess`.
            tower_features: ``(B, N, D)`` from `tower_features`; the tower is then not run.
        """
        return self._quantize(*self.features(inputs, tower_features))

    def features(self, inputs: Tensor, tower_features: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the quantizer's input ``(B, N, quantizer.dim)`` for a batch from `preprocess`, and its `mask`.

        Args:
            inputs: a batch from `preprocess`.
            tower_features: ``(B, N, D)`` from `tower_features`; the tower is then not run.
        """
        mask, x = self.mask(inputs), self.tower(inputs) if tower_features is None else tower_features
        if self.reduce is not None:
            x = x if self.reduces_early and tower_features is not None else self.reduce(x, mask)
            # All of them are real. Text keeps a mask, as `ids_mask` gives one, so that sums are the same.
            mask = None if mask is None else mask.new_ones(x.shape[:2])
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
        return TokenizerOutput(self._embed(vectors, mask), out.ids, out.stats, out.vectors)

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

    @classmethod
    def from_pretrained(cls: type[TokenizerT], folder: str | Path, revision: str | None = None) -> TokenizerT:
        """Read a tokenizer of this class from a folder: `vqclip.load_tokenizer` with the modality of the class.

        Args:
            folder: folder that `save_pretrained` wrote, or a hub name ``owner/name``.
            revision: branch, tag or commit of a hub name; None for the newest.

        Raises:
            CheckpointError: for a folder that is missing or damaged, or contains only the other modality.
            ConfigError: for a class that folders do not contain: this one, or one of your own.
        """
        if "modality" not in vars(cls):
            raise ConfigError(
                f"{cls.__name__}.from_pretrained: folders contain no {cls.__name__}; expected "
                "ImageTokenizer.from_pretrained or TextTokenizer.from_pretrained"
            )
        import vqclip  # here, for loading builds on this module

        load: Any = vqclip.load_tokenizer
        return load(folder, cls.modality, revision=revision)

    def push_to_hub(
        self, name: str, card: str | None = None, *, private: bool | None = None, revision: str | None = None
    ) -> str:
        """Save this tokenizer and push it to the hub, with a card; see `hub.push_folder`.

        Args:
            name: ``owner/name``; made if it is missing.
            card: Markdown; None for a card without figures. To push a run's own card, use `push_folder`.
            private: whether a new model is visible to its owner only; None: the hub's default.
            revision: branch to write to, made if it is missing; None for the main one.

        Returns:
            The commit's address.

        Raises:
            CheckpointError: for an invalid name, or a hub that cannot be reached or refuses.
        """
        return save_and_push(self.save_pretrained, name, card, private=private, revision=revision)

    def section(self) -> dict[str, object]:
        """Return this tokenizer's section of ``config.json``."""
        tokens = {"num_tokens": self.num_tokens, "fewest_tokens": self.fewest_tokens}
        section = self.config.architecture().model_dump(mode="json", exclude={"pixels"})
        del section["tower"]["train"]  # how it was trained is no part of a tokenizer
        if self.config.reduce is None:
            del section["reduce"]  # as in the folders and fingerprints from before this setting
        if section["tower"].get("package", "") is None:
            del section["tower"]["package"]  # likewise
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
    """Normalisation of those channels before quantization: layer (mean 0, variance 1), l2 (length √D), none."""

    def resolve(self: ConfigT) -> ConfigT:
        """Return a copy with the settings that the tower reads from its source of weights, to be exported with it."""
        read = getattr(self.tower, "resolve", None)
        return self if read is None else self.model_copy(update={"tower": read()})

    def with_stored(self: ConfigT, files: Mapping[str, bytes], shapes: Mapping[str, tuple[int, ...]]) -> ConfigT:
        """Return a copy for a tokenizer folder, from its further files and the shapes of the tower's weights."""
        read = getattr(self.tower, "with_stored", None)
        return self if read is None else self.model_copy(update={"tower": read(files, shapes)})

    def architecture(self: ConfigT) -> ConfigT:
        """Return a copy whose tower is not frozen and has random weights, so that building it fetches none."""
        return self.model_copy(update={"tower": self.tower.model_copy(update=architecture_of(self.tower))})
