import os
from pathlib import Path
from typing import Any

import pytest

from tests.data.loading import open_data
from tests.data.making import caption_members, caption_shards, write_tar
from tests.ranks import RankPool
from vqclip import dist
from vqclip.data import CaptionShardsConfig, FolderConfig, ScenesSourceConfig, prepare
from vqclip.data.tars import make as tars
from vqclip.errors import DataError
from vqclip.scenes import ScenesConfig, make


def indexed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that this rank indexes from here on."""
    names: list[str] = []
    scan = tars.scan_shard
    monkeypatch.setattr(tars, "scan_shard", lambda shard, *rest: (names.append(shard.name), scan(shard, *rest))[1])
    return names


def prepare_on_rank(folder: Path, caches: tuple[str, ...]) -> tuple[list[str], int]:
    """What this rank indexes, and how often ranks meet."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        cache = folder / caches[dist.rank()]
        monkeypatch.setenv("VQCLIP_CACHE", str(cache))
        monkeypatch.setattr(prepare, "_ROUND_S", 0.0)
        names = indexed(monkeypatch)
        meetings = []
        meet = dist.raise_on_all_ranks
        monkeypatch.setattr(dist, "raise_on_all_ranks", lambda: (meetings.append(1), meet())[1])
        (source,) = prepare.open_sources([CaptionShardsConfig(path=str(folder / "shards"))])
        assert len(source) == 5
        dist.barrier()
        assert not list(cache.glob("ranks-*"))
        return names, len(meetings)


ALL = [f"{n:05d}.tar" for n in range(5)]


@pytest.mark.parametrize("caches", ["aa", "abab", "abc", "aab"])
def test_each_cache_is_filled_once(ranks: RankPool, tmp_path: Path, caches: str) -> None:
    caption_shards(tmp_path / "shards", (1,) * 5)
    results = ranks(len(caches), prepare_on_rank, tmp_path, tuple(caches))
    for cache in set(caches):
        shares = [names for (names, _), where in zip(results, caches, strict=True) if where == cache]
        assert sorted(name for share in shares for name in share) == ALL
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_meet_after_every_few_shards(ranks: RankPool, tmp_path: Path) -> None:
    caption_shards(tmp_path / "shards", (1,) * 5)
    meetings = {count for _, count in ranks(2, prepare_on_rank, tmp_path, ("a", "a"))}
    assert meetings == {4 + 4}  # pins, lists, opening; three of five shards on rank 0, in rounds of no time; the end
    meetings = {count for _, count in ranks(2, prepare_on_rank, tmp_path, ("a", "a"))}
    assert meetings == {4 + 2}  # the index is checked


def prepare_a_broken_one(folder: Path) -> str:
    os.environ["VQCLIP_CACHE"] = str(folder / "cache")
    prepare._ROUND_S = 0.0
    try:
        prepare.open_sources([CaptionShardsConfig(path=str(folder / "shards"))])
    except DataError as error:
        return str(error)
    finally:
        prepare._ROUND_S = 10.0
    return ""


@pytest.mark.parametrize("broken", [0, 4])
def test_an_error_in_any_round_is_everybodys(ranks: RankPool, tmp_path: Path, broken: int) -> None:
    folder = caption_shards(tmp_path / "shards", (1,) * 5)
    (folder / ALL[broken]).write_bytes(b"")
    for message in ranks(2, prepare_a_broken_one, tmp_path):
        assert f"{ALL[broken]}: " in message


def open_where_an_index_is_lost(folder: Path) -> str:
    """Message of the error of this rank, where rank 1 cannot open the data that all ranks have prepared."""

    opened = prepare.open_source

    def lose(*args: Any, **options: Any) -> Any:
        if dist.is_main():  # it has opened them before rank 1 loses a shard
            return [0] * 5
        (folder / "shards" / ALL[0]).unlink()
        return opened(*args, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VQCLIP_CACHE", str(folder / f"cache{dist.rank()}"))
        monkeypatch.setattr(prepare, "open_source", lose)
        try:
            open_data(folder, sources=(CaptionShardsConfig(path=str(folder / "shards" / "{00000..00004}.tar")),))
        except DataError as error:
            return str(error)
    return ""


def test_an_error_of_one_rank_that_opens_data_is_everybodys(ranks: RankPool, tmp_path: Path) -> None:
    caption_shards(tmp_path / "shards", (1,) * 5)
    for message in ranks(2, open_where_an_index_is_lost, tmp_path):
        assert "data.sources[0]" in message
        assert ALL[0] in message


def draw_on_rank(folder: Path, caches: tuple[str, ...]) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VQCLIP_CACHE", str(folder / caches[dist.rank()]))
        drawn = []
        draw = make._draw
        monkeypatch.setattr(make, "_draw", lambda *arguments: (drawn.append(1), draw(*arguments)))
        prepare.open_sources([ScenesSourceConfig(drawing=ScenesConfig(train=3, val=1, test=1, heldout=1))])
        return len(drawn)


def test_each_cache_is_drawn_into_once(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(4, draw_on_rank, tmp_path, tuple("abba")) == [1, 1, 0, 0]


def test_a_full_cache_may_be_read_only(ranks: RankPool, tmp_path: Path) -> None:
    write_tar(tmp_path / "shards" / "0.tar", caption_members(0, 1))
    assert ranks(2, prepare_where_nothing_can_be_left, tmp_path) == [1, 1]


def prepare_where_nothing_can_be_left(folder: Path) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VQCLIP_CACHE", str(folder / "cache"))
        source = CaptionShardsConfig(path=str(folder / "shards"))
        if dist.is_main():
            source.build()
        dist.barrier()

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refuse)
        return len(prepare.open_sources([source])[0])


def test_notes_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("cat/0.png", "dog/0.png", "dog/1.psd"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"an image")
    caplog.set_level("INFO", "vqclip.data")
    for _ in range(2):
        source = prepare.open_source(FolderConfig(path=str(tmp_path)))
    assert len(source.notes) == 1
    assert [text for text in caplog.messages if ".psd" in text] == [f"{tmp_path}: {source.notes[0]}"]


def test_temporary_files_of_killed_jobs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    source = CaptionShardsConfig(path=str(caption_shards(tmp_path / "shards", (1,))))
    prepare.open_sources([source])
    folders = [tmp_path / "cache" / "index", *(tmp_path / "cache" / "index").glob("*.parts")]
    assert len(folders) == 2
    for folder in folders:
        (folder / ".tmp-killed").touch()
    prepare.open_sources([source])
    assert not list((tmp_path / "cache").rglob(".tmp-*"))
