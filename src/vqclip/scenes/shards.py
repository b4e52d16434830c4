"""Write samples as tars: img2dataset's layout for captions, clip_benchmark's for labels."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from vqclip.io.files import write_tar
from vqclip.process import progress
from vqclip.scenes.splits import TEMPLATES, Sample


def write_captioned(folder: Path, samples: Iterable[Sample], shard_size: int) -> None:
    """Write `00000.tar`, ... with `SSSSSNNNN.jpg`, `.txt`, `.json` a sample, and `00000_stats.json` a shard."""
    folder.mkdir(parents=True)
    for shard, part in enumerate(_parts(samples, shard_size)):
        with (folder / f"{shard:05d}.tar").open("wb") as file:
            write_tar(
                file, (_caption_members(f"{shard:05d}{number:04d}", sample) for number, sample in enumerate(part))
            )
        stats = {"count": len(part), "successes": len(part), "failed_to_download": 0, "failed_to_resize": 0}
        (folder / f"{shard:05d}_stats.json").write_bytes(_json(stats | {"status_dict": {"success": len(part)}}))


def write_labelled(folder: Path, samples: Iterable[Sample], class_names: list[str], shard_size: int) -> None:
    """Write `classnames.txt`, `zeroshot_classification_templates.txt` and `test/N.tar` with jpg, cls, json."""
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_bytes("".join(f"{name}\n" for name in class_names).encode())
    (folder / "zeroshot_classification_templates.txt").write_bytes("".join(f"{t}\n" for t in TEMPLATES).encode())
    shards = 0
    for part in _parts(samples, shard_size):
        keys = (f"s{shards * shard_size + number:07d}" for number in itertools.count())
        with (folder / "test" / f"{shards}.tar").open("wb") as file:
            write_tar(file, (_label_members(key, sample, class_names) for key, sample in zip(keys, part, strict=False)))
        shards += 1
    (folder / "test" / "nshards.txt").write_bytes(f"{shards}\n".encode())


def _caption_members(key: str, sample: Sample) -> tuple[str, dict[str, bytes]]:
    progress.heartbeat()
    assert sample.caption is not None
    size = {name: len(sample.pixels) for name in ("width", "height", "original_width", "original_height")}
    head = {"key": key, "caption": sample.caption, "status": "success", **size}
    facts = _json(head | {"scene": dataclasses.asdict(sample.scene)})
    return key, {"jpg": jpeg(sample), "txt": sample.caption.encode(), "json": facts}


def _label_members(key: str, sample: Sample, class_names: list[str]) -> tuple[str, dict[str, bytes]]:
    progress.heartbeat()
    assert sample.label is not None
    head = {"key": key, "class": class_names[sample.label]}
    facts = _json(head | {"scene": dataclasses.asdict(sample.scene)})
    return key, {"jpg": jpeg(sample), "cls": str(sample.label).encode(), "json": facts}


def jpeg(sample: Sample) -> bytes:
    """Encode the image with full colour resolution, so that a small object keeps its colour."""
    buffer = io.BytesIO()
    Image.fromarray(sample.pixels).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def _parts(samples: Iterable[Sample], size: int) -> Iterable[list[Sample]]:
    iterator = iter(samples)
    while part := list(itertools.islice(iterator, size)):
        yield part


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
