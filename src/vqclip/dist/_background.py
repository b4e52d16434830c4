"""A process group for background threads, so that they can wait for each other during the training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as c10d

from vqclip.dist._state import lost_peer, named_errors, rank, world_size
from vqclip.errors import CheckpointError


class BackgroundGroup:
    """Connections of one background thread of each rank to those of the others. A collective.

    They are not those of the training, so the two may be used at once. `close` ends them.

    Args:
        timeout_s: longest wait for another rank, in seconds.
    """

    def __init__(self, timeout_s: float):
        with named_errors("connecting background threads"):
            group = c10d.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, c10d.ProcessGroup)
        self._group = group

    @contextlib.contextmanager
    def raise_on_all_ranks(self, what: str) -> Iterator[None]:
        """Wait for the thread of every rank at the end of the block; raise on all ranks if one failed in it.

        Args:
            what: the work of the block, as text for the message.

        Raises:
            CheckpointError: on the other ranks, if one failed; that one raises its own error.
            DistributedError: a rank died, or did not come within the timeout.
        """
        failure = None
        try:
            yield
        except Exception as error:  # of any kind, because the other ranks wait for the result
            failure = error
        flags = torch.zeros(world_size(), dtype=torch.int32)
        flags[rank()] = failure is not None
        try:
            c10d.all_reduce(flags, group=self._group)
        except RuntimeError as error:
            raise lost_peer(what, error) from (failure or error)
        if failure is not None:
            raise failure
        if failed := flags.nonzero().flatten().tolist():
            raise CheckpointError(f"{what} failed on rank {', '.join(map(str, failed))}, whose message says why")

    def close(self) -> None:
        """End the connections."""
        c10d.destroy_process_group(self._group)
