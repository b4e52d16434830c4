"""Counts of samples that others have written beside shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data import serving
from tests.data.serving import FaultyServer
from tests.data.tars.test_open import remote
from vqclip.data.tars.open import known_counts
from vqclip.errors import StorageError


def folder(path: Path, **files: object) -> list[Path]:
    path.mkdir()
    shards = [path / f"{n:05d}.tar" for n in range(3)]
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return shards


STATS = {f"{n:05d}_stats": {"count": 9, "successes": n + 4} for n in range(3)}
SIZES = {f"{n:05d}.tar": n + 4 for n in range(3)}
WIDS = {"wids_version": 1, "shardlist": [{"url": f"x/{name}?k=1", "nsamples": size} for name, size in SIZES.items()]}


@pytest.mark.parametrize(
    "files",
    [
        STATS,
        {"sizes": SIZES},
        {"index": WIDS},
        {"shardindex": WIDS},
        {"sizes": "[" * 100_000, "index": {"shardlist": [None, {"url": 3}]}, **STATS},
        {"sizes": SIZES | {"00001.tar": -1}, **STATS},
    ],
)
def test_known(tmp_path: Path, files: dict[str, object]) -> None:
    assert known_counts(folder(tmp_path / "a", **files)) == [4, 5, 6]


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"00000_stats": {"successes": 4}, "00001_stats": {"successes": 5}},
        {**STATS, "00001_stats": {"successes": True}},
        {**STATS, "00001_stats": {"successes": 1e3}},
        {**STATS, "00001_stats": {"successes": 2**70}},
        {**STATS, "00001_stats": [4]},
        {"sizes": {"00000.tar": 4}},
        {"index": {"shardlist": "x"}},
    ],
)
def test_unknown(tmp_path: Path, files: dict[str, object]) -> None:
    assert known_counts(folder(tmp_path / "a", **files)) is None
    assert known_counts([]) is None


def test_at_urls(tmp_path: Path, server: FaultyServer, pauses: list[float]) -> None:
    shards = folder(tmp_path / "a", **STATS)
    url = server.add(tmp_path / "a")
    there = remote(*(f"{url}/{path.name}?key=secret" for path in shards))
    assert known_counts(there) == [4, 5, 6]
    server.for_ever["/00001_stats.json"] = serving.status(404)
    assert known_counts(there) is None
    server.for_ever["/00001_stats.json"] = serving.status(503)
    with pytest.raises(StorageError, match="00001_stats.json.*HTTP 503") as error:
        known_counts(there)
    assert "secret" not in str(error.value)
