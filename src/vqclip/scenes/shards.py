"""Write samples as deterministic tars: img2dataset layout for captions, clip_benchmark layout for labels."""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from vqclip.process import progress
from vqclip.scenes.splits import TEMPLATES, Sample


def write_captioned(folder: Path, samples: Iterable[Sample], shard_size: int) -> None:
    """Write `00000.tar`, ... with `SSSSSNNNN.jpg`, `.txt`, `.json` a sample, and `00000_stats.json` a shard."""
    folder.mkdir(parents=True)
    for shard, part in enumerate(_parts(samples, shard_size)):
        with _Tar(folder / f"{shard:05d}.tar") as tar:
            for number, sample in enumerate(part):
                progress.heartbeat()
                key = f"{shard:05d}{number:04d}"
                assert sample.caption is not None
                tar.add(f"{key}.jpg", jpeg(sample))
                tar.add(f"{key}.txt", sample.caption.encode())
                size = {name: len(sample.pixels) for name in ("width", "height", "original_width", "original_height")}
                head = {"key": key, "caption": sample.caption, "status": "success", **size}
                tar.add(f"{key}.json", _json(head | {"scene": sample.scene.to_dict()}))
        stats = {"count": len(part), "successes": len(part), "failed_to_download": 0, "failed_to_resize": 0}
        _write(folder / f"{shard:05d}_stats.json", _json(stats | {"status_dict": {"success": len(part)}}))


def write_labelled(folder: Path, samples: Iterable[Sample], class_names: list[str], shard_size: int) -> None:
    """Write `classnames.txt`, `zeroshot_classification_templates.txt` and `test/N.tar` with jpg, cls, json."""
    (folder / "test").mkdir(parents=True)
    _write(folder / "classnames.txt", "".join(f"{name}\n" for name in class_names).encode())
    _write(folder / "zeroshot_classification_templates.txt", "".join(f"{t}\n" for t in TEMPLATES).encode())
    shards = 0
    for part in _parts(samples, shard_size):
        with _Tar(folder / "test" / f"{shards}.tar") as tar:
            for number, sample in enumerate(part):
                progress.heartbeat()
                key = f"s{shards * shard_size + number:07d}"
                assert sample.label is not None
                tar.add(f"{key}.jpg", jpeg(sample))
                tar.add(f"{key}.cls", str(sample.label).encode())
                head = {"key": key, "class": class_names[sample.label]}
                tar.add(f"{key}.json", _json(head | {"scene": sample.scene.to_dict()}))
        shards += 1
    _write(folder / "test" / "nshards.txt", f"{shards}\n".encode())


def jpeg(sample: Sample) -> bytes:
    """Encode the picture with full colour resolution, so that a small object keeps its colour."""
    buffer = io.BytesIO()
    Image.fromarray(sample.pixels).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def _parts(samples: Iterable[Sample], size: int) -> Iterable[list[Sample]]:
    iterator = iter(samples)
    while part := list(itertools.islice(iterator, size)):
        yield part


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class _Tar:
    """A tar whose bytes depend on its members alone: no times, no owners."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115

    def __enter__(self) -> _Tar:
        return self

    def add(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data))

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._tar.close()
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
