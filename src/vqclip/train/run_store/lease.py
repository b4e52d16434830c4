"""Lease on a run folder in an object store, so that one job at a time writes to it."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from typing import NamedTuple

from vqclip.data.remote.folder import RemoteFolder
from vqclip.errors import CheckpointError, ConfigError, StorageError
from vqclip.process import progress

logger = logging.getLogger(__name__)

LEASES = "lease"
"""Name of the folder of leases."""
_NUMBER = re.compile(rf"{LEASES}/(\d{{8,18}})\.json", re.ASCII)
RENEW_S = 20.0
"""Seconds between two renewals."""
EXPIRE_S = 90.0
"""Seconds without a renewal after which another job may take the lease."""
_POLL_S = 1.0
_MOST = 4096
"""Bytes of a lease."""


class _Found(NamedTuple):
    """Newest lease of a folder."""

    number: int
    content: bytes


class Lease:
    """Right to write to a run folder, as numbered files: the highest number holds it, and renews its file.

    A job that finds the lease of another one watches it: if it changes, that job lives and this one is refused; if it
    does not change for `EXPIRE_S` seconds, it has expired. So no two clocks are compared. Then the job creates the next
    number, which only one of several jobs can do; a former holder that was merely asleep finds the higher number before
    it completes a checkpoint, and stops.

    Args:
        folder: of the run.
        disk: random name of the folder on this disk that the job has locked. A lease with the same name was held by a
            job that has ended, and is taken at once.
    """

    def __init__(self, folder: RemoteFolder, disk: str):
        self._folder, self._disk = folder.with_limits(tries=3, total_s=30.0), disk
        self._name, self._renewals, self._number = secrets.token_hex(8), 0, 0
        self._lost: str | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lease, and renew it in a thread.

        Raises:
            ConfigError: another job holds it.
            StorageError: the store cannot be read or written.
        """
        while True:
            found = self._find()
            if found.content and not self._has_ended(found.content):
                self._wait(found)
            self._number = found.number + 1
            if self._folder.create(self._file(self._number), self._content()):
                break
        for number in range(max(1, found.number - 1), found.number + 1):
            self._folder.remove(self._file(number))
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Check that this job has the lease still.

        Raises:
            CheckpointError: another job has it, or it was removed.
            StorageError: the store cannot be read.
        """
        self.raise_if_lost()
        found = self._find()
        if found.number < self._number or not found.content:
            self._lost = "has lost its lease: its files were removed during the run"
        elif _read(found.content).get("name") != self._name:
            self._lost = (
                f"was taken over by another job ({_holder(found.content)}), after this one had not renewed its lease "
                f"for {EXPIRE_S:g} s"
            )
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise an error if a renewal has found that the lease is lost.

        Raises:
            CheckpointError: another job has it, or it was removed.
        """
        if self._lost is not None:
            raise CheckpointError(f"run.folder: {self._folder} {self._lost}; nothing more is written to it")

    def release(self) -> None:
        """End the lease, so that the next job need not wait; a failure is only logged."""
        if self._thread is None:
            return
        self._ending.set()
        self._thread.join()
        self._thread = None
        if self._lost is None:
            try:
                self._folder.write(self._file(self._number), self._content(released=True))
            except StorageError as error:
                logger.warning("%s: the lease could not be released: %s", self._folder, error)

    def _has_ended(self, content: bytes) -> bool:
        lease = _read(content)
        return lease.get("released") is True or lease.get("disk") == self._disk

    def _wait(self, found: _Found) -> None:
        """Wait until a lease has expired.

        Raises:
            ConfigError: it is renewed or replaced meanwhile.
        """
        logger.warning(
            "%s: has a lease of another job (%s); waiting %g s for its expiry",
            self._folder,
            _holder(found.content),
            EXPIRE_S,
        )
        end = time.monotonic() + EXPIRE_S
        while time.monotonic() < end:
            progress.heartbeat()
            time.sleep(_POLL_S)
            now = self._find()
            if now.content and self._has_ended(now.content):
                return
            if now != found:
                raise ConfigError(
                    f"run.name: {self._folder} is in use by another job ({_holder(now.content)}); wait for its end, "
                    "stop it, or give this run another name"
                )

    def _renew(self) -> None:
        while not self._ending.wait(RENEW_S):
            try:
                self.require()
                self._renewals += 1
                self._folder.write(self._file(self._number), self._content())
            except CheckpointError:
                return
            except StorageError as error:
                logger.warning("%s: the lease could not be renewed: %s", self._folder, error)

    def _find(self) -> _Found:
        """Return the newest lease; number 0 without one."""
        numbers = [int(match[1]) for name in self._folder.list(LEASES) if (match := _NUMBER.fullmatch(name))]
        newest = max(numbers, default=0)
        content = self._folder.read(self._file(newest)) if newest else None
        return _Found(newest, content or b"")

    def _content(self, released: bool = False) -> bytes:
        lease = {
            "name": self._name,
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "disk": self._disk,
            "renewals": self._renewals,
            "released": released,
        }
        return json.dumps(lease).encode()

    @staticmethod
    def _file(number: int) -> str:
        return f"{LEASES}/{number:08d}.json"


def _read(content: bytes) -> dict[str, object]:
    try:
        lease = json.loads(content[:_MOST])
    except (ValueError, RecursionError):
        return {}
    return lease if isinstance(lease, dict) else {}


def _holder(content: bytes) -> str:
    return str(_read(content).get("holder", "unknown"))[:200]
