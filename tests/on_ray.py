"""A Ray of two workers for the tests of a module: ``ray = pytest.fixture(scope="module")(small_ray)``."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def small_ray() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "OMP_NUM_THREADS": "1"}
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.CRITICAL}
    ray.init(address="local", num_cpus=2, object_store_memory=100 << 20, **quiet)
    yield
    ray.shutdown()


def wait_for(condition: Callable[[], object], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def kill_worker() -> int | None:
    """Kill one worker of this process's Ray by SIGKILL; None if there is none now."""
    for process in workers():
        os.kill(process, signal.SIGKILL)
        return process
    return None


def workers() -> list[int]:
    """Workers of jobs on Ray whose driver is this process or one that it started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if name.startswith(b"ray::_Worker") and _descends(int(folder.name)):
            found.append(int(folder.name))
    return found


def _descends(process: int) -> bool:
    while process > 1:
        if process == os.getpid():
            return True
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False
