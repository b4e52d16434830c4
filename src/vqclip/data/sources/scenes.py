"""The drawn data set as a source."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vqclip.config import Config
from vqclip.data.scenes import ScenesConfig, make_scenes
from vqclip.data.sources.classes import ClassShards, ClassShardsConfig
from vqclip.data.sources.shards import CaptionShards, CaptionShardsConfig, Weight

__all__ = ["ScenesSourceConfig"]


class ScenesSourceConfig(Config):
    """Drawn coloured shapes with captions; made on first use, in the cache folder."""

    kind: Literal["scenes"] = "scenes"
    """The drawn data set."""
    split: Literal["train", "val", "test", "heldout"] = "train"
    """train and val have captions (of trained and of held-out combinations), test and heldout have classes."""
    drawing: ScenesConfig = ScenesConfig()
    """What to draw."""
    weight: Weight = 1.0
    """How often a sample of this source appears in an epoch; fractions allowed."""

    def shards(self) -> list[Path]:
        """The tars of the split, drawn if they are not there; for `vqclip.data.index_shards`."""
        return self._ordinary(None).shards()

    def build(self, cache: Path | None = None) -> CaptionShards | ClassShards:
        """Opens the shards, drawing and indexing them if that has not been done."""
        return self._ordinary(cache).build(cache)

    def _ordinary(self, cache: Path | None) -> CaptionShardsConfig | ClassShardsConfig:
        paths = make_scenes(cache, self.drawing)
        if self.split in ("train", "val"):
            return CaptionShardsConfig(path=str(getattr(paths, self.split)), weight=self.weight)
        return ClassShardsConfig(path=getattr(paths, self.split), split="test", weight=self.weight)
