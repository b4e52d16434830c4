"""SIGKILL at random moments of a run with weights in shards: what is saved is whole, and resumes to the same bits.

One run on two ranks saves after every step. It is killed again and again, and continues each time: in a save, at a
moment drawn uniformly over the time from its beginning to the rename of its folder, and in a step. Rank 0, rank 1 or
both are killed. After every kill each checkpoint has the bytes of the run that nothing disturbed, and so has all that
is left at the end.

    VQCLIP_SHARD_KILLS=40,20 OMP_NUM_THREADS=1 python -m pytest -m faults tests/faults/test_shard_kills.py -s
"""

from __future__ import annotations

import collections
import os
import random
import signal
import threading
import time
from unittest import mock

import pytest

from tests.data.making import caption_shards
from tests.models import BUSY_RESIDUAL
from tests.ranks import RankError
from tests.train.test_sharding import run_until, tree
from tests.training import metrics
from vqclip import checkpoint, dist
from vqclip.train.checkpointer import Checkpointer
from vqclip.train.step import TrainStep

SAVES, STEPS_HIT = map(int, os.environ.get("VQCLIP_SHARD_KILLS", "40,20").split(","))
LAST = 2 * (SAVES + STEPS_HIT) + 4

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600 + 60 * (SAVES + STEPS_HIT))]


def run_timed(settings, cache, stop):
    """Run until a step; return the seconds of each save up to its rename, and of each step."""
    begun, saves, steps = {}, [], []
    save, write, step = Checkpointer.save, checkpoint.save, TrainStep.__call__

    def timed_save(self, done, *args, **kwargs):
        begun[done] = time.monotonic()
        save(self, done, *args, **kwargs)

    def timed_write(folder, done, *args):
        path = write(folder, done, *args)
        saves.append(time.monotonic() - begun[done])
        return path

    def timed_step(self, batch, number):
        start = time.monotonic()
        result = step(self, batch, number)
        steps.append(time.monotonic() - start)
        return result

    with (
        mock.patch.object(Checkpointer, "save", timed_save),
        mock.patch.object(checkpoint, "save", timed_write),
        mock.patch.object(TrainStep, "__call__", timed_step),
    ):
        run_until(settings, cache, stop)
    return saves, steps


def run_to_death(settings, cache, whom, owner, name, number, after_s):
    """Run, and kill ranks some time after the beginning of the save or of the step with a number."""
    original = getattr(owner, name)

    def die_soon(self, *args, **kwargs):
        if (args[1] if owner is TrainStep else args[0]) >= number and dist.rank() in whom:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return original(self, *args, **kwargs)

    with mock.patch.object(owner, name, die_soon):
        run_until(settings, cache, LAST)


def saved(folder):
    """Bytes of the files of each checkpoint, by step."""
    return {
        checkpoint.step_of(path): {
            str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()
        }
        for path in checkpoint.checkpoints(folder / "tiny" / "checkpoints")
    }


def without_times(folder):
    return [{name: value for name, value in line.items() if "speed" not in name} for line in metrics(folder)]


def test_killed_saves_and_steps_resume_to_the_same_bits(ranks, tmp_path):
    shards, cache = caption_shards(tmp_path / "shards", counts=(17, 13)), str(tmp_path / "cache")
    settings = {"quantizer": BUSY_RESIDUAL, "train__steps": LAST, "train__checkpoint_every": 1}
    settings |= {"train__keep_checkpoints": LAST, "train__precision": "fp32"}
    whole = tree(tmp_path / "whole", shards, **settings)
    saves, steps = ranks(2, run_timed, whole, cache, LAST, init=False, timeout=600.0)[0]
    expected, limits = (
        saved(tmp_path / "whole"),
        {"save": max(sorted(saves)[LAST // 2], 0.05), "train": 2 * sorted(steps)[LAST // 2]},
    )
    print({name: f"{each:.3f} s" for name, each in limits.items()})
    disturbed = tree(tmp_path / "disturbed", shards, **settings)
    draw, hits = random.Random("kills of shards"), collections.Counter()
    kinds = ["save"] * SAVES + ["train"] * STEPS_HIT
    draw.shuffle(kinds)
    for kind in kinds:
        newest = max(saved(tmp_path / "disturbed"), default=0)
        whom, after_s = draw.choice([(0,), (1,), (0, 1)]), draw.uniform(0, limits[kind])
        owner, name = (Checkpointer, "save") if kind == "save" else (TrainStep, "__call__")
        number = newest + draw.randrange(2) + (kind == "save")
        with pytest.raises(RankError):
            ranks(2, run_to_death, disturbed, cache, whom, owner, name, number, after_s, init=False)
        left = [path.name[:5] for path in (tmp_path / "disturbed" / "tiny" / "checkpoints").glob(".*")]
        found = saved(tmp_path / "disturbed")
        hits[f"{kind}, {'a save was unfinished' if left else 'none was'}"] += 1
        assert [step for step in found if found[step] != expected[step]] == []
        print(
            f"{kind} {number}, {after_s:.3f} s, ranks {whom}: {newest} -> {max(found, default=0)}, {left}", flush=True
        )
    ranks(2, run_until, disturbed, cache, LAST, init=False, timeout=600.0)
    print(dict(hits))
    assert saved(tmp_path / "disturbed") == expected
    assert without_times(tmp_path / "disturbed") == without_times(tmp_path / "whole")
    assert not list((tmp_path / "disturbed" / "tiny" / "checkpoints").glob(".*"))
