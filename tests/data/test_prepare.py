import contextlib

import pytest

from tests.data.loading import open_data
from tests.data.making import caption_members, caption_shards, make_files, write_tar
from vqclip import dist
from vqclip.data import CaptionShardsConfig, FolderConfig, ScenesSourceConfig, prepare
from vqclip.data.tars import make as tars
from vqclip.errors import DataError
from vqclip.scenes import ScenesConfig, make

ALL = [f"{n:05d}.tar" for n in range(5)]


@pytest.fixture
def folder(tmp_path):
    """A folder with five shards in the folder ``shards``."""
    caption_shards(tmp_path / "shards", (1,) * 5)
    return tmp_path


@contextlib.contextmanager
def cache_in(folder, caches="aaaa"):
    """On a rank: a cache of the name of its letter, and rounds of no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VQCLIP_CACHE", str(folder / caches[dist.rank()]))
        patch.setattr(prepare, "_ROUND_S", 0.0)
        yield patch


def counting(patch, owner, name):
    """Return the first arguments of the calls of a function from here on."""
    calls, original = [], getattr(owner, name)
    patch.setattr(owner, name, lambda *args: (calls.append(args[0] if args else None), original(*args))[1])
    return calls


def prepare_on_rank(folder, caches):
    """What this rank indexes, and how often ranks meet."""
    with cache_in(folder, caches) as patch:
        indexed = counting(patch, tars, "scan_shard")
        meetings = counting(patch, dist, "raise_on_all_ranks")
        (source,) = prepare.open_sources([CaptionShardsConfig(path=str(folder / "shards"))])
        assert len(source) == 5
        dist.barrier()
        assert not list((folder / caches[dist.rank()]).glob(".tmp-*"))
        return [shard.name for shard in indexed], len(meetings)


@pytest.mark.parametrize("caches", ["abab", "aab"])
def test_each_cache_is_filled_once(ranks, folder, caches):
    results = ranks(len(caches), prepare_on_rank, folder, caches)
    for cache in set(caches):
        shares = [names for (names, _), where in zip(results, caches, strict=True) if where == cache]
        assert sorted(name for share in shares for name in share) == ALL
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_meet_after_every_few_shards(ranks, folder):
    # Pins, lists, opening; three of five shards on rank 0, in rounds of no time; the end. Then the index is checked.
    for expected in (4 + 4, 4 + 2):
        assert {count for _, count in ranks(2, prepare_on_rank, folder, "aa")} == {expected}


def prepare_a_broken_one(folder):
    with cache_in(folder), pytest.raises(DataError) as error:
        prepare.open_sources([CaptionShardsConfig(path=str(folder / "shards"))])
    return str(error.value)


@pytest.mark.parametrize("broken", [0, 4])
def test_an_error_in_any_round_is_everybodys(ranks, folder, broken):
    (folder / "shards" / ALL[broken]).write_bytes(b"")
    for message in ranks(2, prepare_a_broken_one, folder):
        assert f"{ALL[broken]}: " in message


def open_where_an_index_is_lost(folder):
    """Message of the error of this rank, where rank 1 cannot open the data that all ranks have prepared."""
    opened = prepare.open_source

    def lose(*args, **options):
        if dist.is_main():  # it has opened them before rank 1 loses a shard
            return [0] * 5
        (folder / "shards" / ALL[0]).unlink()
        return opened(*args, **options)

    with cache_in(folder, "ab") as patch:
        patch.setattr(prepare, "open_source", lose)
        with pytest.raises(DataError) as error:
            open_data(folder, sources=(CaptionShardsConfig(path=str(folder / "shards" / "{00000..00004}.tar")),))
        return str(error.value)


def test_an_error_of_one_rank_that_opens_data_is_everybodys(ranks, folder):
    for message in ranks(2, open_where_an_index_is_lost, folder):
        assert "data.sources[0]" in message
        assert ALL[0] in message


def draw_on_rank(folder, caches):
    with cache_in(folder, caches) as patch:
        drawn = counting(patch, make, "_draw")
        prepare.open_sources([ScenesSourceConfig(drawing=ScenesConfig(train=3, val=1, test=1, heldout=1))])
        return len(drawn)


def test_each_cache_is_drawn_into_once(ranks, tmp_path):
    assert ranks(4, draw_on_rank, tmp_path, "abba") == [1, 1, 0, 0]


def prepare_where_nothing_can_be_left(folder):
    with cache_in(folder) as patch:
        source = CaptionShardsConfig(path=str(folder / "shards"))
        if dist.is_main():
            source.build()
        dist.barrier()

        def refuse(*_, **__):
            raise PermissionError(13, "Permission denied")

        patch.setattr("pathlib.Path.mkdir", refuse)
        return len(prepare.open_sources([source])[0])


def test_a_full_cache_may_be_read_only(ranks, tmp_path):
    write_tar(tmp_path / "shards" / "0.tar", caption_members(0, 1))
    assert ranks(2, prepare_where_nothing_can_be_left, tmp_path) == [1, 1]


def test_notes_are_logged_once(tmp_path, caplog):
    make_files(tmp_path, "cat/0.png dog/0.png dog/1.psd", b"an image")
    caplog.set_level("INFO", "vqclip.data")
    for _ in range(2):
        source = prepare.open_source(FolderConfig(path=str(tmp_path)))
    assert len(source.notes) == 1
    assert [text for text in caplog.messages if ".psd" in text] == [f"{tmp_path}: {source.notes[0]}"]


def test_temporary_files_of_killed_jobs_are_removed(tmp_path, cache):
    source = CaptionShardsConfig(path=str(caption_shards(tmp_path / "shards", (1,))))
    prepare.open_sources([source])
    folders = [cache / "index", *(cache / "index").glob("*.parts")]
    assert len(folders) == 2
    for folder in folders:
        (folder / ".tmp-killed").touch()
    prepare.open_sources([source])
    assert not list(cache.rglob(".tmp-*"))
