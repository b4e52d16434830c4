"""The drawn data set as a source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from vqclip.config import Config
from vqclip.data.shard import Shard
from vqclip.data.sources.classes import ClassShards, ClassShardsData
from vqclip.data.sources.shards import CaptionShards, CaptionShardsData, Weight
from vqclip.scenes import ScenesConfig, make_scenes

__all__ = ["ScenesData", "ScenesSourceConfig"]


class ScenesData(Config):
    """Drawn coloured shapes with captions; drawn on first use, in the cache folder."""

    kind: Literal["scenes"] = "scenes"
    """The drawn data set."""
    split: Literal["train", "val", "test", "heldout"] = "train"
    """train and val have captions (of trained and of held-out combinations), test and heldout have classes."""
    drawing: ScenesConfig = ScenesConfig()
    """The drawing; evaluation may use another one, since all drawings hold out the same combinations."""

    def shards(self) -> Sequence[Shard]:
        """Return the tars of the split, after drawing missing ones; for `vqclip.data.prepare_sources`."""
        return self._shards_config(None).shards()

    def build(self, cache: Path | None = None) -> CaptionShards | ClassShards:
        """Open the shards, after drawing and indexing them if necessary."""
        return self._shards_config(cache).build(cache)

    def _shards_config(self, cache: Path | None) -> CaptionShardsData | ClassShardsData:
        paths = make_scenes(cache, self.drawing)
        if self.split in ("train", "val"):
            return CaptionShardsData(path=str(getattr(paths, self.split)))
        return ClassShardsData(path=getattr(paths, self.split), split="test")


class ScenesSourceConfig(ScenesData):
    """The drawn data set to train on."""

    weight: Weight = 1.0
    """Number of times that each sample appears in an epoch; fractions allowed."""
