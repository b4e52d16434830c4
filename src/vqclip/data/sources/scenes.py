"""The drawn data set as a source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from vqclip.data.shard import Part
from vqclip.data.sources.base import SourceConfigBase
from vqclip.data.sources.classes import ClassShards, ClassShardsConfig
from vqclip.data.sources.shards import CaptionShards, CaptionShardsConfig
from vqclip.scenes import ScenesConfig, make_scenes

__all__ = ["ScenesSourceConfig"]


class ScenesSourceConfig(SourceConfigBase):
    """Drawn coloured shapes with captions; drawn on first use, in the cache folder."""

    kind: Literal["scenes"] = "scenes"
    """The drawn data set."""
    split: Literal["train", "val", "test", "heldout"] | None = None
    """train and val have captions (of trained and of held-out combinations), test and heldout have classes. null: val
    for retrieval, test for zero-shot classification, otherwise train."""
    drawing: ScenesConfig = ScenesConfig()
    """The drawing; evaluation may use another one, since all drawings hold out the same combinations."""

    @property
    def has_classes(self) -> bool:
        """Return whether images have classes."""
        return self.split in ("test", "heldout")

    def shards(self) -> Sequence[Part]:
        """See `SourceConfigBase.shards`; missing tars are drawn."""
        return self._shards_config(None).shards()

    def build(self, cache: Path | None = None) -> CaptionShards | ClassShards:
        """Open the shards, after drawing and indexing them if necessary."""
        return self._shards_config(cache).build(cache)

    def _shards_config(self, cache: Path | None) -> CaptionShardsConfig | ClassShardsConfig:
        paths = make_scenes(cache, self.drawing)
        split = self.split or "train"
        if split in ("train", "val"):
            return CaptionShardsConfig(path=str(getattr(paths, split)))
        return ClassShardsConfig(path=getattr(paths, split), split="test")
