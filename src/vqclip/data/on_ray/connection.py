"""Connect to a Ray cluster, or start a Ray on this machine, with its output in the log."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator
from typing import Any

from vqclip.data.on_ray.cluster import RayCluster
from vqclip.data.on_ray.options import RayOptions
from vqclip.data.on_ray.worker import first_line
from vqclip.data.remote import mask_credentials
from vqclip.errors import ConfigError

__all__ = ["connect_to_ray"]

logger = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it reports to its makers otherwise
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a warning about GPUs that workers without GPUs do not use
    "RAY_DATA_LOG_LEVEL": "CRITICAL",
}
_OBJECT_STORE_BYTES = 100 << 20
"""Shared memory of a Ray on this machine alone: only numbers and counts pass through it."""
_ANSWER_S = 10.0
"""Longest wait for a connection to a cluster."""
_SHOWN = 160
"""Characters of a message of Ray in the log."""


@contextlib.contextmanager
def connect_to_ray(options: RayOptions) -> Iterator[RayCluster]:
    """Connect to a cluster, or start a Ray on this machine, for the time of the block. A Ray in use is left as it is.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, or this is one of several processes of torchrun.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--engine ray: got several processes of torchrun; expected one, as Ray starts the workers")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    ray = _import_ray()
    address = options.address or os.environ.get("RAY_ADDRESS") or "local"
    started = not ray.is_initialized()
    with _messages_to_log():
        if started:
            _start(ray, address)
        try:
            yield RayCluster(ray, options, address == "local")
        finally:
            if started:
                ray.shutdown()


def _import_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as error:
        raise ConfigError(
            f"--engine ray: cannot import ray.data ({error}); pip install 'vqclip[ray]', or --engine local"
        ) from None
    return ray


def _start(ray: Any, address: str) -> None:
    limits = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False} if address == "local" else {}
    try:
        if found := re.fullmatch(r"(?:ray://)?([^/:]+):(\d{1,5})", address):  # Ray itself tries for minutes
            socket.create_connection((found[1], int(found[2])), _ANSWER_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **limits)
    except Exception as error:  # OSError, ValueError, RuntimeError, those of grpc, ...
        raise ConfigError(
            f"--ray-address: got {address}, which cannot be used ({first_line(error)}); expected the address of a "
            "running cluster (auto on one of its machines), or nothing for a Ray on this machine"
        ) from None


@contextlib.contextmanager
def _messages_to_log() -> Iterator[None]:
    """Send what Ray prints to stdout within the block to the log, shortened."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(_Log()):
        warnings.filterwarnings("ignore", module=r"ray\..*")
        yield


class _Log(io.TextIOBase):
    """A stream whose lines are shortened and written to the log."""

    def write(self, text: str) -> int:
        for line in re.sub(r"\x1b\[\d*m", "", text).splitlines():
            if line := line.strip():
                more = "..." if len(line) > _SHOWN else ""
                logger.info("Ray: %s%s", mask_credentials(line[:_SHOWN]), more)
        return len(text)
