"""How the ranks of one life of a job find each other, and not those of a life before it.

torchrun serves the store through which process groups are formed, and keeps it when it starts the ranks again
(`--max-restarts`): with the addresses of the dead ranks still in it, which the new ones may read before those are
overwritten (https://github.com/pytorch/pytorch/issues/135712). So each life agrees upon a prefix of its own.
"""

from __future__ import annotations

import json
import secrets
import time

import torch.distributed as c10d

_LEADER = "vqclip/leader"
_LOOKS_S = (0.02, 0.5)
"""Seconds between two looks: at first, and at most."""


def private_store(store: c10d.Store, rank: int, world_size: int, timeout_s: float) -> c10d.Store:
    """A part of the store that only the ranks which call this now know of.

    Rank 0 publishes a fresh name, under which every other rank leaves one of its own; rank 0 answers with all of them.
    An answer that does not hold a rank's own name is one from an earlier life.

    Args:
        store: what all ranks reach, with whatever is in it.
        rank: of this process.
        world_size: of the job.
        timeout_s: longest wait for the others.

    Raises:
        torch.distributed.DistError: not all ranks came within `timeout_s`.
    """
    name = secrets.token_hex(8)
    if rank == 0:
        store.set(_LEADER, name)
        names = [store.get(f"vqclip/{name}/{other}").decode() for other in range(1, world_size)]
        store.set(f"vqclip/{name}/all", json.dumps(names))
        return c10d.PrefixStore(f"vqclip/{name}", store)
    end, (pause, longest) = time.monotonic() + timeout_s, _LOOKS_S
    while time.monotonic() < end:
        leader = store.get(_LEADER).decode()
        store.set(f"vqclip/{leader}/{rank}", name)
        answer = f"vqclip/{leader}/all"
        if store.check([answer]) and name in json.loads(store.get(answer)):
            return c10d.PrefixStore(f"vqclip/{leader}", store)
        time.sleep(pause)
        pause = min(2 * pause, longest)
    raise c10d.DistStoreError(f"rank 0 and the others did not all come within {timeout_s:g} s")
