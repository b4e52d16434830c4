"""Rank and world size, joining and leaving the job, and errors that name the collective."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d

from vqclip.dist import _history
from vqclip.dist._launcher import stop_with_launcher
from vqclip.dist._rendezvous import private_store
from vqclip.dist._torch_versions import GUARDS_PROCESS_GROUP
from vqclip.errors import ConfigError, DistributedError

logger = logging.getLogger(__name__)

# Variables that torchrun sets and `env://` needs.
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""Variables in which other launchers put the number of their tasks."""


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
        name: ``cuda``, the GPU of this process; ``auto``, that or the CPU without a GPU; or another name of torch, such as
            ``cpu`` or ``cuda:1``.
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
    with named_errors("init"), _name_busy_port():
        # With GPUs too, small messages use gloo, so that they never wait for a GPU.
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        timeout = timedelta(seconds=timeout_s)
        store, who, ranks = next(iter(c10d.rendezvous("env://", timeout=timeout)))
        store.set_timeout(timeout)
        own = private_store(store, who, ranks, timeout_s)
        c10d.init_process_group(backend, timeout=timeout, store=own, rank=who, world_size=ranks)
    return True


@contextlib.contextmanager
def _name_busy_port() -> Iterator[None]:
    """Raise the error about a port that another program listens on as one that names the port."""
    try:
        yield
    except c10d.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise DistributedError(
                f"port {os.environ['MASTER_PORT']} of this machine is in use by another program; choose another one: "
                "MASTER_PORT, or --master-port or --rdzv-endpoint of torchrun"
            ) from None
        raise


def shutdown() -> None:
    """Leave the job. Does nothing without a process group."""
    if _has_process_group():
        # A deadlock seen with torch 2.6, not known to be fixed: the destructor of gloo's group holds the GIL while it
        # waits for a thread that needs the GIL to free the last collective's tensors. The sleep lets that thread end.
        time.sleep(0.1)
        c10d.destroy_process_group()


@contextlib.contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Raise torch's errors about lost ranks and timeouts in the block as a `DistributedError` that names `what`.

    Other errors are not changed. Use it for collectives that are not called through this package, such as those of
    DDP's backward. The block appears in `recent_collectives`.

    Raises:
        DistributedError: The block failed because of another rank.
    """
    entry = _history.begin(what)
    try:
        yield
        entry.end()
    except DistributedError:
        raise
    except RuntimeError as error:
        # gloo has no error class of its own, but its messages name it.
        if isinstance(error, c10d.DistError) or "gloo" in str(error).lower():
            raise lost_peer(what, error) from error
        raise


def run_collective(name: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call `collective(*args, **kwargs)`; raise its errors as a `DistributedError` that contains `name`."""
    if torch.compiler.is_compiling():
        collective(*args, **kwargs)
        return
    entry, end = _history.begin(name, args), _history.exchange_timer.begin(args)
    try:
        collective(*args, **kwargs)
        entry.end()
        end()
    except RuntimeError as error:
        raise lost_peer(name, error) from error


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
    """Return an error for one of torch about a rank that died or did not come."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    who = os.environ.get("RANK", "?") if not _has_process_group() else str(c10d.get_rank())
    return DistributedError(
        f"{what} failed on rank {who}: {reason}\n"
        "Another rank has most likely died, stalled for longer than the timeout, or called a different collective; "
        "the first error in the output of the other ranks is the cause"
    )
