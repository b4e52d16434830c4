"""The nodes of a job: which ranks run on one machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from vqclip.dist._control import gather_json

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def nodes() -> tuple[int, ...]:
    """Return the node of every rank, numbered from 0 in the order of their first ranks. A collective.

    Ranks of one torchrun are one node, also where several of them run on one machine; without torchrun, the ranks of
    one machine.
    """
    found = gather_json(_node())
    return tuple(list(dict.fromkeys(found)).index(each) for each in found)


def _node() -> str:
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""  # machines may have equal names, as "localhost"
    return os.environ.get("GROUP_RANK") or f"{socket.gethostname()} {boot}"
