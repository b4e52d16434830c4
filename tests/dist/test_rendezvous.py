"""How the ranks of one life of a job find each other in a store that holds the keys of an earlier one."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as c10d

from vqclip.dist._rendezvous import private_store


def meet(store, delays, timeout_s=20.0):
    """What each rank finds under "address" once it has written its own rank there, if it is rank 0."""
    found = [None] * len(delays)

    def rank(number):
        time.sleep(delays[number])
        own = private_store(store, number, len(delays), timeout_s)
        if number == 0:
            time.sleep(0.2)  # the others are there before
            own.set("address", f"life {life}")
        found[number] = own.get("address").decode()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(delays))]
    life = meet.life = getattr(meet, "life", 0) + 1
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found, f"life {life}"


@pytest.mark.parametrize("delays", [(0, 0, 0), (0.3, 0, 0.1), (0, 0.3, 0)], ids=str)
def test_each_life_finds_its_own_and_not_what_the_last_one_left(delays):
    store = c10d.HashStore()
    store.set_timeout(timedelta(seconds=20))
    for _ in range(3):
        found, expected = meet(store, delays)
        assert found == [expected] * 3


def test_who_waits_for_a_rank_0_that_never_comes_is_told():
    store = c10d.HashStore()
    store.set_timeout(timedelta(seconds=20))
    meet(store, (0, 0))
    with pytest.raises(c10d.DistError, match="not all ranks arrived within 0.3 s"):
        private_store(store, 1, 2, 0.3)
