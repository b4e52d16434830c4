"""Options of jobs on Ray."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vqclip.config import Config

__all__ = ["RayOptions"]


class RayOptions(Config):
    """Cluster of a job, and the number and size of its workers."""

    address: str | None = None
    """Ray cluster, such as auto or HOST:6379; without it RAY_ADDRESS, else a Ray on this machine for this job."""
    actors: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Number of workers; without it Ray starts with one and adds workers as far as the cluster has or gets room."""
    cpus: Annotated[float, Field(gt=0, le=1024)] | None = None
    """CPUs of a worker; without it one for each of its threads and data workers."""
    gpus: Annotated[float, Field(ge=0, le=1024)] | None = None
    """GPUs of a worker, such as 0.5 for two on one; without it 1 if the cluster has GPUs."""
