"""Training on shards that are read in chunks from a server: killed, with faults of the server, it is the local run."""

import contextlib
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import caption_shards
from tests.data.serving import FaultyServer, reset, serving, status, truncated
from tests.faults.jobs import global_batches, job
from tests.training import all_equal, run_tree, timeless, weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

STEPS = 40
EVERY = 5


def tree_in(folder: Path, source: dict[str, Any], **changes: Any) -> dict[str, Any]:
    tree = run_tree(folder, Path(), train__steps=STEPS, train__checkpoint_every=EVERY, train__precision="fp32")
    tree["data"] |= {"sources": [{"kind": "shards", **source}], "workers": 2}
    tree["data"]["order"] = {"kind": "windowed", "chunk": 3, "window": 4}
    tree["run"]["timeout_s"] = 120.0
    return tree | changes


def figures(folder: Path) -> list[dict[str, Any]]:
    """Metrics of each step, without times."""
    found = timeless(folder)
    assert len(found) == STEPS
    assert all("loss/total" in line for line in found)
    return found


def test_a_killed_run_on_a_server_is_the_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    shards = caption_shards(tmp_path / "shards", (17, 13, 6))
    local, remote = tmp_path / "local", tmp_path / "remote"
    with job(local / "job", tree_in(local, {"path": str(shards)}), {}) as running:
        assert running.end()[0] == 0, running.output
    draw = random.Random(22)
    with serving() as server:
        url = server.add(shards)
        size = sum(map(len, server.files.values()))
        options = {"cache_gib": 1.2 * size / 2**30, "tries": 8, "total_s": 60.0}
        tree = tree_in(remote, {"path": f"{url}/{{00000..00002}}.tar", "remote": options})
        for goal in (3, 11, 19, 30):
            disturb(server, draw)
            with job(remote / "job", tree, {"each_step_s": 0.1}) as running:
                running.wait_for_mark(f"step-{goal}-0")
                pids = running.left() if goal != 19 else running.ranks()[:1]
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):  # ended with the one before it
                        os.kill(pid, signal.SIGKILL)
                if goal == 11:
                    shutil.rmtree(remote / "job" / "cache" / "chunks", ignore_errors=True)
        with job(remote / "job", tree, {}) as running:
            assert running.end()[0] == 0, running.output
    one, other = (global_batches(folder / "job" / "records.jsonl") for folder in (local, remote))
    assert sorted(one) == list(range(STEPS))
    assert one == other
    assert figures(local) == figures(remote)
    assert all_equal(weights(local, STEPS), weights(remote, STEPS))


def disturb(server: FaultyServer, draw: random.Random) -> None:
    for name in server.files:
        server.faults[name] = [draw.choice([status(503), reset, truncated]) for _ in range(3)]
