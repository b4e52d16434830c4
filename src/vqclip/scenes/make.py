"""Draw the whole data set once, into a cache folder, and find it there the next time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Annotated, Any

import PIL
from pydantic import Field

from vqclip.config import Config
from vqclip.errors import DataError
from vqclip.io.cache import cache_folder
from vqclip.scenes.shards import write_captioned, write_labelled
from vqclip.scenes.splits import VERSION, class_names, labelled_samples, train_samples, val_samples

logger = logging.getLogger(__name__)

STAMP = "scenes.json"

Count = Annotated[int, Field(ge=1, le=10**8)]


class ScenesConfig(Config):
    """What to draw. Every different configuration has a folder of its own in the cache."""

    train: Count = 24_000
    """Captioned training pictures."""
    val: Count = 1_000
    """Captioned pictures of held-out combinations, each caption true of its own picture alone."""
    test: Count = 1_980
    """Labelled single objects of trained combinations (99 classes, 20 pictures each by default)."""
    heldout: Count = 880
    """Labelled single objects of held-out combinations (22 of 121 classes, 40 pictures each by default)."""
    image_size: Annotated[int, Field(ge=32, le=1024)] = 64
    """Side of the pictures in pixels."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Another seed, other pictures; the held-out combinations stay."""
    shard_size: Annotated[int, Field(ge=1, le=10_000)] = 3_000
    """Pictures in a tar."""


@dataclasses.dataclass(frozen=True)
class ScenesPaths:
    """Where the data set lies: `train` and `val` hold caption shards, `test` and `heldout` clip_benchmark folders."""

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
    """Draw the data set unless it is there already.

    The same configuration gives the same scenes and captions everywhere, and the same bytes with the same Pillow.
    It is drawn aside and renamed when it is whole, so an interrupted run leaves nothing half-made, and of several
    processes that draw at once the first to finish wins. In a multi-process job let one rank call this first, only to
    save work.

    Args:
        root: cache folder; the data set gets a folder in it. Default `cache_folder()`.
        config: what to draw.

    Raises:
        DataError: the folder cannot be written, or what lies there is damaged.
    """
    config = config or ScenesConfig()
    cache = Path(root) if root is not None else cache_folder()
    final = cache / folder_name(config)
    if not final.exists():
        _draw_aside(final, config)
    _check(final, config)
    return ScenesPaths.under(final)


def folder_name(config: ScenesConfig) -> str:
    """Return the data set's name in the cache: `scenes-v<version>-<hash of the configuration>`."""
    return f"scenes-v{VERSION}-{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:10]}"


def _draw_aside(final: Path, config: ScenesConfig) -> None:
    aside = final.with_name(f".{final.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        aside.mkdir(parents=True)
        _remove_abandoned(final)
    except OSError as error:
        raise DataError(f"{final.parent}: cannot be written ({error}); set VQCLIP_CACHE to another folder") from error
    try:
        start = time.monotonic()
        total = config.train + config.val + config.test + config.heldout
        logger.info("drawing %d pictures into %s (once)", total, final)
        _draw(ScenesPaths.under(aside), config)
        _write_stamp(aside, config)
        try:
            aside.rename(final)
        except OSError:
            if not final.exists():  # else another process was first; what it drew is the same
                raise
        logger.info("drew %d pictures in %.1f s", total, time.monotonic() - start)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _draw(paths: ScenesPaths, config: ScenesConfig) -> None:
    seed, size, shard = config.seed, config.image_size, config.shard_size
    write_captioned(paths.train, train_samples(seed, config.train, size), shard)
    write_captioned(paths.val, val_samples(seed, config.val, size), shard)
    for folder, split, count in ((paths.test, "test", config.test), (paths.heldout, "heldout", config.heldout)):
        write_labelled(folder, labelled_samples(seed, split, count, size), class_names(split), shard)


def _write_stamp(folder: Path, config: ScenesConfig) -> None:
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    stamp = {"version": VERSION, "config": config.model_dump(), "pillow": PIL.__version__, "files": files}
    with (folder / STAMP).open("w", encoding="utf-8") as file:
        json.dump(stamp, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _check(folder: Path, config: ScenesConfig) -> None:
    """See that a data set found in the cache is what was asked for, and whole (by size; hashes are in the stamp)."""
    remedy = "delete this folder and it is drawn again"
    try:
        stamp: dict[str, Any] = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        if stamp["config"] != config.model_dump():
            raise DataError(f"{folder}: its stamp {STAMP} is of another configuration; {remedy}")
        for name, facts in stamp["files"].items():
            path = folder / name
            size = path.stat().st_size if path.exists() else 0
            if size != facts["bytes"]:
                raise DataError(f"{path}: has {size} bytes, expected {facts['bytes']}; {remedy}")
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise DataError(f"{folder}: a drawn data set that is not whole ({error!r}); {remedy}") from error


def _remove_abandoned(final: Path, after_s: float = 24 * 3600) -> None:
    """Remove what killed processes left behind; a day old, so that nobody is still drawing it."""
    for folder in final.parent.glob(f".{final.name}.*.tmp"):
        if time.time() - folder.stat().st_mtime > after_s:
            shutil.rmtree(folder, ignore_errors=True)
