"""The samples of shards, written in the layouts of other kinds of sources."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from vqclip.data import RawSample, SourceConfigBase, parse_source


def export_images(samples: list[RawSample], folder: Path) -> list[str]:
    """Write the images; return their relative paths."""
    (folder / "images").mkdir(parents=True)
    names = [f"images/{number:05d}.jpg" for number in range(len(samples))]
    for name, sample in zip(names, samples, strict=True):
        (folder / name).write_bytes(sample.image)
    return names


def as_csv(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    return _table(samples, folder, "train.csv")


def as_tsv(samples: list[RawSample], folder: Path) -> SourceConfigBase:
    return _table(samples, folder, "train.tsv")


def _table(samples: list[RawSample], folder: Path, name: str) -> SourceConfigBase:
    names = export_images(samples, folder)
    columns = [f"caption {number}" for number in range(max(len(sample.captions) for sample in samples))]
    with (folder / name).open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if name.endswith("tsv") else ",")
        writer.writerow(["filepath", *columns])
        writer.writerows([path, *sample.captions] for path, sample in zip(names, samples, strict=True))
    return parse_source(folder / name, captions=columns)


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
