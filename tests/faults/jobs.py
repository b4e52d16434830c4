"""Jobs under torchrun, with faults in them, as processes that a test can signal, kill and wait for."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMIT_S = 300.0

# Jobs inherit what is ignored here, such as SIGINT in the background of a shell, or SIGHUP under nohup.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


class Job:
    """A job on this machine; its output and what its ranks write down go to files in its folder, job after job."""

    def __init__(self, folder: Path, tree: Any, fault: Any, *options: str, processes: int = 2, shell="", output=""):
        self.folder, self.begun = folder, time.time()
        self.records = folder / "records.jsonl"
        self.run = Path(tree["run"]["folder"]) / tree["run"]["name"]
        self.marks = folder / "marks"
        shutil.rmtree(self.marks, ignore_errors=True)  # those of the job before
        self.marks.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(tree))
        (folder / "fault.json").write_text(json.dumps(fault))
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
        program = ["-m", "tests.faults.job", str(folder / "config.json"), str(folder / "fault.json")]
        command = [sys.executable, *torchrun, *options, *program]
        if shell:
            command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
        settings = {"OMP_NUM_THREADS": "1", "VQCLIP_CACHE": str(folder / "cache"), "MARKS": str(self.marks)}
        settings["RECORDS"] = str(self.records)
        self._name = f"JOB={uuid.uuid4()}"
        settings["JOB"] = self._name[4:]
        with (folder / "output").open("ab") as log, contextlib.ExitStack() as stack:
            sink: Any = log
            if output.startswith("/"):
                sink = stack.enter_context(open(output, "wb"))
            elif output:  # a command that reads it, and may end before the job does
                reader = subprocess.Popen(output.split(), stdin=subprocess.PIPE, stdout=log)
                sink = stack.enter_context(reader.stdin or log)
                self._reader = reader
            self.process = subprocess.Popen(
                command, env=os.environ | settings, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def left(self) -> list[int]:
        """All its processes that live, whoever is their parent now."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended
                if self._name.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def ranks(self) -> list[int]:
        """The ranks' processes, by rank; none where it has ended."""
        found = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):  # it has ended
                settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(each[5:]): pid for each in settings if each.startswith(b"RANK=")}
        return [found[rank] for rank in sorted(found)]

    def phase(self) -> str:
        """What its ranks last began to do, or "save" while a checkpoint is being written."""
        if any((self.run / "checkpoints").glob(".*")):
            return "save"
        marks = sorted((path.stat().st_mtime_ns, path.name.split("-")[0]) for path in self.marks.iterdir())
        names = {"indexing": "index", "step": "train", "evaluation": "evaluate"}
        return ["start", *(names.get(name, name) for _, name in marks if name != "saving")][-1]

    def steps(self, rank: int) -> list[int]:
        """Numbers of the steps that a rank has begun."""
        return sorted(int(path.name.split("-")[1]) for path in self.marks.glob(f"step-*-{rank}"))

    def wait_for(self, condition: Callable[[], object], limit_s: float = LIMIT_S, often_s: float = 0.02) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, f"waited too long\n{self.output}"
            time.sleep(often_s)

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
        """End all that is left of it, at once."""
        with contextlib.suppress(OSError):  # it has ended
            os.kill(self.process.pid, signal.SIGSTOP)  # so that it starts no more
        while left := self.left():
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(30)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def job(*args: Any, **kwargs: Any) -> Iterator[Job]:
    """A job that does not outlive the block."""
    running = Job(*args, **kwargs)
    try:
        yield running
    finally:
        running.kill()


def global_batches(records: Path) -> dict[int, set[tuple[int, ...]]]:
    """Step → the different global batches (sorted ids) that its tries had, where all ranks wrote theirs down.

    A job that was killed may have left a step that only some ranks began: those tries are left out.
    """
    tries: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in records.read_text().splitlines():
        entry = json.loads(line)
        tries[entry["step"]][entry["life"]] += entry["ids"]
    size = max(len(ids) for lives in tries.values() for ids in lives.values())
    return {step: {tuple(sorted(ids)) for ids in lives.values() if len(ids) == size} for step, lives in tries.items()}
