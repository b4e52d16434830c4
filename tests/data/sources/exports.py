"""The samples of shards, written in the layouts of other kinds of sources."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import write_tar
from vqclip.data import RawSample, SourceConfigBase, TorchvisionConfig, parse_source


def export_images(samples: list[RawSample], folder: Path) -> list[str]:
    """Write the images; return their relative paths."""
    (folder / "images").mkdir(parents=True)
    names = [f"images/{number:05d}.jpg" for number in range(len(samples))]
    for name, sample in zip(names, samples, strict=True):
        (folder / name).write_bytes(sample.image)
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
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True, exist_ok=True)
    table = arrow.table(columns)
    for number in range(2):
        parquet.write_table(table.slice(number * 7, 7), folder / f"{number}.parquet", row_group_size=3)
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
    lines = [
        f"{name}#{n}\t{text}\n"
        for name, each in zip(names, samples, strict=True)
        for n, text in enumerate(each.captions)
    ]
    (folder / "captions.token").write_text("".join(lines))
    arguments = {"ann_file": str(folder / "captions.token")}
    return TorchvisionConfig(name="Flickr30k", root=folder, arguments=arguments)
