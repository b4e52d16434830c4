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
    """Drawn coloured shapes with captions; made on first use, in the cache folder."""

    kind: Literal["scenes"] = "scenes"
    """The drawn data set."""
    split: Literal["train", "val", "test", "heldout"] = "train"
    """train and val have captions (of trained and of held-out combinations), test and heldout have classes."""
    drawing: ScenesConfig = ScenesConfig()
    """What to draw; evaluation may be given another one: held-out combinations are so in every drawing."""

    def shards(self) -> Sequence[Shard]:
        """The tars of the split, drawn if they are not there; for `vqclip.data.prepare_sources`."""
        return self._ordinary(None).shards()

    def build(self, cache: Path | None = None) -> CaptionShards | ClassShards:
        """Opens the shards, drawing and indexing them if that has not been done."""
        return self._ordinary(cache).build(cache)

    def _ordinary(self, cache: Path | None) -> CaptionShardsData | ClassShardsData:
        paths = make_scenes(cache, self.drawing)
        if self.split in ("train", "val"):
            return CaptionShardsData(path=str(getattr(paths, self.split)))
        return ClassShardsData(path=getattr(paths, self.split), split="test")


class ScenesSourceConfig(ScenesData):
    """The drawn data set to train on."""

    weight: Weight = 1.0
    """How often a sample of this source appears in an epoch; fractions allowed."""
