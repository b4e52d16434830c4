"""A pool of real processes in which tests run a function on 1 to 4 gloo ranks. Use it through the `ranks` fixture.

The processes are forked from a server that has imported torch and vqclip once, and serve every test of the session.
Each call forms a fresh process group over the first `world_size` of them, with the environment variables that torchrun
sets and the cache folder of the test, and takes it down afterwards. No wait is without a limit, and a pool in which a
rank died or hangs is killed: the next call starts a new one.
"""

import itertools
import multiprocessing as mp
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

MAX_RANKS = 4
_PORTS, _PORTS_OF_A_CALL = "VQCLIP_TEST_PORTS", 4
GRACE_S = 15.0  # what the other ranks get to report after the first one failed


def for_each(fn: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[Any]:
    """Call ``fn(*case)`` for every case. ``ranks(2, for_each, fn, cases)`` saves the overhead of a call per case.

    A case that makes a process group finds a port of its own: at that of the case before, rank 0 may still serve.
    """
    ports, results = itertools.cycle(os.environ[_PORTS].split()), []
    for case, os.environ["MASTER_PORT"] in zip(cases, ports, strict=False):
        results.append(fn(*case))
    return results


def fork_server() -> mp.context.ForkServerContext:
    """Return the way to start processes that are forked from the server that has imported torch and vqclip."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def start_process(function: Callable[..., Any], *args: Any) -> mp.process.BaseProcess:
    """Run a function in a process of its own, forked from the server."""
    context = fork_server()
    # Not daemonic: a daemon may have no children, and a rank under test may start data loader workers.
    process = context.Process(target=function, args=args)
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}):
        process.start()
    return process


class RankError(Exception):
    """At least one rank failed. The message holds the traceback of each; `results` those of the ranks that finished."""

    def __init__(self, message: str, results: dict[int, Any]) -> None:
        super().__init__(message)
        self.results = results


class RankPool:
    """Worker processes that wait for functions to run as ranks of one process group."""

    def __init__(self) -> None:
        self._workers: list[tuple[mp.process.BaseProcess, Connection]] = []

    def __call__(
        self, world_size: int, fn: Callable[..., Any], *args: Any, init: bool = True, timeout: float = 120.0
    ) -> list[Any]:
        """Run `fn(*args)` on each of `world_size` ranks and return what each returned, in rank order.

        Args:
            world_size: Number of ranks, 1 to 4.
            fn: A function defined at the top level of a module (it is sent by name, so no lambda and no closure).
            args: Anything that can be pickled; the same for all ranks.
            init: Form the gloo process group before the call. With False the function finds only torchrun's environment
                variables and calls `vqclip.dist.init` itself, or never.
            timeout: Seconds for the whole call, and for each collective inside.

        Raises:
            RankError: A rank raised, died or did not finish in time.
        """
        assert 1 <= world_size <= MAX_RANKS, f"world_size is 1 to {MAX_RANKS}, got {world_size}"
        request = pickle.dumps((fn, args, init, timeout))
        self._start(world_size)
        with tempfile.TemporaryDirectory() as folder:
            ports = [_free_port() for _ in range(_PORTS_OF_A_CALL)]
            healthy = False
            try:
                for rank, (_, connection) in enumerate(self._workers[:world_size]):
                    env = _torchrun_env(rank, world_size, ports)
                    connection.send_bytes(pickle.dumps((env, f"file://{folder}/rendezvous", request)))
                results, failures, healthy = self._collect(world_size, timeout)
            finally:  # also when pytest's own timeout interrupts the wait
                if not healthy:
                    self.kill()
        if failures:
            raise RankError("\n".join(failures), results)
        return [results[rank] for rank in range(world_size)]

    def kill(self) -> None:
        """End every worker, whatever it is doing."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def _start(self, count: int) -> None:
        if any(not process.is_alive() for process, _ in self._workers):
            self.kill()
        while len(self._workers) < count:
            ours, theirs = mp.Pipe()
            process = start_process(_serve, theirs)
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, world_size: int, timeout: float) -> tuple[dict[int, Any], list[str], bool]:
        """Wait for all ranks: (results by rank, failure texts, whether every worker can serve again)."""
        pending = dict(enumerate(self._workers[:world_size]))
        results: dict[int, Any] = {}
        failures: list[str] = []
        healthy = True
        deadline = time.monotonic() + timeout + GRACE_S  # a collective that times out should report that itself
        while pending and (left := deadline - time.monotonic()) > 0:
            wait([c for _, c in pending.values()] + [p.sentinel for p, _ in pending.values()], timeout=left)
            for rank, (process, connection) in list(pending.items()):
                try:
                    if not connection.poll():
                        if process.is_alive():
                            continue
                        raise EOFError
                    ok, value, clean = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    process.join()
                    ok, value, clean = False, f"the process died with exit code {process.exitcode}", False
                del pending[rank]
                healthy &= clean
                if ok:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank} of {world_size}: {value}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failures += [f"rank {rank} of {world_size}: did not finish in time, killed" for rank in pending]
        return results, failures, healthy and not pending


def _torchrun_env(rank: int, world_size: int, ports: Sequence[int]) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        _PORTS: " ".join(map(str, ports)),
    } | {name: os.environ[name] for name in ("VQCLIP_CACHE",) if name in os.environ}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(connection: Connection) -> None:
    """What a worker does: run what it is sent until the parent goes away."""
    parent = mp.parent_process()
    assert parent is not None
    # A worker stuck in a collective must not outlive pytest.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            env, rendezvous, request = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            ok, value = True, _run(env, rendezvous, request)
        except BaseException:
            ok, value = False, traceback.format_exc()
        # A group whose forming failed stays counted, and the next one would then not find its peers.
        clean = dist.get_pg_count() == 0
        try:
            reply = pickle.dumps((ok, value, clean))
        except Exception:
            reply = pickle.dumps((False, traceback.format_exc(), clean))
        connection.send_bytes(reply)


def _run(env: dict[str, str], rendezvous: str, request: bytes) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    with mock.patch.dict(os.environ, env), warnings.catch_warnings():
        fn, args, init, timeout = pickle.loads(request)
        try:
            if init:
                rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
                limit = timedelta(seconds=timeout)
                dist.init_process_group("gloo", rendezvous, limit, rank=rank, world_size=world_size)
                dist.barrier()  # no rank may be through and hang up while another is still forming the group
            return fn(*args)
        finally:
            if dist.is_initialized():
                time.sleep(0.02)  # see vqclip.dist.shutdown: torch 2.6 deadlocks otherwise
                dist.destroy_process_group()
            if "torch._dynamo" in sys.modules:
                sys.modules["torch._dynamo"].reset()
