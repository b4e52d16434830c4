"""Rank and world size, joining and leaving the job; collectives that are recorded, timed and named in errors."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

import vqclip
from vqclip.dist._torch_versions import GUARDS_PROCESS_GROUP
from vqclip.errors import ConfigError, DistributedError

logger = logging.getLogger(__name__)

# Variables that torchrun sets and `env://` needs.
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""Variables in which other launchers put the number of their tasks."""
_LEADER = "vqclip/leader"
_POLL_S = (0.02, 0.5)
"""Seconds between two polls of the store: initial and longest."""


def is_distributed() -> bool:
    """Return True if there is more than one process."""
    return world_size() > 1


def world_size() -> int:
    """Return the number of ranks W; 1 without a process group."""
    return c10d.get_world_size() if _has_process_group() else 1


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return c10d.get_rank() if _has_process_group() else 0


def local_rank() -> int:
    """Return this process's rank on its machine, the index of its GPU; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_device(name: str, key: str) -> torch.device:
    """Return a device that can be used.

    Args:
        name: ``cuda``, the GPU of this process; ``auto``, that or the CPU without a GPU; or another name of torch, such
            as ``cpu`` or ``cuda:1``.
        key: option or key path, for the error.

    Raises:
        ConfigError: it cannot be used.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{key}: got cuda, but torch sees no GPU; expected cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name, local_rank()) if name == "cuda" else torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"{key}: got {name!r}, which cannot be used ({str(error).splitlines()[0]}); expected cpu, cuda, or one GPU "
            "such as cuda:1"
        ) from error
    return device


def is_main() -> bool:
    """Return True on rank 0, which writes logs and checkpoints."""
    return rank() == 0


def init(device: str | torch.device, timeout_s: float = 600.0) -> bool:
    """Join the job that torchrun's environment variables describe. Without them (one process), do nothing.

    A task of srun or mpirun that torchrun has not started logs a warning: it works alone, as may be intended.
    CPU tensors use gloo, CUDA tensors NCCL. Does nothing if a process group exists already. On Linux this process
    then receives SIGTERM when torchrun dies.

    Args:
        device: "cpu" or "cuda"; for "cuda" this process's GPU becomes the current one.
        timeout_s: Longest wait for another rank, here or in any collective, in seconds.

    Returns:
        True if it made the process group, which `shutdown` then ends.

    Raises:
        DistributedError: Some variables are missing, the machine has fewer GPUs than ranks, or not all ranks arrived
            within `timeout_s`.
    """
    if _has_process_group():
        return False
    if not any(name in os.environ for name in _TORCHRUN[:2]):
        for name, launcher in _TASKS.items():
            if (tasks := os.environ.get(name, "")).isdigit() and int(tasks) > 1:
                logger.warning(
                    f"this process is one of {tasks} tasks of {launcher} ({name}), but torchrun has not started it: it "
                    "works alone, and each task does all of the work. For one job over all, start one `torchrun` a "
                    "machine, as in docs/machines.md: `srun torchrun ...`"
                )
                break
        return False
    if missing := [name for name in _TORCHRUN if name not in os.environ]:
        raise DistributedError(
            f"the environment has some of torchrun's variables but not {', '.join(missing)}; "
            "start the job with `torchrun -m vqclip.train ...`, or unset RANK and WORLD_SIZE to run one process"
        )
    stop_with_launcher()
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        if local_rank() >= torch.cuda.device_count():
            raise DistributedError(
                f"rank {os.environ['RANK']} needs GPU {local_rank()}, but this machine has "
                f"{torch.cuda.device_count()} GPUs; lower torchrun's --nproc-per-node, or train on the cpu"
            )
        torch.cuda.set_device(local_rank())
    with named_errors("init"):
        # With GPUs too, small messages use gloo, so that they never wait for a GPU.
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        timeout = timedelta(seconds=timeout_s)
        store, who, ranks = next(iter(c10d.rendezvous("env://", timeout=timeout)))
        store.set_timeout(timeout)
        own = private_store(store, who, ranks, timeout_s)
        c10d.init_process_group(backend, timeout=timeout, store=own, rank=who, world_size=ranks)
    return True


def shutdown() -> None:
    """Leave the job. Does nothing without a process group."""
    if _has_process_group():
        # A deadlock seen with torch 2.6, not known to be fixed: the destructor of gloo's group holds the GIL while it
        # waits for a thread that needs the GIL to free the last collective's tensors. The sleep lets that thread end.
        time.sleep(0.1)
        c10d.destroy_process_group()


def private_store(store: c10d.Store, rank: int, world_size: int, timeout_s: float) -> c10d.Store:
    """Return a part of the store that only the ranks of this start use.

    Ranks exchange their addresses through a store that torchrun serves. With `--max-restarts`, torchrun restarts the
    ranks but keeps the store, so that new ranks may read the addresses of dead ones
    (https://github.com/pytorch/pytorch/issues/135712). Each start therefore uses a new key prefix.

    Rank 0 publishes a random name. Every other rank stores its own random name under it, and rank 0 answers with all
    of them. An answer without a rank's own name comes from an earlier start and is ignored.

    Args:
        store: The store that all ranks share; may contain anything.
        rank: The rank of this process.
        world_size: The number of ranks of the job.
        timeout_s: The longest wait for the other ranks, in seconds.

    Raises:
        torch.distributed.DistError: Not all ranks arrived within `timeout_s`.
    """
    name = secrets.token_hex(8)
    if rank == 0:
        store.set(_LEADER, name)
        names = [store.get(f"vqclip/{name}/{other}").decode() for other in range(1, world_size)]
        store.set(f"vqclip/{name}/all", json.dumps(names))
        return c10d.PrefixStore(f"vqclip/{name}", store)
    end, (pause, longest) = time.monotonic() + timeout_s, _POLL_S
    while time.monotonic() < end:
        leader = store.get(_LEADER).decode()
        store.set(f"vqclip/{leader}/{rank}", name)
        answer = f"vqclip/{leader}/all"
        if store.check([answer]) and name in json.loads(store.get(answer)):
            return c10d.PrefixStore(f"vqclip/{leader}", store)
        time.sleep(pause)
        pause = min(2 * pause, longest)
    raise c10d.DistStoreError(f"not all ranks arrived within {timeout_s:g} s")


def signal_at_parent_death(number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent dies. Linux only."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, number, 0, 0, 0)


def stop_with_launcher() -> None:
    """Under torchrun: request SIGTERM for the death of torchrun, after which nothing else would end this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_at_parent_death(signal.SIGTERM)
        if launcher_has_died():  # it died before the line above
            os.kill(os.getpid(), signal.SIGTERM)


def launcher_has_died() -> bool:
    """Return True if torchrun started this process and has died."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != vqclip._PARENT_PID


@dataclass(slots=True)
class Collective:
    """A collective that this process has started."""

    number: int
    """Counts from 1. Equal on all ranks, which call the same collectives in the same order."""
    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of its tensors; empty for DDP, whose tensors are not known."""
    started: float
    """Time in seconds of `time.monotonic`."""
    finished: float | None = None
    """Time at which the call returned (with NCCL, before the work is done); None: not yet, or it failed."""


_recent: deque[Collective] = deque(maxlen=32)
_numbers = itertools.count(1)


def recent_collectives() -> list[Collective]:
    """Return the last 32 collectives of this process, oldest first, without those in compiled code."""
    return list(_recent)


class ExchangeTimer:
    """Stopwatch for collectives: it counts the time in which this process is in one, while `runs` is True.

    For tensors on a GPU that is the time of the stream that waits for the collective, of others the time of the host.
    """

    def __init__(self) -> None:
        self.runs = False
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def lap(self) -> float:
        """Return the seconds counted since the last lap, those of a GPU as far as it has done its work."""
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._seconds += first.elapsed_time(last) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def begin(self, arguments: Sequence[Any]) -> Callable[[], None]:
        """Note that a collective of the tensors among its arguments begins; return a function that notes its end."""
        if not self.runs:
            return lambda: None
        if any(isinstance(each, Tensor) and each.is_cuda for each in arguments):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()

            def end() -> None:
                last.record()
                self._pending.append((first, last))

            return end
        since = time.perf_counter()

        def end_on_host() -> None:
            self._seconds += time.perf_counter() - since

        return end_on_host


exchange_timer = ExchangeTimer()
"""Timer of this process."""


@contextlib.contextmanager
def named_errors(what: str, arguments: Sequence[Any] = ()) -> Iterator[None]:
    """Raise torch's errors about lost ranks and timeouts in the block as a `DistributedError` that names `what`.

    Other errors are not changed. Use it for collectives that are not called through this package, such as those of
    DDP's backward. The block appears in `recent_collectives`.

    Args:
        what: Name of the collective.
        arguments: Its arguments, whose tensors' shapes are recorded.

    Raises:
        DistributedError: The block failed because of another rank.
    """
    shapes = tuple(tuple(each.shape) for each in arguments if isinstance(each, Tensor))
    entry = Collective(next(_numbers), what, shapes, time.monotonic())
    _recent.append(entry)
    try:
        yield
        entry.finished = time.monotonic()
    except DistributedError:
        raise
    except RuntimeError as error:
        # gloo has no error class of its own, but its messages name it.
        if isinstance(error, c10d.DistError) or "gloo" in str(error).lower():
            raise lost_peer(what, error) from error
        raise


def run_collective(name: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call `collective(*args, **kwargs)`, recorded and timed; its errors are those of `named_errors`."""
    if torch.compiler.is_compiling():
        collective(*args, **kwargs)
        return
    with named_errors(name, args):
        end = exchange_timer.begin(args)
        collective(*args, **kwargs)
        end()


def control_device() -> torch.device:
    """Return the device for small messages: the CPU, or this process's GPU if the job has only NCCL."""
    if "gloo" in c10d.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _has_process_group() -> bool:
    # Not is_initialized(), whose result torch.compile treats as a constant; it guards this one.
    if not GUARDS_PROCESS_GROUP and torch.compiler.is_compiling():
        return c10d.is_available() and c10d.is_initialized()
    return c10d.is_available() and c10d.group.WORLD is not None


def lost_peer(what: str, error: RuntimeError) -> DistributedError:
    """Return an error for one of torch about a rank that died or did not come, or about a port in use."""
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return DistributedError(
            f"port {os.environ.get('MASTER_PORT')} of this machine is in use by another program; choose another one: "
            "MASTER_PORT, or --master-port or --rdzv-endpoint of torchrun"
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    who = os.environ.get("RANK", "?") if not _has_process_group() else str(c10d.get_rank())
    return DistributedError(
        f"{what} failed on rank {who}: {reason}\n"
        "Another rank has most likely died, stalled for longer than the timeout, or called a different collective; "
        "the first error in the output of the other ranks is the cause"
    )
