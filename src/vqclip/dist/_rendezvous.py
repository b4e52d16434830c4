"""A separate key prefix in torchrun's store for each start of a job.

Ranks exchange their addresses through a store that torchrun serves. With `--max-restarts`, torchrun restarts the ranks
but keeps the store, so that new ranks may read the addresses of dead ones
(https://github.com/pytorch/pytorch/issues/135712). Each start therefore uses a new key prefix.
"""

from __future__ import annotations

import json
import secrets
import time

import torch.distributed as c10d

_LEADER = "vqclip/leader"
_POLL_S = (0.02, 0.5)
"""Seconds between two polls: initial and longest."""


def private_store(store: c10d.Store, rank: int, world_size: int, timeout_s: float) -> c10d.Store:
    """Return a part of the store that only the ranks of this start use.

    Rank 0 publishes a random name. Every other rank stores its own random name under it, and rank 0 answers with all
    of them. An answer without a rank's own name comes from an earlier start and is ignored.

    Args:
        store: The store that all ranks share; may contain anything.
        rank: The rank of this process.
        world_size: The number of ranks of the job.
        timeout_s: The longest wait for the other ranks, in seconds.

    Raises:
        torch.distributed.DistError: Not all ranks arrived within `timeout_s`.
    """
    name = secrets.token_hex(8)
    if rank == 0:
        store.set(_LEADER, name)
        names = [store.get(f"vqclip/{name}/{other}").decode() for other in range(1, world_size)]
        store.set(f"vqclip/{name}/all", json.dumps(names))
        return c10d.PrefixStore(f"vqclip/{name}", store)
    end, (pause, longest) = time.monotonic() + timeout_s, _POLL_S
    while time.monotonic() < end:
        leader = store.get(_LEADER).decode()
        store.set(f"vqclip/{leader}/{rank}", name)
        answer = f"vqclip/{leader}/all"
        if store.check([answer]) and name in json.loads(store.get(answer)):
            return c10d.PrefixStore(f"vqclip/{leader}", store)
        time.sleep(pause)
        pause = min(2 * pause, longest)
    raise c10d.DistStoreError(f"not all ranks arrived within {timeout_s:g} s")
