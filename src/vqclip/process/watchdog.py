"""Watchdog: detect a job that makes no progress; every rank writes its position and its stacks.

Stacks are written by `faulthandler`: of all threads of this process, of its data workers, which answer a signal, and of
an interpreter that is stuck in code that keeps its lock, by a timer in C.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from vqclip import dist
from vqclip.errors import DistributedError

logger = logging.getLogger(__name__)

STATUS = 3
"""Exit status of a rank that its watchdog has ended."""

_FIRST_STEPS = 5
"""Number of steps with the long limit: they compile, warm up, and fill the data workers' queues."""
_CHECK_S = 1.0
"""Seconds between two checks of the time."""
_GRACE_S = 5.0
"""Seconds beyond the limit until the stacks of a stuck interpreter are written from C; also the time for the other
ranks to write theirs."""

REPORT_S = 2 * _GRACE_S
"""Longest time in which all ranks report a hang."""
_ANSWER_S = 0.1
"""Seconds for one data worker to write its stacks, so that two do not write at once."""
_WORKERS_SIGNAL = signal.SIGUSR2

_workers_file = 2
"""File descriptor to which newly forked data workers write their stacks: stderr, or that of the running watchdog."""

_REPORT = re.compile(r"^=== (\w+) rank (\d+) at collective #(\d+): (.*)$(?=[\s\S]*?^=== \1 end$)", re.MULTILINE)
"""A rank's report that is complete: a rank that ends sooner changes the stacks of those that wait for it."""


class _Position(NamedTuple):
    """Last reported position of the training thread."""

    since: float
    limit: float
    done: int
    doing: str
    patient: bool


class Watchdog:
    """Hang detection for the thread that opens this context.

        with Watchdog(folder, step_timeout_s=300.0, timeout_s=600.0) as watchdog:
            for batch in batches:
                watchdog.at(done, "in the next step")
                ...
                watchdog.at(done, "waiting for the next batch")

    After the limit a thread appends the stacks of all threads and data workers and the last collectives to
    ``rank-<number>.txt``, waits a little for the other ranks to do the same, prints the position of every rank on
    stderr, and ends the process with status 3. Every step has collectives, so one late rank makes all ranks late. If
    the interpreter itself is stuck, in code that keeps its lock, a thread in C appends the stacks five seconds later,
    and the status is 1. The stacks are also written when a collective fails because another rank is lost.

    In a process that does other work as well, such as a notebook, ``ends_process=False`` writes the stacks and a
    warning, once for each position, and ends nothing.

    Args:
        folder: of the files, shared by all ranks.
        step_timeout_s: longest time between two steps, once five are done; None: no watchdog, no thread.
        timeout_s: longest time before that, and for patient positions; an upper bound of the other limit.
        ends_process: end the process when it hangs.
    """

    def __init__(self, folder: Path, step_timeout_s: float | None, timeout_s: float, ends_process: bool = True):
        self._folder, self._ends_process = folder, ends_process
        self._on = step_timeout_s is not None
        self._short, self._long = min(step_timeout_s or timeout_s, timeout_s), timeout_s
        self._first_steps = _FIRST_STEPS
        self._position = _Position(0.0, timeout_s, -1, "starting", True)
        self._patient_at = -1
        self._closing = threading.Event()

    def at(self, done: int, doing: str, patient: bool = False) -> None:
        """Report the position. The limit counts from the end of the last step, or from a patient position.

        Args:
            done: steps done.
            doing: the current work, for the report.
            patient: allow the long limit, that of a wait for another rank.
        """
        before, since = self._position, time.monotonic()
        if done > before.done >= 0 and self._first_steps:
            self._first_steps -= 1
        if done == before.done and not patient and not before.patient:
            since = before.since
        if patient:
            self._patient_at = done
        # One rank may still be saving while the others already wait for it in the next step.
        limit = self._long if self._first_steps or done == self._patient_at else self._short
        self._position = _Position(since, limit, done, doing, patient)

    def expect_compilation(self) -> None:
        """Give the next steps the long limit again, as the first ones have it: the model changes and is compiled."""
        self._first_steps = _FIRST_STEPS

    def beat(self) -> None:
        """Reset the hang timer."""
        self._position = self._position._replace(since=time.monotonic())

    def __enter__(self) -> Watchdog:
        global _workers_file
        if self._on:
            self._token, self._rank, self._world_size = f"{dist.shared_seed():016x}", dist.rank(), dist.world_size()
            self._path = self._folder / f"rank-{self._rank}.txt"
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = _workers_file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self.beat()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        global _workers_file
        if not self._on:
            return
        self._closing.set()
        self._thread.join()  # it never returns after it has detected a hang: it ends the process
        if self._ends_process:
            faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            if isinstance(error, DistributedError):
                trace_text = "".join(traceback.format_exception(error))
                self._write(f"another rank is lost: {self._describe_position()}", trace_text)
        _workers_file = 2
        os.close(self._file)
        with contextlib.suppress(OSError):
            if self._path.stat().st_size == 0:
                self._path.unlink()
            self._folder.rmdir()  # if it is empty

    def _watch(self) -> None:
        warned: _Position | None = None
        while not self._closing.is_set():
            position = self._position
            left = position.since + position.limit - time.monotonic()
            if self._ends_process:
                if left <= 0:
                    return self._end()
                # A thread in C, which needs no lock of the interpreter, writes the stacks if this one cannot run.
                faulthandler.dump_traceback_later(left + _GRACE_S, exit=True, file=self._file)
            elif left <= 0 and position is not warned:
                warned, where = position, self._describe_hang()
                with contextlib.suppress(OSError):
                    self._write(where)
                logger.warning("%s; stacks: %s; the process continues: interrupt the run to end it", where, self._path)
            self._closing.wait(min(left, _CHECK_S) if left > 0 else _CHECK_S)

    def _end(self) -> None:
        """Report, and end the process, even if the disk hangs."""
        faulthandler.dump_traceback_later(4 * _GRACE_S, exit=True, file=self._file)
        where = self._describe_hang()
        _print_to_stderr(f"rank {self._rank}: {where}")
        for work, patience in ((lambda: self._write(where), _GRACE_S), (self._report_all_ranks, 2 * _GRACE_S)):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(patience)
        os._exit(STATUS)

    def _describe_hang(self) -> str:
        limit = self._position.limit
        name = "run.step_timeout_s" if limit < self._long else "run.timeout_s"
        return f"no progress for {limit:g} s ({name}): {self._describe_position()}"

    def _describe_position(self) -> str:
        position, recent, now = self._position, dist.recent_collectives(), time.monotonic()
        text = f"{position.done} steps done, {position.doing}"
        if not recent:
            return text
        last = recent[-1]
        named = f"collective #{last.number} ({last.name})"
        if last.finished is None:
            return f"{text}; in {named} for {now - last.started:.1f} s"
        return f"{text}; in no collective, {named} ended {now - last.finished:.1f} s ago"

    def _write(self, where: str, trace: str = "") -> None:
        """Append the position, the last collectives, and the stacks of this process and of its data workers."""
        recent, now = dist.recent_collectives(), time.monotonic()
        lines = [
            f"=== {self._token} rank {self._rank} at collective #{recent[-1].number if recent else 0}: {where}",
            f"process {os.getpid()} on {socket.gethostname()}, {datetime.now(timezone.utc).isoformat()}",
            "last collectives:",
        ]
        for each in recent:
            ended = "not finished"
            if each.finished is not None:
                ended = f"finished after {1e3 * (each.finished - each.started):.1f} ms"
            shapes = " ".join(map(str, each.shapes))
            lines.append(f"  #{each.number} {each.name} {shapes} started {now - each.started:.3f} s ago, {ended}")
        os.write(self._file, "\n".join([*lines, f"{trace}stacks:\n"]).encode(errors="backslashreplace"))
        faulthandler.dump_traceback(self._file, all_threads=True)
        for worker in multiprocessing.active_children():
            os.write(self._file, f"\nchild process {worker.pid} ({worker.name}):\n".encode())
            with contextlib.suppress(OSError, TypeError):  # it has ended
                os.kill(worker.pid, _WORKERS_SIGNAL)  # type: ignore[arg-type]
            time.sleep(_ANSWER_S)
        os.write(self._file, f"\n=== {self._token} end\n".encode())

    def _report_all_ranks(self) -> None:
        """Wait until all ranks have written, or had time to; the lowest rank that has prints a summary."""
        end, ranks = time.monotonic() + _GRACE_S + _CHECK_S, range(self._world_size)
        while len(found := self._read_positions()) < self._world_size and time.monotonic() < end:
            time.sleep(0.1)
        if self._rank != min(found, default=self._rank):
            return
        silent = "has written nothing itself: it is dead, cannot write here, or its interpreter is stuck"
        lines = [f"  rank {rank}: {found[rank][1] if rank in found else silent}" for rank in ranks]
        newest = max((number for number, _ in found.values()), default=0)
        late = [str(rank) for rank in ranks if rank not in found or found[rank][0] < newest]
        if late and self._world_size > 1:
            lines.append(f"  the other ranks wait for {'ranks' if len(late) > 1 else 'rank'} {', '.join(late)}")
        lines.append(f"  stacks and collectives: {self._folder}/rank-*.txt")
        _print_to_stderr("\n".join([f"the job hangs and ends with status {STATUS}:", *lines]))

    def _read_positions(self) -> dict[int, tuple[int, str]]:
        """Return rank → number of its last collective, and its position."""
        texts = [path.read_text(errors="replace") for path in self._folder.glob("rank-*.txt")]
        headers = [header for text in texts for header in _REPORT.findall(text)]
        return {int(rank): (int(number), where) for token, rank, number, where in headers if token == self._token}


def _print_to_stderr(text: str) -> None:
    # Not through print: the training thread may be stuck in one.
    with contextlib.suppress(OSError):
        os.write(2, f"\nvqclip.train: {text}\n".encode())


def dump_stacks_on_request() -> None:
    """Let this data worker write its stacks when the watchdog of its parent asks for them.

    A worker that was spawned instead of forked writes them to stderr.
    """
    faulthandler.register(_WORKERS_SIGNAL, file=_workers_file, all_threads=True)
