"""Draw the whole data set once, into the cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Annotated, Any

import PIL
from pydantic import Field

from vqclip.config import Config
from vqclip.errors import DataError
from vqclip.io.atomic import digest_file, make_once
from vqclip.io.files import cache_folder
from vqclip.scenes.shards import write_captioned, write_labelled
from vqclip.scenes.splits import VERSION, class_names, labelled_samples, train_samples, val_samples

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


@dataclasses.dataclass(frozen=True)
class ScenesPaths:
    """Folders of a data set: caption shards in `train` and `val`, clip_benchmark's layout in `test` and `heldout`."""

    root: Path
    train: Path
    val: Path
    test: Path
    heldout: Path

    @classmethod
    def under(cls, root: Path) -> ScenesPaths:
        """Return the paths of a data set in `root`."""
        return cls(root, root / "train", root / "val", root / "test", root / "heldout")


def make_scenes(root: str | Path | None = None, config: ScenesConfig | None = None) -> ScenesPaths:
    """Draw the data set unless it exists.

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
    final = cache / folder_name(config)
    try:
        make_once(final, lambda aside: _draw(aside, config))
    except OSError as error:
        raise DataError(f"{final.parent}: cannot be written ({error}); set VQCLIP_CACHE to another folder") from error
    _check(final, config)
    return ScenesPaths.under(final)


def folder_name(config: ScenesConfig) -> str:
    """Return the data set's name in the cache: `scenes-v<version>.<layout>-<hash of the configuration>`."""
    return f"scenes-v{VERSION}.{_LAYOUT}-{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:10]}"


def _draw(folder: Path, config: ScenesConfig) -> None:
    start, total = time.monotonic(), config.train + config.val + config.test + config.heldout
    logger.info("drawing %d images into %s (once)", total, folder.parent)
    paths, seed, size, shard = ScenesPaths.under(folder), config.seed, config.image_size, config.shard_size
    write_captioned(paths.train, train_samples(seed, config.train, size), shard)
    write_captioned(paths.val, val_samples(seed, config.val, size), shard)
    for part, split, count in ((paths.test, "test", config.test), (paths.heldout, "heldout", config.heldout)):
        write_labelled(part, labelled_samples(seed, split, count, size), class_names(split), shard)
    _write_stamp(folder, config)
    logger.info("drew %d images in %.1f s", total, time.monotonic() - start)


def _write_stamp(folder: Path, config: ScenesConfig) -> None:
    digests = {path: digest_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {
        path.relative_to(folder).as_posix(): {"bytes": digest.size, "sha256": digest.sha256}
        for path, digest in digests.items()
    }
    stamp = {"version": VERSION, "config": config.model_dump(), "pillow": PIL.__version__, "files": files}
    (folder / STAMP).write_text(json.dumps(stamp, indent=1), encoding="utf-8")


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
