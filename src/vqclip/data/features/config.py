"""The section `data.feature_cache` of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from vqclip.config import Config
from vqclip.data.features.settings import FeatureDtype
from vqclip.io.cache import cache_folder

Modality = Literal["image", "text"]


class FeatureCacheConfig(Config):
    """Features of frozen towers, computed once before the first step and read from the disk in every epoch."""

    folder: Path | None = None
    """Folder of the features, which every process must reach; null: `features` in the cache folder (VQCLIP_CACHE).
    Other weights, data or transforms get a subfolder of their own; delete those that are no longer needed."""
    dtype: FeatureDtype = "fp32"
    """Type of the stored numbers. fp32 trains the same bits as without the cache; fp16 and bf16 take half the space."""
    modalities: Annotated[tuple[Modality, ...], Field(min_length=1)] | None = None
    """Towers whose features are stored; null: each one with `train: none`."""

    teachers: bool = True
    """Also store what the teachers of `distillation` compute, of images only with `data.views`; false: they run in
    every step."""

    @property
    def path(self) -> Path:
        """Folder of the features."""
        return cache_folder() / "features" if self.folder is None else self.folder

    def choose(
        self, training: dict[Modality, object], views: int | None, *, alone: bool = True
    ) -> tuple[Modality, ...]:
        """Return the modalities whose features are stored.

        Args:
            training: the key `train` of each modality's tower.
            views: `data.views`.
            alone: whether no features of teachers are stored, so that there must be those of a tower.

        Raises:
            ValueError: a tower trains in this run, or images have no fixed number of views.
        """
        frozen = [name for name, train in training.items() if train == "none"]
        chosen = tuple(frozen) if self.modalities is None else self.modalities
        trained = [name for name in training if name in chosen and name not in frozen]
        if trained or (alone and not chosen):
            names: Sequence[Modality] = trained or list(training)
            raise ValueError(
                f"data.feature_cache: got a cache of {' and '.join(names)} features, but these towers train; expected "
                f"{' or '.join(f'model.{name}.tower.train: none' for name in names)}, or feature_cache: null"
            )
        if "image" in chosen and views is None:
            raise ValueError(
                "data.views: got null, a new view of each image in every epoch, with a data.feature_cache of image "
                "features; expected the number of views to store, such as 1"
            )
        return chosen
