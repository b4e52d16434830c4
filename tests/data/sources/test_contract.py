"""Every kind of source against packed shards of the same data."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.data.loading import SIZE, G, global_batch, same, tokenize
from tests.data.making import caption_shards, write_tar
from tests.data.sources import exports
from vqclip.data import Batch, CaptionShardsConfig, DataConfig, RawSample, SourceConfigBase, TrainData
from vqclip.errors import StorageError

Export = Callable[[list[RawSample], Path], SourceConfigBase]

FILE_KINDS: dict[str, Export] = {
    "csv": exports.as_csv,
    "coco": exports.as_coco,
    "files": exports.as_files,
    "metadata": exports.as_metadata,
    "parquet of paths": exports.as_parquet_of_paths,
}
"""A line for each kind of image files: writes some samples in its layout, and returns its configuration."""

KINDS: dict[str, Export] = {
    **FILE_KINDS,
    "tar.gz": exports.as_gzip,
    "parquet": exports.as_parquet,
    "parquet of img2dataset": exports.as_img2dataset,
    "hf": exports.as_hf,
    "torchvision": exports.as_torchvision,
}
"""A line for each other kind."""

COUNT = 13
"""More than a global batch, and no multiple of it."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> CaptionShardsConfig:
    folder = caption_shards(tmp_path_factory.mktemp("shards"), (8, COUNT - 8))
    return CaptionShardsConfig(path=str(folder), captions="json", json_keys=("caption", "many"))


@pytest.fixture(scope="module")
def samples(shards: CaptionShardsConfig) -> list[RawSample]:
    source = shards.build()
    return [source.read(index) for index in range(len(source))]


@pytest.fixture(params=KINDS)
def export(request: pytest.FixtureRequest) -> Export:
    return KINDS[request.param]


@pytest.fixture(params=FILE_KINDS)
def export_files(request: pytest.FixtureRequest) -> Export:
    return FILE_KINDS[request.param]


def training(config: SourceConfigBase, workers: int = 0) -> TrainData:
    data = DataConfig(sources=(config,), workers=workers)  # type: ignore[arg-type]
    return data.build(image_size=SIZE, tokenize=tokenize, batch_size=G, seed=3)


def first_files(config: SourceConfigBase) -> list[Path]:
    """The file or files that hold the image of sample 0."""
    folder = Path(str(config.path))  # type: ignore[attr-defined]
    folder = folder if folder.is_dir() else folder.parent
    return sorted(folder.rglob("*.jpg"))[:1]


def test_same_batches_as_shards(export: Export, samples, shards, tmp_path: Path) -> None:
    expected, data = training(shards), training(export(samples, tmp_path))
    assert same(
        [global_batch([batch]) for batch in expected.batches(0, 4)], [global_batch([b]) for b in data.batches(0, 4)]
    )
    assert [batch.captions for batch in expected.batches(2, 4)] == [batch.captions for batch in data.batches(2, 4)]


def batches_on_this_rank(cache: str, configs: list[SourceConfigBase]) -> list[list[Batch]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VQCLIP_CACHE", cache)
        return [list(training(config).batches(2, 4)) for config in configs]


def test_same_batches_on_two_processes(samples, shards, tmp_path: Path, cache: Path, ranks) -> None:
    """Two ranks index together, and resume at step 2."""
    configs = [export(samples, tmp_path / kind) for kind, export in KINDS.items()]
    expected = [global_batch([batch]) for batch in training(shards).batches(2, 4)]
    for parts in zip(*ranks(2, batches_on_this_rank, str(cache), configs), strict=True):
        assert same([global_batch(list(each)) for each in zip(*parts, strict=True)], expected)


def test_fingerprint_is_of_the_content(export: Export, samples, tmp_path: Path) -> None:
    before = export(samples, tmp_path / "a").build().fingerprint
    assert json.loads(json.dumps(before)) == before
    assert export(samples, tmp_path / "b").build().fingerprint == before
    for number, other in enumerate(({"captions": ("another", *samples[0].captions[1:])}, {"image": samples[1].image})):
        config = export([samples[0]._replace(**other), *samples[1:]], tmp_path / f"c{number}")
        assert config.build().fingerprint != before


def test_bad_samples_are_replaced_as_in_shards(export: Export, samples, tmp_path: Path) -> None:
    damaged = [samples[0]._replace(image=b"\xff\xd8\xff"), *samples[1:]]
    members = {f"{n}.jpg": sample.image for n, sample in enumerate(damaged)}
    members |= {f"{n}.txt": "\n".join(sample.captions).encode() for n, sample in enumerate(damaged)}
    path = write_tar(tmp_path / "0.tar", members)
    expected = training(CaptionShardsConfig(path=str(path), captions="txt_lines")).batches(0, 3)
    for one, other in zip(expected, training(export(damaged, tmp_path / "a")).batches(0, 3), strict=True):
        assert [bad._replace(reason="") for bad in one.bad] == [bad._replace(reason="") for bad in other.bad]
        assert torch.equal(one.images, other.images)
        assert all(str(tmp_path / "a") in bad.reason for bad in other.bad)
        assert one.step or one.bad


def test_a_file_that_changes_in_use_is_named(export_files: Export, samples, tmp_path: Path) -> None:
    config = export_files(samples, tmp_path)
    source = config.build()
    (image, *_) = first_files(config)
    image.write_bytes(samples[1].image + b" ")
    with pytest.raises(StorageError, match="changed since it was indexed; start the run again") as error:
        source.read(0)
    assert image.name in str(error.value)
    source = config.build()
    assert source.read(0).image == samples[1].image + b" "
    image.unlink()
    with pytest.raises(StorageError, match="cannot be read: No such file"):  # not a bad sample: it was there
        source.read(0)


def test_a_copy_in_a_spawned_worker(export: Export, samples, tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(export(samples, tmp_path).build()))
    assert [source.read(index) for index in range(len(source))] == samples


def test_names_and_parts(export: Export, samples, tmp_path: Path) -> None:
    source = export(samples, tmp_path).build()
    assert len({source.key(index) for index in range(COUNT)}) == COUNT
    assert len({source.place(index) for index in range(COUNT)}) == COUNT
    assert sum(int(shard["samples"]) for shard in source.shards) == len(source) == COUNT
    assert os.fspath(tmp_path) in source.name(0)
    with pytest.raises(IndexError):
        source.read(COUNT)
