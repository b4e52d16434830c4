"""Image size and vocabulary of a training configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vqclip.config import load_config
from vqclip.towers.vocabulary import Vocabulary
from vqclip.train import TrainConfig

__all__ = ["ModelInputs"]


class ModelInputs(NamedTuple):
    """A configuration, and the form in which its model takes images and captions."""

    config: TrainConfig
    image_size: int
    """Side of the images in pixels."""
    vocabulary: Vocabulary
    """Captions to tokens, at the context length of the text tower."""

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> ModelInputs:
        """Read a configuration and build its model, as training does; weights are not used.

        Raises:
            ConfigError: an invalid configuration.
        """
        config = load_config(TrainConfig, path, overrides)
        model = config.model.build()
        return cls(config, model.image.tower.image_size, model.text.preprocess)
