"""Jobs under torchrun, with faults in them, as processes that a test can signal and wait for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMIT_S = 300.0


class Job:
    """A job of two ranks on this machine; its output goes to a file."""

    def __init__(self, folder: Path, tree: dict[str, Any], fault: dict[str, Any], *options: str, shell: str = ""):
        self.folder = folder
        self.run = Path(tree["run"]["folder"]) / tree["run"]["name"]
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(tree))
        (folder / "fault.json").write_text(json.dumps(fault))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
        command = [*torchrun, "-m", "tests.faults.job", str(folder / "config.json"), str(folder / "fault.json")]
        if shell:
            command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
        settings = {"OMP_NUM_THREADS": "1", "VQCLIP_CACHE": str(folder / "cache"), "MARKS": str(self.marks)}
        with (folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                command, env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def ranks(self) -> list[int]:
        """The ranks' processes."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [pid for pid in map(int, listed) if b"tests.faults.job" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return sorted(found, key=lambda pid: f"RANK={1}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes())

    def steps(self, rank: int) -> list[int]:
        """Numbers of the steps that a rank has begun."""
        return sorted(int(path.name.split("-")[1]) for path in self.marks.glob(f"step-*-{rank}"))

    def wait_for(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, f"waited too long\n{self.output}"
            time.sleep(0.02)

    def wait_for_mark(self, name: str) -> None:
        self.wait_for((self.marks / name).exists)

    def wait_for_stop(self, limit_s: float) -> None:
        """Until it has saved and left its marker; the processes may take longer to end."""
        end = time.monotonic() + limit_s
        while not (self.run / "stopped.json").exists():
            assert time.monotonic() < end, f"not stopped within {limit_s} s\n{self.output}"
            time.sleep(0.02)

    def end(self, limit_s: float = LIMIT_S) -> tuple[int, float]:
        """Wait for the end: torchrun's exit status, and the seconds that it took."""
        start = time.monotonic()
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {limit_s} s\n{self.output}") from None
        return status, time.monotonic() - start

    def kill(self) -> None:
        """End all that is left of it."""
        with contextlib.suppress(OSError):
            for pid in self.ranks():
                os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextlib.contextmanager
def job(*args: Any, **kwargs: Any) -> Iterator[Job]:
    """A job that does not outlive the block."""
    running = Job(*args, **kwargs)
    try:
        yield running
    finally:
        running.kill()
