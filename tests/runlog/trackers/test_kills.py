"""Real runs with all trackers, killed in the middle: each step is once in each tracker, as in metrics.jsonl."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.data.making import caption_shards
from tests.runlog.trackers import reading
from tests.training import retrieval, run_tree

pytestmark = pytest.mark.slow

LAST = 60
SECRET = "hunter2"


def children(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def start(config: Path, folder: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "VQCLIP_CACHE": str(folder / "cache"),
        "WANDB_BASE_URL": "http://127.0.0.1:9",  # where nobody listens
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "vqclip.train", "--config", str(config)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b'"loss/total"')
    except FileNotFoundError:
        return 0


def test_each_step_is_once_in_each_tracker_after_kills(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    shards = caption_shards(tmp_path / "shards", counts=(17, 13))
    tree = run_tree(tmp_path, shards, train__steps=LAST, train__checkpoint_every=10, train__report_every=2)
    tree["train"] |= {"evaluate_every": 15, "save_in_background": False}
    tree["run"]["trackers"] = ["tensorboard", {"kind": "wandb"}]
    tree["evaluation"] = retrieval(shards)
    config, run = tmp_path / "run.yaml", tmp_path / "tiny"
    config.write_text(yaml.safe_dump(tree))
    for lines, whom in ((8, "all"), (16, "the run alone"), (25, "all")):
        process, end = start(config, tmp_path), time.monotonic() + 90
        while steps(run) < lines and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        assert process.poll() is None, process.communicate()[0]
        below = children(process.pid) if whom == "all" else []
        process.kill()
        for pid in below:  # wandb's service too: what it was sent may be lost
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        time.sleep(1.1)  # TensorBoard orders files by the second
    process = start(config, tmp_path)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output

    whole = reading.expected(run)
    assert sorted(whole) == sorted({*range(2, LAST + 1, 2), 15, 45})
    assert "eval/pairs/codes_only/i2t_r1" in whole[15]
    assert reading.wandb(run) == whole
    assert reading.tensorboard(run) == reading.rounded(whole)
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in written if SECRET.encode() in file.read_bytes()]
