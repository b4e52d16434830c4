"""Run the numbered items of a job, such as its shards, on Ray: on this machine, or on a cluster.

    with connect_to_ray(options, threads, device) as cluster:
        for item, result in cluster.map(open_job, range(items), "shard"):
            ...                              # open_job() runs once in each worker, and returns the function of an item

Ray starts the workers, gives each CPUs and GPUs, and starts a worker again that died or whose machine did, with the
item that it had. So items must be repeatable. All else is in a work folder that the machines share.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field

from vqclip.config import Config
from vqclip.data.remote.urls import mask_credentials
from vqclip.errors import ConfigError, VqclipError, import_extra

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STARTS = 4
"""Times that an item is started before the job fails: its workers died."""
_WAITING = 16
"""Largest number of workers that wait for room on the cluster."""
_ANSWER_S = 10.0
"""Longest wait for a connection to a cluster."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it reports to its makers otherwise
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a warning about GPUs that workers without GPUs do not use
}


def _require_whole(number: float) -> float:
    if number > 1 and number != int(number):
        raise ValueError("expected a whole number, or one from 0 to 1")
    return number


Actors = Annotated[int, Field(ge=1, le=2**20)]
Cpus = Annotated[float, Field(gt=0, le=1024), AfterValidator(_require_whole)]
Gpus = Annotated[float, Field(ge=0, le=1024), AfterValidator(_require_whole)]


class RayOptions(Config):
    """Cluster of a job, and the number and size of its workers."""

    address: str | None = None
    """Ray cluster, such as auto or HOST:6379; without it RAY_ADDRESS, else a Ray on this machine for this job."""
    actors: Actors | None = None
    """Largest number of workers; without it Ray starts as many as the cluster has or gets room for."""
    cpus: Cpus | None = None
    """CPUs of a worker; without it one for each of its threads and data workers."""
    gpus: Gpus | None = None
    """GPUs of a worker, such as 0.5 for two on one; without it 1 if the cluster has GPUs."""


@contextlib.contextmanager
def connect_to_ray(options: RayOptions, threads: int, device: str) -> Iterator[RayCluster]:
    """Connect to a cluster, or start a Ray on this machine, for the time of the block. A Ray in use is left as it is.

    Args:
        options: the cluster, and the number and size of its workers.
        threads: threads and processes that a worker runs, each of which gets a CPU.
        device: ``cpu``, ``cuda``, or ``auto``: a GPU if the cluster has any.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, this is one of several processes of torchrun, options and
            device exclude each other, or no machine of this Ray has room for a worker.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--engine ray: got several processes of torchrun; expected one, as Ray starts the workers")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    ray = import_extra("ray", "ray", "--engine ray ")
    address = options.address or os.environ.get("RAY_ADDRESS") or "local"
    limits = {"object_store_memory": 100 << 20, "include_dashboard": False} if address == "local" else {}
    started = not ray.is_initialized()
    try:
        if started:
            if found := re.fullmatch(r"(?:ray://)?([^/:]+):(\d{1,5})", address):  # Ray itself tries for minutes
                socket.create_connection((found[1], int(found[2])), _ANSWER_S).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **limits)
    except Exception as error:  # OSError, ValueError, RuntimeError, those of grpc, ...
        raise ConfigError(
            f"--ray-address: got {address}, which cannot be used ({_first_line(error)}); expected the address of a "
            "running cluster (auto on one of its machines), or nothing for a Ray on this machine"
        ) from None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what Ray prints is no result
            yield RayCluster(ray, options, threads, device, may_grow=address != "local")
    finally:
        if started:
            ray.shutdown()


class RayCluster:
    """A connection to Ray, whose workers have one size; see `connect_to_ray`.

    Attributes:
        on_gpu: whether a worker has a GPU.
    """

    def __init__(self, ray: Any, options: RayOptions, threads: int, device: str, may_grow: bool):
        given, cpus = options.gpus, options.cpus or float(threads)
        if (device == "cpu" and given) or (device == "cuda" and given == 0):
            raise ConfigError(f"--ray-gpus: got {given:g} with --device {device}; expected auto, or leave one out")
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        gpus = float(device == "cuda" or (device == "auto" and has_gpus)) if given is None else given
        machines = [each["Resources"] for each in ray.nodes() if each["Alive"]]
        sizes = [(each.get("CPU", 0), each.get("GPU", 0)) for each in machines]
        if not any(size[0] >= cpus and size[1] >= gpus for size in sizes):
            largest = max(sizes, key=lambda size: (size[1] >= gpus, size))
            text = (
                f"a worker of {cpus:g} CPUs and {gpus:g} GPUs does not fit on any machine of Ray; the largest has "
                f"{largest[0]:g} CPUs and {largest[1]:g} GPUs"
            )
            if not may_grow:
                raise ConfigError(f"--ray-cpus, --ray-gpus: {text}; expected fewer, or fewer --threads and --workers")
            logger.warning("%s; waiting for the cluster to add one", text)
        self._ray, self._cpus, self._gpus, self._most = ray, cpus, gpus, options.actors
        self.on_gpu = gpus > 0

    def map(
        self, open_job: Callable[[], Callable[[int], T]], items: Sequence[int], what: str
    ) -> Iterator[tuple[int, T]]:
        """Yield each item with the result of the job for it, in the order in which they are finished.

        Args:
            open_job: prepares a worker, once, such as by loading a model, and returns the function item → result; it
                is pickled.
            items: numbers of the items.
            what: noun for an item, for messages, such as "shard".

        Raises:
            VqclipError: the first error of an item, of the kind that the worker raised; its worker died several times;
                or Ray failed.
        """
        ray, left, workers = self._ray, [*items][::-1], list[Any]()
        size = {"num_cpus": self._cpus, "num_gpus": self._gpus}
        kind = ray.remote(**size, max_restarts=-1, max_task_retries=_STARTS - 1)(_Worker)
        limit = self._most or len(items)
        replies: dict[Any, tuple[Any, int | None]] = {}  # reply → worker and its item; None: it starts
        item: int | None = None
        try:
            job, surroundings = ray.put(open_job), (os.getcwd(), os.environ.get("VQCLIP_CACHE"))
            while left or any(each is not None for _, each in replies.values()):
                starting = sum(each is None for _, each in replies.values())
                for _ in range(min(_WAITING - starting, len(left) - starting, limit - len(workers))):
                    workers.append(kind.remote(job, *surroundings))
                    replies[workers[-1].start.remote()] = workers[-1], None
                reply = ray.wait([*replies])[0][0]
                worker, item = replies.pop(reply)
                result = ray.get(reply)
                if left:
                    following = left.pop()
                    replies[worker.run.remote(following)] = worker, following
                if item is not None:
                    yield item, result
        except Exception as error:  # Ray raises errors of many classes
            raise self._explain(error, what, item) from None
        finally:
            with contextlib.suppress(Exception):  # the connection may be lost
                for worker in workers:
                    ray.kill(worker)

    def _explain(self, error: Exception, what: str, item: int | None) -> VqclipError:
        exceptions, cause = self._ray.exceptions, getattr(error, "cause", None)
        if isinstance(cause, VqclipError):
            return cause
        if isinstance(cause, OSError):
            path = os.fsdecode(cause.filename or "")
            return VqclipError(f"{path}: {cause.strerror or cause}".removeprefix(": "))
        if isinstance(error, exceptions.RayTaskError):
            logger.error("%s", mask_credentials(str(error).rstrip()))
            return VqclipError(f"{type(cause).__name__}: {_first_line(error)}")
        if item is not None and isinstance(error, exceptions.RayActorError | exceptions.OutOfMemoryError):
            return VqclipError(
                f"{what} {item}: the worker that made it died {_STARTS} times; was it killed for memory? Fewer workers "
                "on a machine (more --ray-cpus each) or a smaller --batch-size need less"
            )
        return VqclipError(
            f"Ray cannot finish the {what}s ({type(error).__name__}: {_first_line(error)}); what is finished stays: "
            "run the same command to continue. Every machine needs the same vqclip"
        )


class _Worker:
    """A process of Ray that works on items, in the working folder and with the cache folder of the driver."""

    def __init__(self, open_job: Callable[[], Callable[[int], Any]], folder: str, cache: str | None):
        self._open = open_job
        self._work: Callable[[int], Any] | None = None
        # End with Ray on this machine: Ray's own end of a worker can hang, with its GPU memory.
        from vqclip import dist  # torch, which the options of commands can do without

        dist.signal_at_parent_death(signal.SIGKILL)
        with contextlib.suppress(OSError):  # this machine may lack it
            os.chdir(folder)
        if cache is not None:
            os.environ["VQCLIP_CACHE"] = cache

    def start(self) -> None:
        """Return when the process has started."""

    def run(self, item: int) -> Any:
        """Return the result for an item."""
        self._work = self._work or self._open()  # not in the constructor, whose errors would be those of the worker
        return self._work(item)


def _first_line(error: BaseException) -> str:
    """Return the first line of a message; of Ray's errors, which begin with a traceback, that of the cause."""
    cause = getattr(error, "cause", None)
    text = str(cause or error).strip() or type(error).__name__
    return mask_credentials(text.splitlines()[0][:400])
