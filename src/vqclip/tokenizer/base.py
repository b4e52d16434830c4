"""What the tokenizers of images and texts share: everything from tower features on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.nn.pooling import isometric_
from vqclip.nn.projection import LinearProjectionConfig, Normalization, Projection, ProjectionConfig, normalize_channels
from vqclip.quantizers import Stats
from vqclip.quantizers.checks import check_channels
from vqclip.tokenizer.hub import push_saved
from vqclip.tokenizer.pretrained import save_folder
from vqclip.tokenizer.reader import ReadingConfig, ReadingHalf
from vqclip.towers import ImageTower, TextTower

ConfigT = TypeVar("ConfigT", bound="TokenizerConfig")
TokenizerT = TypeVar("TokenizerT", bound="Tokenizer")


@contextmanager
def tower_errors_in(section: str) -> Iterator[None]:
    """A tower's errors name keys of ``tower``; within this context, of ``section``, the key path of that tower."""
    try:
        yield
    except ConfigError as error:
        if not str(error).startswith(("tower:", "tower.")):
            raise
        raise ConfigError(section + str(error).removeprefix("tower")) from error


class TokenizerOutput(NamedTuple):
    """What a tokenizer gives in training."""

    embedding: Tensor
    """``(B, E)`` unit-norm, through the quantizer, gradients straight-through."""
    ids: Tensor
    """``(B, N, C)`` int64, -1 at padding."""
    stats: Stats
    """This rank's sums for the quantizer's losses and metrics."""


class Tokenizer(ReadingHalf, ABC):
    """What image and text tokenizers share: everything from tower features on.

    Args:
        config: everything but the tower.
        tower: `ImageTower` or `TextTower`.
        embed_dim: E, width of the joint embedding.
        fewest_tokens: how few of the N positions a batch may come with.
    """

    config: Any
    tower: ImageTower | TextTower
    project_in: Projection

    def __init__(self, config: TokenizerConfig, tower: ImageTower | TextTower, embed_dim: int, fewest_tokens: int):
        quantizer = config.quantizer.build()
        if config.normalize != "none":
            least = 3 if config.normalize == "layer" else 2  # taking off the mean costs one more
            check_channels(f"{self.modality}.normalize {config.normalize}", quantizer.dim, least)
        into = config.project_in.layers(tower.width, quantizer.dim)
        project_in = Projection(nn.LayerNorm(tower.width), *into)
        project_out, pool = config.reading_parts(quantizer, tower.num_tokens, embed_dim)
        for part in (project_in, project_out, pool):
            isometric_(part)
        super().__init__(quantizer, project_out, pool, fewest_tokens, {"tower": tower, "project_in": project_in})
        self.config = config
        self.normalize = config.normalize

    @abstractmethod
    def mask(self, inputs: Tensor) -> Tensor | None:
        """``(B, N)`` bool, True at real tokens, or None where every token is real."""

    def forward(self, inputs: Tensor) -> TokenizerOutput:
        """The training path: a batch as `preprocess` makes it → embedding, ids, statistics. Holds no collective."""
        return self._quantized(*self.features(inputs))

    def features(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is quantized: a batch as `preprocess` makes it → ``(B, N, quantizer.dim)``, and its `mask`."""
        mask = self.mask(inputs)
        return normalize_channels(self.project_in(self.tower(inputs), mask), self.normalize), mask

    def continuous(self, inputs: Tensor) -> Tensor:
        """``(B, E)``: the embedding with the quantizer bypassed, to tell what quantization costs."""
        return self._continuous(*self.features(inputs))

    def with_continuous(self, inputs: Tensor) -> tuple[TokenizerOutput, Tensor]:
        """`forward` and `continuous` from one pass of the tower."""
        features, mask = self.features(inputs)
        return self._quantized(features, mask), self._continuous(features, mask)

    def _quantized(self, features: Tensor, mask: Tensor | None) -> TokenizerOutput:
        out = self.quantizer(features, mask)
        return TokenizerOutput(self._embed(out.vectors, mask), out.ids, out.stats)

    def _continuous(self, features: Tensor, mask: Tensor | None) -> Tensor:
        return self._embed(self.quantizer.continuous(features, mask), mask)

    @torch.no_grad()
    def _encode(self, inputs: Tensor) -> Tensor:
        return self.quantizer.encode(*self.features(inputs)).contiguous()  # as safetensors wants what it stores

    def save_pretrained(self, folder: str | Path) -> None:
        """Write this tokenizer to a folder that `vqclip.load_tokenizer` reads.

        One that lies there is replaced in one stroke, with its card.

        Raises:
            ConfigError: the folder holds a tokenizer of the other modality, another model, or a tokenizer beside other
                files, which would be lost.
        """
        state = {f"{self.modality}.{key}": value for key, value in self.state_dict().items()}
        save_folder(folder, {self.modality: self.section()}, state)

    @classmethod
    def from_pretrained(cls: type[TokenizerT], folder: str | Path, revision: str | None = None) -> TokenizerT:
        """Read a tokenizer of this class from a folder: `vqclip.load_tokenizer` with the modality of the class.

        Args:
            folder: what `save_pretrained` wrote, or a hub name ``owner/name``.
            revision: branch, tag or commit of a hub name; None for the newest.

        Raises:
            CheckpointError: for a folder that is missing, damaged, or holds the other modality alone.
            ConfigError: for a class that no folder holds: this one, or one of your own.
        """
        if "modality" not in vars(cls):
            raise ConfigError(
                f"{cls.__name__}.from_pretrained: folders hold no {cls.__name__}; expected "
                "ImageTokenizer.from_pretrained or TextTokenizer.from_pretrained"
            )
        import vqclip  # by its public name, when it is asked for: loading builds on this module

        load: Any = vqclip.load_tokenizer
        return load(folder, cls.modality, revision=revision)

    def push_to_hub(
        self, name: str, card: str | None = None, *, private: bool | None = None, revision: str | None = None
    ) -> str:
        """Push this tokenizer to the hub, as `save_pretrained` writes it, with a card; see `hub.push_folder`.

        Args:
            name: ``owner/name``; made if it is missing.
            card: the card, Markdown; None for one without figures. To send a run's own, use `push_folder`.
            private: whether a model that is made can be seen by its owner alone; None: as the hub has it.
            revision: branch to write to, made if it is missing; None for the main one.

        Returns:
            The commit's address.

        Raises:
            CheckpointError: for a name that is none, or a hub that cannot be reached or refuses.
        """
        return push_saved(self.save_pretrained, name, card, private=private, revision=revision)

    def section(self) -> dict[str, object]:
        """This tokenizer's part of ``config.json``."""
        tokens = {"num_tokens": self.num_tokens, "fewest_tokens": self.fewest_tokens}
        return self.config.architecture().model_dump(mode="json") | tokens | {"embed_dim": self.embed_dim}


class TokenizerConfig(ReadingConfig):
    """What the sections of both modalities have; each adds its ``tower``."""

    if TYPE_CHECKING:
        tower: Any
    project_in: ProjectionConfig = LinearProjectionConfig()
    """From the tower's features to the quantizer's channels."""
    normalize: Normalization = "none"
    """What is done to those channels before they are quantized: layer (mean 0, variance 1), l2 (length √D), none."""

    def architecture(self: ConfigT) -> ConfigT:
        """The same network with random weights: what is read and written beside weights, so that none are fetched."""
        tower = self.tower
        return self.model_copy(update={"tower": tower.model_copy(update=tower.random_weights)})
