"""Starting, killing and waiting for training processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 120.0


class Job:
    """A job of training in a process group of its own; see `tests.faults.recorded`.

    Args:
        folder: Where its configuration, records and output lie; one job at a time.
        tree: The configuration.
        processes: 1 without torchrun.
        stop_at: Step at which it gets a SIGTERM.
        launcher: More flags of torchrun.
    """

    def __init__(
        self,
        folder: Path,
        tree: dict[str, Any],
        processes: int = 1,
        stop_at: int | None = None,
        launcher: tuple[str, ...] = (),
    ):
        config, self.records, self.output = folder / "tree.json", folder / "records.jsonl", folder / "output.txt"
        config.write_text(json.dumps(tree))
        command = ["-m", "tests.faults.recorded", str(config), str(self.records)]
        command += [] if stop_at is None else [str(stop_at)]
        if processes > 1 or launcher:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *launcher]
            command = [*torchrun, *command]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | {"OMP_NUM_THREADS": "1", "VQCLIP_CACHE": str(folder / "cache")},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[], object], limit_s: float = LIMIT_S, often_s: float = 0.001) -> bool:
        """Wait until something holds; False if the job ended before."""
        end = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < end, f"waited too long:\n{self.told()}"
            time.sleep(often_s)
        return True

    def kill(self) -> None:
        """SIGKILL for all its processes, as when the power goes."""
        for pid in _descendants(self.process.pid):  # torchrun gives every rank a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=LIMIT_S)

    def finish(self, limit_s: float = 3 * LIMIT_S) -> None:
        """Wait for its end, which must be a good one."""
        assert self.process.wait(timeout=limit_s) == 0, self.told()

    def told(self) -> str:
        """The end of all that jobs in this folder have printed."""
        return self.output.read_text(errors="replace")[-5000:]


def _descendants(pid: int) -> list[int]:
    """A process and all below it, the oldest first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in _descendants(int(child)))]
