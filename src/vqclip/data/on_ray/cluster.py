"""Map a job over its items on the workers of Ray."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from vqclip.data.on_ray.options import RayOptions
from vqclip.data.on_ray.worker import RayJob, Starts, Surroundings, Worker, first_line, read_reply
from vqclip.errors import ConfigError, VqclipError

__all__ = ["RayCluster"]

logger = logging.getLogger(__name__)

_BLOCKS = 16384
"""Most tasks of a job; with more items each task has several."""


class RayCluster:
    """A connection to Ray; see `connect_to_ray`."""

    def __init__(self, ray: Any, options: RayOptions, here: bool):
        self._ray, self._options, self._here = ray, options, here

    def cpus(self, wanted: int) -> float:
        """Return the CPUs of a worker: those of the options, else as many as wanted."""
        return self._options.cpus or float(wanted)

    def gpus(self, device: str) -> float:
        """Return the GPUs of a worker for the device ``cpu``, ``cuda``, or ``auto``: a GPU if the cluster has any.

        Raises:
            ConfigError: the options and the device exclude each other.
        """
        given = self._options.gpus
        if (device == "cpu" and given) or (device == "cuda" and given == 0):
            raise ConfigError(f"--ray-gpus: got {given:g} with --device {device}; expected auto, or leave one out")
        if given is not None:
            return given
        return float(device == "cuda" or (device == "auto" and self._ray.cluster_resources().get("GPU", 0) > 0))

    def map(
        self, job: RayJob, items: Sequence[int], what: str, cpus: float, gpus: float
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each item with the result of the job for it, in the order in which they are finished.

        Args:
            job: the work; it is pickled, and opened once in each worker.
            items: numbers of the items.
            what: noun for an item, for messages, such as "shard".
            cpus: of a worker.
            gpus: of a worker.

        Raises:
            VqclipError: the first error of an item, of the kind that the worker raised; its worker died several times;
                or Ray failed.
            ConfigError: no machine has room for a worker.
        """
        if not items:
            return
        ray = self._ray
        self.require_room(cpus, gpus)
        size = self._options.actors and min(self._options.actors, len(items))
        pool = {"size": size} if size else {"min_size": 1}
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        starts = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Starts).remote()
        try:
            data = ray.data.from_items([{"item": n} for n in items], override_num_blocks=min(len(items), _BLOCKS))
            replies = data.map_batches(
                Worker,
                fn_constructor_args=(job, starts, what, Surroundings()),
                batch_size=1,
                batch_format="numpy",
                # Two tasks at most wait at a worker, so that the last ones are spread over all workers.
                compute=ray.data.ActorPoolStrategy(**pool, max_tasks_in_flight_per_actor=2),
                num_cpus=cpus,
                num_gpus=gpus,
            )
            for row in replies.iter_rows():
                yield int(row["item"]), read_reply(row["reply"])
        except VqclipError:
            raise
        except Exception as error:  # Ray raises errors of many classes
            logger.debug("Ray failed", exc_info=error)
            raise VqclipError(
                f"Ray cannot finish the {what}s ({type(error).__name__}: {first_line(error)}); what is finished "
                "stays: run the same command to continue. Every machine needs the same vqclip"
                f"{self._log_folder()}"
            ) from None
        finally:
            with contextlib.suppress(Exception):  # the connection may be lost
                ray.kill(starts)

    def require_room(self, cpus: float, gpus: float) -> None:
        """Raise ConfigError if a worker fits on no machine of this Ray; a cluster may add machines, so it may wait."""
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(each.get("CPU", 0) >= cpus and each.get("GPU", 0) >= gpus for each in machines):
            return
        largest = max(((each.get("CPU", 0), each.get("GPU", 0)) for each in machines), default=(0, 0))
        text = (
            f"a worker of {cpus:g} CPUs and {gpus:g} GPUs does not fit on any machine of Ray; the largest has "
            f"{largest[0]:g} CPUs and {largest[1]:g} GPUs"
        )
        if self._here:
            raise ConfigError(f"--ray-cpus, --ray-gpus: {text}; expected fewer, or fewer --threads and --workers")
        logger.warning("%s; waiting for the cluster to add one", text)

    def _log_folder(self) -> str:
        try:
            folder = importlib.import_module("ray._private.worker").global_worker.node.get_session_dir_path()
        except Exception:  # only the message lacks it
            return ""
        return f"; its logs: {folder}/logs"
