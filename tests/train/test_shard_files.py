"""Checkpoints that every rank writes: the files of one process, whole or absent, and read back by rows."""

from __future__ import annotations

import contextlib
import errno
import os
from unittest import mock

import pytest

from tests.models import BUSY_RESIDUAL
from tests.ranks import for_each
from tests.train.test_run_store import Store
from tests.train.test_sharding import run_until, tree
from tests.training import run
from vqclip import dist
from vqclip.data.remote import files as remote_files
from vqclip.errors import CheckpointError
from vqclip.io import parts
from vqclip.train import checkpointer

SETTINGS = {"quantizer": BUSY_RESIDUAL, "train__steps": 4, "train__checkpoint_every": 2, "optim__warmup_steps": 1}


def files(place):
    places = sorted((place / "tiny" / "checkpoints").rglob("*"))
    return {str(path.relative_to(place)): path.read_bytes() for path in places if path.is_file()}


def run_counting(settings, cache, stop, shared):
    """Run until a step, as if rank 0 alone saw the run's folder unless it is shared; return how many files it wrote."""
    with contextlib.ExitStack() as stack:
        if not shared:
            stack.enter_context(mock.patch.object(checkpointer, "is_shared", return_value=False))
        written = stack.enter_context(mock.patch.object(parts, "write", wraps=parts.write))
        run_until(settings, cache, stop)
    return written.call_count


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_write_and_read_the_files_of_one(ranks, tmp_path, shards, world_size):
    """Byte for byte, where some ranks have no rows of small tensors, before and after a resume."""
    cache, trees = str(tmp_path / "cache"), {name: tree(tmp_path / name, shards, **SETTINGS) for name in ("all", "one")}
    for stop in (2, 4):
        cases = [(trees[name], cache, stop, name == "all") for name in trees]
        assert ranks(world_size, for_each, run_counting, cases, init=False) == [[3, 3], *[[3, 0]] * (world_size - 1)]
        one, other = files(tmp_path / "all"), files(tmp_path / "one")
        assert len(one) == 7 * stop // 2
        assert one == other


def fail_to_write(settings, cache, damage):
    """Train until rank 1's disk is full, or another process overwrites its rows; return the error."""
    original, calls = parts.write, []

    def write(path, own):
        calls.append(path)
        if len(calls) > 3 and dist.rank() == 1:
            if damage:
                original(path, own)
                os.truncate(path, path.stat().st_size // 2)
                return
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, own)

    with mock.patch.object(parts, "write", write), pytest.raises(CheckpointError) as error:
        run(settings, cache)
    return str(error.value)


@pytest.mark.parametrize("damage", [False, True], ids=["full disk", "overwritten"])
def test_a_rank_that_cannot_write_ends_the_run_on_all(ranks, tmp_path, shards, damage):
    settings = tree(tmp_path, shards, **SETTINGS | {"train__save_in_background": False})
    first, second = ranks(2, fail_to_write, settings, str(tmp_path / "cache"), damage, init=False)
    assert ("are not those that were written" if damage else "No space left") in second
    assert "failed on rank 1, whose message says why" in first or "are not those" in first
    found = files(tmp_path)
    assert {name.split("/")[2] for name in found} == {"step-00000002"}
    ranks(2, run, settings, str(tmp_path / "cache"), init=False)
    assert "tiny/checkpoints/step-00000004/manifest.json" in files(tmp_path)


def look(place, own):
    return checkpointer.is_shared(place / str(dist.rank()) if own else place)


def test_a_folder_of_each_machine_is_not_shared(ranks, tmp_path):
    assert ranks(2, for_each, look, [(tmp_path, False), (tmp_path, True)]) == [[True, False]] * 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def run_at_url(settings, cache, machines):
    """Run at a URL in two starts, each on new disks; return how many files this rank wrote, and what is there."""
    store = Store(skip_instance_cache=True)
    store.failing = {}
    own = f"{cache}-{os.environ['RANK']}" if machines else cache
    with (
        mock.patch.object(remote_files, "object_store", return_value=store),
        mock.patch.object(parts, "write", wraps=parts.write) as written,
    ):
        run_until(settings, own, 2)
        run_until(settings, f"{own}-new", 4)
    begin = "/bucket/runs/tiny/checkpoints/step-00000004/"
    found = {name.removeprefix(begin): file.getvalue() for name, file in store.store.items() if name.startswith(begin)}
    return written.call_count, found


@pytest.mark.slow
@pytest.mark.parametrize("machines", [False, True], ids=["one machine", "two machines"])
def test_runs_at_urls_have_the_same_files(ranks, tmp_path, shards, machines):
    """Ranks of one machine write into its copy of the run; those of several send their rows to rank 0."""
    settings, cache = SETTINGS | {"run__folder": "s3://bucket/runs"}, str(tmp_path / "cache")
    here = tree(tmp_path, shards, **SETTINGS)
    ranks(2, run_until, here, cache, 4, init=False)
    found = ranks(2, run_at_url, tree(tmp_path, shards, **settings), cache, machines, init=False)
    assert [number for number, _ in found] == [6, 0 if machines else 6]
    begin = "tiny/checkpoints/step-00000004/"
    expected = {name.removeprefix(begin): each for name, each in files(tmp_path).items() if name.startswith(begin)}
    assert len(expected) == 7
    assert found[0][1] == expected
