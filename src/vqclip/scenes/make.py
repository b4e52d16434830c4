"""Draw the whole data set once into the cache, in the layouts of img2dataset (captions) and clip_benchmark (labels)."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import PIL
from PIL import Image
from pydantic import Field

from vqclip.config import Config
from vqclip.errors import DataError
from vqclip.io.atomic import digest_file, make_once
from vqclip.io.files import cache_folder, write_tar
from vqclip.process import progress
from vqclip.scenes.splits import (
    TEMPLATES,
    VERSION,
    Sample,
    class_names,
    labelled_samples,
    train_samples,
    val_samples,
)

logger = logging.getLogger(__name__)

_LAYOUT = 2
"""Version of the files around the images; `VERSION` keys what is drawn."""

STAMP = "scenes.json"

Count = Annotated[int, Field(ge=1, le=10**8)]


class ScenesConfig(Config):
    """Configuration of a drawn data set. Each has a folder of its own in the cache."""

    train: Count = 24_000
    """Captioned training images."""
    val: Count = 1_000
    """Captioned images of held-out combinations; each caption is true only of its own image."""
    test: Count = 1_980
    """Labelled single objects of trained combinations (99 classes, 20 images each by default)."""
    heldout: Count = 880
    """Labelled single objects of held-out combinations (22 of 121 classes, 40 images each by default)."""
    image_size: Annotated[int, Field(ge=32, le=1024)] = 64
    """Side of the images in pixels."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the images; the held-out combinations do not depend on it."""
    shard_size: Annotated[int, Field(ge=1, le=10_000)] = 3_000
    """Images in a tar."""


def make_scenes(root: str | Path | None = None, config: ScenesConfig | None = None) -> Path:
    """Draw the data set unless it exists, and return its folder, which has one for each split.

    The same configuration gives the same scenes and captions everywhere, and the same bytes with the same Pillow.
    It is drawn in a temporary folder and renamed when it is complete, so an interrupted run leaves no partial data set.
    Other processes wait for the one that draws it.

    Args:
        root: cache folder; the data set gets a folder in it. Default `cache_folder()`.
        config: the configuration.

    Raises:
        DataError: the folder cannot be written, or contains a damaged data set.
    """
    config = config or ScenesConfig()
    cache = Path(root) if root is not None else cache_folder()
    digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()
    final = cache / f"scenes-v{VERSION}.{_LAYOUT}-{digest[:10]}"
    try:
        make_once(final, lambda aside: _draw(aside, config))
    except OSError as error:
        raise DataError(f"{final.parent}: cannot be written ({error}); set VQCLIP_CACHE to another folder") from error
    _check(final, config)
    return final


def _draw(folder: Path, config: ScenesConfig) -> None:
    start, total = time.monotonic(), config.train + config.val + config.test + config.heldout
    logger.info("drawing %d images into %s (once)", total, folder.parent)
    seed, size, shard = config.seed, config.image_size, config.shard_size
    write_captioned(folder / "train", train_samples(seed, config.train, size), shard)
    write_captioned(folder / "val", val_samples(seed, config.val, size), shard)
    for split, count in (("test", config.test), ("heldout", config.heldout)):
        write_labelled(folder / split, labelled_samples(seed, split, count, size), class_names(split), shard)
    files = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        digest = digest_file(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": digest.size, "sha256": digest.sha256}
    stamp = {"version": VERSION, "config": config.model_dump(), "pillow": PIL.__version__, "files": files}
    (folder / STAMP).write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    logger.info("drew %d images in %.1f s", total, time.monotonic() - start)


def _check(folder: Path, config: ScenesConfig) -> None:
    """Check that a data set in the cache has this configuration and is complete, by the sizes of its files."""
    remedy = "delete this folder; it is then drawn again"
    try:
        stamp: dict[str, Any] = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        if stamp["config"] != config.model_dump():
            raise DataError(f"{folder}: {STAMP} is of another configuration; {remedy}")
        for name, facts in stamp["files"].items():
            path = folder / name
            size = path.stat().st_size if path.exists() else 0
            if size != facts["bytes"]:
                raise DataError(f"{path}: has {size} bytes, expected {facts['bytes']}; {remedy}")
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise DataError(f"{folder}: a drawn data set that is not complete ({error!r}); {remedy}") from error


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
    for shards, part in enumerate(_parts(samples, shard_size), 1):
        with (folder / "test" / f"{shards - 1}.tar").open("wb") as file:
            keys = (f"s{index:07d}" for index in itertools.count((shards - 1) * shard_size))
            write_tar(file, (_label_members(key, sample, class_names) for key, sample in zip(keys, part, strict=False)))
    (folder / "test" / "nshards.txt").write_bytes(f"{shards}\n".encode())


def _caption_members(key: str, sample: Sample) -> tuple[str, dict[str, bytes]]:
    assert sample.caption is not None
    size = {name: len(sample.pixels) for name in ("width", "height", "original_width", "original_height")}
    return _members(key, sample, "txt", sample.caption, {"caption": sample.caption, "status": "success", **size})


def _label_members(key: str, sample: Sample, class_names: list[str]) -> tuple[str, dict[str, bytes]]:
    assert sample.label is not None
    return _members(key, sample, "cls", str(sample.label), {"class": class_names[sample.label]})


def _members(key: str, sample: Sample, ending: str, text: str, facts: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    progress.heartbeat()
    facts = {"key": key, **facts, "scene": dataclasses.asdict(sample.scene)}
    return key, {"jpg": jpeg(sample), ending: text.encode(), "json": _json(facts)}


def jpeg(sample: Sample) -> bytes:
    """Encode the image with full colour resolution, so that a small object keeps its colour."""
    buffer = io.BytesIO()
    Image.fromarray(sample.pixels).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def _parts(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    iterator = iter(samples)
    while part := list(itertools.islice(iterator, size)):
        yield part


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
