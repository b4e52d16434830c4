"""The training command, which also writes down the samples of every step that it runs.

    python -m tests.faults.recorded TREE RECORDS [STOP_AT]     or under torchrun

``TREE`` is the configuration as a JSON file. Every rank appends a line to ``RECORDS`` before each step. At step
``STOP_AT`` rank 0 gets a SIGTERM, as if from a scheduler.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from vqclip.step import TrainStep
from vqclip.train import main


def recording(records: Path, stop_at: int | None) -> None:
    step = TrainStep.__call__
    rank = int(os.environ.get("RANK", "0"))

    def recorded(self: TrainStep, batch: Any, number: int) -> Any:
        line = json.dumps({"step": number, "rank": rank, "ids": batch.sample_ids.tolist()})
        descriptor = os.open(records, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{line}\n".encode())  # one write: what a kill leaves is whole lines
        os.close(descriptor)
        if number == stop_at and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, number)

    TrainStep.__call__ = recorded  # type: ignore[method-assign]


def global_batches(records: Path) -> dict[int, set[tuple[int, ...]]]:
    """Step → the different global batches (sorted ids) that its tries had, where all ranks wrote theirs down.

    A job that was killed may have left a step that only some ranks began: those tries are left out.
    """
    tries: dict[int, list[dict[int, list[int]]]] = defaultdict(list)
    for line in records.read_text().splitlines():
        entry = json.loads(line)
        started = tries[entry["step"]]
        if not started or entry["rank"] in started[-1]:
            started.append({})
        started[-1][entry["rank"]] = entry["ids"]
    size = max(sum(map(len, one.values())) for started in tries.values() for one in started)
    whole = {}
    for step, started in tries.items():
        batches = [sorted(i for ids in one.values() for i in ids) for one in started]
        whole[step] = {tuple(batch) for batch in batches if len(batch) == size}
    return whole


if __name__ == "__main__":
    recording(Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
    # The tree is read as a configuration file, as a user's is: JSON is YAML.
    sys.exit(main(["--config", sys.argv[1]]))
