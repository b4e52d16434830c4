"""Two ranks as two machines without a shared disk: the run folder on rank 0's disk, or in a bucket.

Each rank has a cache folder, and so a copy of the run, of its own. The job is killed at random moments, half of them
during uploads; the same command is given until it ends; sometimes rank 0's disk is lost, or the machines change places.
What comes out is compared, file by file, with a run that nothing disturbed. Draws are keyed by the number of the kill.

    VQCLIP_KILLS=50 python -m pytest -m faults tests/faults/test_nodes.py -s
"""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data import serving
from tests.models import BUSY_RESIDUAL
from tests.training import run_tree
from vqclip import checkpoint
from vqclip.runlog.metrics import read_metrics
from vqclip.train.run_store import copy_run

KILLS = int(os.environ.get("VQCLIP_KILLS", "8"))
STEPS = 24

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600 + 90 * KILLS)]


@pytest.fixture
def bucket(monkeypatch) -> Iterator[Any]:
    with serving.s3(monkeypatch, "nodes") as (files, _):
        yield files
        files.rm("nodes", recursive=True)


class Machines:
    """Two machines; `start` gives both the command, each with its own disk."""

    def __init__(self, folder: Path, shards: Path, place: str = ""):
        self.folder, self.place, self.disks = folder, place, [folder / "disk-a", folder / "disk-b"]
        self.shards, self.marks = shards, folder / "marks"
        self.log = folder / "output"
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def start(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        shutil.rmtree(self.marks, ignore_errors=True)
        self.marks.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = []
        for rank, disk in enumerate(self.disks):
            disk.mkdir(exist_ok=True)
            changes = {"train__steps": STEPS, "train__checkpoint_every": 2, "train__precision": "fp32"}
            tree = run_tree(self.place or disk / "runs", self.shards, BUSY_RESIDUAL, **changes)
            tree["train"]["keep_every"] = 8
            file = self.folder / f"config-{rank}.json"
            file.write_text(json.dumps(tree))
            settings = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            settings |= {"VQCLIP_CACHE": disk, "MARKS": self.marks, "OMP_NUM_THREADS": 1}
            with self.log.open("ab") as log:
                command = [sys.executable, "-m", "tests.faults.node", str(file)]
                environment = os.environ | {name: str(value) for name, value in settings.items()}
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        try:
            yield ranks
        finally:
            for each in ranks:
                each.kill()
                each.wait()

    def finish(self, limit_s: float = 300.0) -> list[int]:
        with self.start() as ranks:
            return [each.wait(limit_s) for each in ranks]

    def kill(self, number: int, start_s: float) -> str:
        """Start the job and kill it at a moment drawn by its number: in its start, a step, or an upload; say when."""
        draw = random.Random(f"kill {number}")
        what = ("upload", "step", "upload", "start")[number % 4]
        what = "step" if what == "upload" and not self.place else what
        moment, count = draw.uniform(0.2, 1.0) * start_s, draw.randrange(1, 30 if what == "upload" else 6)
        with self.start() as ranks:
            begun = time.monotonic()
            while all(each.poll() is None for each in ranks):
                if what == "start" and time.monotonic() - begun >= moment:
                    break
                if what != "start" and len(list(self.marks.glob(f"{what}-0-*"))) >= count:
                    time.sleep(draw.uniform(0, 0.04))
                    break
                time.sleep(0.002)
            ended = [each.poll() for each in ranks]
            for each in ranks:
                each.kill()
        assert {0, 1, 2}.isdisjoint(ended), self.output
        return f"{what} {round(moment, 1) if what == 'start' else count}"

    @property
    def output(self) -> str:
        return " ".join(self.log.read_text(errors="replace").split())  # lines are broken at a width that paths change


def stored(bucket: Any) -> list[str]:
    """The steps of complete checkpoints in the bucket."""
    return [name.split("/")[-2] for name in bucket.find("nodes/runs/tiny") if name.endswith("manifest.json")]


def digests(run: Path) -> dict[str, Any]:
    """Every checkpoint with the checksums of its files, and the losses of all steps."""
    found: dict[str, Any] = {
        path.name: json.loads((checkpoint.verify(path) / "manifest.json").read_text())["files"]
        for path in checkpoint.checkpoints(run / "checkpoints")
    }
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss/total" in line]
    return found | {"losses": [(line["step"], line["loss/total"]) for line in lines]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards):
    machines = Machines(tmp_path_factory.mktemp("whole"), shards)
    begun = time.time()
    assert machines.finish() == [0, 0], machines.output
    start_s = min(path.stat().st_mtime for path in machines.marks.iterdir()) - begun
    run = machines.disks[0] / "runs" / "tiny"
    assert not (machines.disks[1] / "runs" / "tiny" / "checkpoints").exists()
    return digests(run), start_s


def test_kills_with_the_folder_on_the_disk_of_rank_0(tmp_path, shards, whole):
    machines = Machines(tmp_path, shards)
    for number in range(KILLS // 2):
        print(machines.kill(number, whole[1]))
    assert machines.finish() == [0, 0], machines.output
    assert digests(machines.disks[0] / "runs" / "tiny") == whole[0]

    machines.disks.reverse()  # rank 0 is now where no checkpoint is
    assert machines.finish() == [2, 2]
    assert "the machines do not share the folder, and another one has become the first" in machines.output


def test_kills_with_the_folder_in_a_bucket(tmp_path, shards, whole, bucket):
    machines = Machines(tmp_path / "m", shards, "s3://nodes/runs")
    for number in range(KILLS):
        print(machines.kill(number, whole[1]), stored(bucket))
        if number % 3 == 1:
            machines.disks.reverse()
        if number % 3 == 2:
            shutil.rmtree(machines.disks[0])
    assert machines.finish() == [0, 0], machines.output
    bucket.get("nodes/runs/tiny/", f"{tmp_path}/copy/", recursive=True)
    assert digests(tmp_path / "copy") == whole[0]
    newest = checkpoint.checkpoints(copy_run("s3://nodes/runs/tiny", tmp_path / "newest") / "checkpoints")
    assert [checkpoint.step_of(path) for path in newest] == [STEPS]


def test_two_jobs_on_one_bucket(tmp_path, shards, bucket, monkeypatch):
    """The one that started first finds the name of the other, and ends before its next checkpoint."""
    monkeypatch.setenv("STEP_S", "2")
    one, other = (Machines(tmp_path / name, shards, "s3://nodes/runs") for name in "ab")
    with one.start() as first, other.start() as second:
        statuses = [each.wait(240) for each in (*first, *second)]
    output = one.output + other.output
    assert any(statuses), output
    assert not all(statuses), output
    assert "continues the run at s3://nodes/runs/tiny; this one" in output
    found = copy_run("s3://nodes/runs/tiny", tmp_path / "copy")
    assert checkpoint.checkpoints(found / "checkpoints")


def vanish(store, bucket: str) -> None:
    """Remove a bucket that is still written to; it cannot go while a file arrives between two requests."""
    for _ in range(100):
        try:
            store.rm(bucket, recursive=True)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail(f"{bucket} is still there")


@pytest.mark.parametrize("failure", ["no bucket", "bucket vanishes", "no credentials"])
def test_stores_that_fail_are_named_and_nothing_is_lost(tmp_path, shards, bucket, monkeypatch, failure):
    machines = Machines(tmp_path / "m", shards, "s3://other/runs" if failure == "no bucket" else "s3://nodes/runs")
    if failure == "no credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
    with machines.start() as ranks:
        if failure == "bucket vanishes":
            while not bucket.exists("nodes/runs/tiny/checkpoints/step-00000004/manifest.json"):
                assert ranks[0].poll() is None, machines.output
                time.sleep(0.05)
            vanish(bucket, "nodes")
        status = [each.wait(120) for each in ranks]
    print(machines.output[-1500:])
    assert status[0] in (1, 2)
    assert status[1] != 0
    told = {
        "no bucket": "cannot be written: there is no such bucket;",
        "bucket vanishes": "the checkpoint could not be uploaded (",
        "no credentials": "NoCredentialsError",
    }
    assert told[failure] in machines.output
    assert "Traceback" not in machines.output
    bucket.makedirs("nodes", exist_ok=True)
    if failure == "bucket vanishes":
        (run,) = (machines.disks[0] / "runs").glob("*/tiny")
        saved = checkpoint.checkpoints(run / "checkpoints")
        checkpoint.verify(saved[-1])
        assert machines.finish() == [2, 2]
        assert "Remove this folder to start over, or copy it there to restore the run" in machines.output
        bucket.put(f"{run}/", "nodes/runs/tiny/", recursive=True)
        assert machines.finish() == [0, 0], machines.output
