"""Every kind of source against packed shards of the same data."""

import csv
import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.loading import global_batch, open_data, same
from tests.data.making import caption_shards, make_files, write_parquet, write_tar
from vqclip.data import Batch, CaptionShardsConfig, RawSample, SourceConfigBase, TrainData, parse_source
from vqclip.errors import StorageError


def export_images(samples: list[RawSample], folder: Path) -> list[str]:
    """Write the images; return their relative paths."""
    names = [f"images/{number:05d}.jpg" for number in range(len(samples))]
    for name, sample in zip(names, samples, strict=True):
        make_files(folder, name, sample.image)
    return names


def as_csv(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    names = export_images(samples, folder)
    columns = [f"caption {number}" for number in range(max(len(sample.captions) for sample in samples))]
    with (folder / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", *columns])
        writer.writerows([path, *sample.captions] for path, sample in zip(names, samples, strict=True))
    return parse_source(folder / "train.csv", captions=columns)


def as_coco(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    names = export_images(samples, folder)
    images = [{"id": 7 * number, "file_name": Path(name).name} for number, name in enumerate(names)]
    captions: list[dict[str, Any]] = []
    for number, sample in enumerate(samples):
        captions += [{"image_id": 7 * number, "caption": text} for text in sample.captions]
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": captions}))
    return parse_source(folder / "captions.json", images=folder / "images")


def as_files(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    """img2dataset's layout `files`."""
    for number, sample in enumerate(samples):
        path = folder / f"{number // 4:05d}" / f"{number:09d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.image)
        path.with_suffix(".txt").write_text("\n".join(sample.captions))
        path.with_suffix(".json").write_text(json.dumps({"caption": sample.captions[0]}))
    return parse_source(folder, ["captions=txt_lines"])


def as_metadata(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    """Hugging Face's imagefolder."""
    names = export_images(samples, folder)
    rows = [{"file_name": name, "text": list(sample.captions)} for name, sample in zip(names, samples, strict=True)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parse_source(folder)


def as_gzip(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    members = {f"{number:05d}.jpg": sample.image for number, sample in enumerate(samples)}
    members |= {f"{number:05d}.txt": "\n".join(sample.captions).encode() for number, sample in enumerate(samples)}
    tar = write_tar(folder / "0.tar", members)
    (folder / "0.tar.gz").write_bytes(gzip.compress(tar.read_bytes()))
    tar.unlink()
    return parse_source(folder, ["captions=txt_lines"])


def as_parquet(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    """Two files, as Hugging Face writes them."""
    images = [{"bytes": sample.image, "path": None} for sample in samples]
    return _parquet({"image": images, "caption": [list(sample.captions) for sample in samples]}, folder)


def as_img2dataset(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    images, failed = [None, *(sample.image for sample in samples)], ["failed_to_download"]
    columns = {f"caption {n}": [None, *(each.captions[n] for each in samples)] for n in range(len(samples[0].captions))}
    keys = [f"{number:05d}" for number in range(len(images))]
    config = _parquet({"key": keys, "status": failed + ["success"] * len(samples), "jpg": images, **columns}, folder)
    return config.model_copy(update={"captions": tuple(columns)})


def as_parquet_of_paths(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    names = export_images(samples, folder)
    return _parquet({"image": names, "caption": [list(sample.captions) for sample in samples]}, folder)


def _parquet(columns: dict[str, list[Any]], folder: Path) -> SourceConfigBase:
    for number in range(2):
        part = {name: values[7 * number : 7 * number + 7] for name, values in columns.items()}
        write_parquet(folder / f"{number}.parquet", part, group=3)
    return parse_source(folder)


def as_hf(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    columns = {"image": [{"bytes": sample.image, "path": None} for sample in samples]}
    columns["caption"] = [list(sample.captions) for sample in samples]
    features = {"image": datasets.Image(), "caption": datasets.List(datasets.Value("string"))}
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).save_to_disk(folder)
    return parse_source(folder)


def as_torchvision(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    names = export_images(samples, folder)
    with (folder / "captions.token").open("w") as file:
        for name, sample in zip(names, samples, strict=True):
            file.writelines(f"{name}#{number}\t{text}\n" for number, text in enumerate(sample.captions))
    arguments = {"ann_file": str(folder / "captions.token")}
    return parse_source("kind=torchvision", name="Flickr30k", root=folder, arguments=arguments)


Export = Callable[[list[RawSample], Path], SourceConfigBase]

FILE_KINDS: dict[str, Export] = {
    "csv": as_csv,
    "coco": as_coco,
    "files": as_files,
    "metadata": as_metadata,
    "parquet of paths": as_parquet_of_paths,
}
"""A line for each kind of image files: writes some samples in its layout, and returns its configuration."""

KINDS: dict[str, Export] = {
    **FILE_KINDS,
    "tar.gz": as_gzip,
    "parquet": as_parquet,
    "parquet of img2dataset": as_img2dataset,
    "hf": as_hf,
    "torchvision": as_torchvision,
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


def training(config: SourceConfigBase) -> TrainData:
    return open_data(Path(), sources=(config,), seed=3)


def test_same_samples_and_batches_as_shards(export: Export, samples, shards, tmp_path: Path) -> None:
    """Also in a copy for a spawned worker; each sample has a name of its own."""
    config = export(samples, tmp_path)
    source = pickle.loads(pickle.dumps(config.build()))
    assert [source.read(index) for index in range(len(source))] == samples
    assert len({source.key(index) for index in range(COUNT)}) == COUNT
    assert len({source.place(index) for index in range(COUNT)}) == COUNT
    assert sum(int(shard["samples"]) for shard in source.shards) == len(source) == COUNT
    assert os.fspath(tmp_path) in source.name(0)
    with pytest.raises(IndexError):
        source.read(COUNT)
    expected, data = training(shards), training(config)
    assert same(*([global_batch([batch]) for batch in each.batches(0, 4)] for each in (expected, data)))
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


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_file_that_changes_in_use_is_named(kind: str, samples, tmp_path: Path) -> None:
    config = FILE_KINDS[kind](samples, tmp_path)
    source, image = config.build(), min(tmp_path.rglob("*.jpg"))
    image.write_bytes(samples[1].image + b" ")
    with pytest.raises(StorageError, match="changed since it was indexed; start the run again") as error:
        source.read(0)
    assert image.name in str(error.value)
    source = config.build()
    assert source.read(0).image == samples[1].image + b" "
    image.unlink()
    with pytest.raises(StorageError, match="cannot be read: No such file"):  # not a bad sample: it was there
        source.read(0)
