"""The `data` section of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from vqclip import dist
from vqclip.data.batch_maker import LoaderOptions, Tokenize
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.features import FeatureCacheConfig
from vqclip.data.loader import TrainData
from vqclip.data.order import FullOrder, OrderConfig, WindowedOrder
from vqclip.data.prepare import open_source, prepare_sources
from vqclip.data.samples import SampleMaker
from vqclip.data.sources.base import OpensSource, Source, SourceConfigBase
from vqclip.data.sources.kinds import SourceConfig
from vqclip.data.tars.ahead import find_needs
from vqclip.data.transforms import TrainTransformConfig
from vqclip.errors import ConfigError, name_section

__all__ = ["DataConfig"]


def _use_train_split(source: SourceConfigBase) -> SourceConfigBase:
    return source.model_copy(update={"split": "train"}) if getattr(source, "split", "") is None else source


def _open(key: str, source: OpensSource) -> Source:
    with name_section(key):
        return open_source(source)


class DataConfig(LoaderOptions):
    """Training data and how to read them."""

    sources: Annotated[tuple[Annotated[SourceConfig, AfterValidator(_use_train_split)], ...], Field(min_length=1)]
    """Sources of samples; several are mixed by their weights."""
    order: OrderConfig = FullOrder()
    """Order of the samples, `full` or `windowed`."""
    transform: TrainTransformConfig = TrainTransformConfig()
    """Random augmentation of training images."""
    views: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Number of different views of each image that the augmentation draws; each comes in every `views`-th epoch. null:
    a new view in every epoch."""
    feature_cache: FeatureCacheConfig | None = None
    """Features of frozen towers, stored before the first step; null: towers run in every step."""
    max_pixels: Annotated[int, Field(ge=1)] = MAX_PIXELS
    """Images with more pixels are bad samples; they are not decoded."""

    def build(self, image_size: int, tokenize: Tokenize, batch_size: int, seed: int) -> TrainData:
        """Open the data, after drawing and indexing missing ones. A collective: every rank must call it.

        Args:
            image_size: side of the images in pixels.
            tokenize: captions → ``(B, T)`` int64, padded with 0, and their lengths before the cut; runs in the workers.
            batch_size: G, samples of a global batch over all ranks.
            seed: the run's seed.

        Raises:
            DataError: on every rank, if a source cannot be used on one of them; the message says what to do.
            ConfigError: an epoch has fewer samples than a global batch.
        """
        keys = [f"data.sources[{number}]" for number in range(len(self.sources))]
        sources: list[OpensSource] = [*self.sources]
        if isinstance(self.order, WindowedOrder):
            sources = [source.in_chunks(self.order.chunk) for source in self.sources]
        prepare_sources(sources, keys)
        opened = [_open(key, source) for key, source in zip(keys, sources, strict=True)]
        data = TrainData(
            SampleMaker(opened, self.transform.build(image_size), seed, self.max_pixels, self.views),
            [1.0 if source.weight is None else source.weight for source in self.sources],
            tokenize,
            batch_size,
            seed,
            options=self,
            order=self.order,
            nodes=dist.nodes(),
        )
        with dist.raise_on_all_ranks():
            needs = find_needs(data.samples.sources, data.order, batch_size, dist.rank(), data.nodes)
        if needs is not None and dist.is_main():
            needs.warn_of_small_cache()
            needs.warn_of_shared_chunks()
        if batch_size > data.epoch_size:  # a sample would be its own negative
            raise ConfigError(
                f"train.batch_size: got {batch_size}, more than the {data.epoch_size} samples of an epoch of "
                f"data.sources; expected at most {data.epoch_size}"
            )
        return data
