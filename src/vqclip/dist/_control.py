"""Small messages between ranks: flags, seeds, and values as JSON (never pickle, which can run code)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from vqclip import errors
from vqclip.dist._collectives import all_gather, reduce_
from vqclip.dist._state import (
    control_device,
    exchange_timer,
    is_distributed,
    is_main,
    lost_peer,
    named_errors,
    rank,
    run_collective,
    world_size,
)
from vqclip.errors import CheckpointError, DistributedError, StopRequested
from vqclip.io.atomic import TEMPORARY, try_lock

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def any_rank(flag: bool | Tensor) -> bool:
    """Return True if `flag` is true on at least one rank, for example to stop all ranks at the same step."""
    if not is_distributed():
        return bool(flag)
    return bool(reduce_(torch.tensor(int(bool(flag)), device=control_device()), "max"))


def start_any_rank(read_flags: Callable[[], Sequence[bool]]) -> Callable[[], Sequence[bool]]:
    """Begin `any_rank` of several flags and return a function that ends it; no rank waits for the others in between.

    Both are collectives, and other ones may come between them.

    Args:
        read_flags: returns this rank's flags. Called now; in one process, when the result is wanted.
    """
    if not is_distributed():
        return read_flags
    flags = torch.tensor(list(read_flags()), dtype=torch.int32, device=control_device())
    started: list[c10d.Work] = []
    run_collective("any_rank", lambda: started.append(c10d.all_reduce(flags, op=c10d.ReduceOp.MAX, async_op=True)))

    def end() -> list[bool]:
        with named_errors("any_rank"):
            ended = exchange_timer.begin([flags])
            started[0].wait()
            ended()
        return [bool(each) for each in flags.tolist()]

    return end


def barrier() -> None:
    """Wait until every rank has called this."""
    any_rank(False)


def shared_seed() -> int:
    """Draw a random integer in [0, 2^63), the same on every rank, from the system's entropy and no generator."""
    return int(broadcast_json(secrets.randbits(63)))


def broadcast_json(value: Any) -> Any:
    """Return rank 0's `value` on every rank.

    Args:
        value: A JSON value; ignored on the other ranks. It is returned as JSON has it: tuples as lists, keys as
            strings.

    Raises:
        DistributedError: `value` is not a JSON value. Raised on every rank.
    """
    if not is_distributed():
        return _decode(_encode(value))
    payload = _encode(value) if is_main() else b""
    length = torch.tensor(len(payload), device=control_device())
    run_collective("broadcast_json", c10d.broadcast, length, 0)
    data = _to_tensor(payload) if is_main() else torch.empty(int(length), dtype=torch.uint8, device=length.device)
    run_collective("broadcast_json", c10d.broadcast, data, 0)
    return _decode(_to_bytes(data))


def run_on_main(work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 only and return its result on every rank.

    Args:
        work: Returns a JSON value; calls no collective.

    Raises:
        VqclipError: Raised by `work`, on every rank. Any other error becomes a DistributedError with its name on all
            ranks except 0.
    """
    with raise_on_all_ranks():
        result = work() if is_main() else None
    return broadcast_json(result)


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise an exception of the block on all ranks if one rank fails, so that no rank waits for it.

    The block must not contain a collective.

    Raises:
        StopRequested: On every rank, if one raised it.
        VqclipError: The error of the first failed rank, on every rank. Any other error becomes a DistributedError with
            its name on the other ranks.
    """
    failure = None
    try:
        yield
    except DistributedError:  # a collective has failed, so another one would wait for nothing
        raise
    except Exception as error:  # of any kind, because the other ranks wait for the result
        failure = error
    found = gather_json(None if failure is None else [type(failure).__name__, str(failure)])
    if failed := [number for number, each in enumerate(found) if each is not None]:
        first = min(failed, key=lambda number: (found[number][0] != StopRequested.__name__, number))
        if failure and first == rank():
            raise failure
        name, message = found[first]
        kind = getattr(errors, name, None)
        raise (kind(message) if kind else DistributedError(f"rank {first} failed: {name}: {message}")) from failure


def gather_json(value: Any) -> list[Any]:
    """Return every rank's `value` in rank order, on every rank.

    Args:
        value: A JSON value. It is returned as JSON has it: tuples as lists, keys as strings.

    Raises:
        DistributedError: A rank's value is not a JSON value. Raised on every rank.
    """
    if not is_distributed():
        return [_decode(_encode(value))]
    payload = _to_tensor(_encode(value))
    lengths = all_gather(torch.tensor([len(payload)], device=payload.device), [1] * world_size()).tolist()
    parts = all_gather(payload, lengths).split(lengths)
    return [_decode(_to_bytes(part)) for part in parts]


def differing_ranks(value: Any) -> list[str]:
    """Return the ranks, as text, whose JSON value differs from that of rank 0; the same list on every rank."""
    found = gather_json(value)
    return [str(number) for number, each in enumerate(found) if each != found[0]]


def nodes() -> tuple[int, ...]:
    """Return the node of every rank, numbered from 0 in the order of their first ranks. A collective.

    Ranks of one torchrun are one node, also where several of them run on one machine; without torchrun, the ranks of
    one machine.
    """
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""  # machines may have equal names, as "localhost"
    found = gather_json(os.environ.get("GROUP_RANK") or f"{socket.gethostname()} {boot}")
    return tuple(list(dict.fromkeys(found)).index(each) for each in found)


def ranks_that_see(folder: Path) -> list[int]:
    """Return the ranks whose path `folder` names the folder of this rank, itself included. A collective.

    Each rank creates a file in it, and looks for all files. A rank that cannot write to it, or has no such folder,
    counts as alone.
    """
    if not is_distributed():
        return [rank()]
    name = f"{TEMPORARY}ranks-{shared_seed():016x}-"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context((folder / f"{name}{rank()}").open("w"))
            try_lock(file.fileno())  # unlocked ones are leftovers
        barrier()
        seen = [other for other in range(world_size()) if other == rank() or (folder / f"{name}{other}").exists()]
        barrier()  # before this, another rank may still look for the file
        with contextlib.suppress(OSError):
            (folder / f"{name}{rank()}").unlink()
    return seen


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


# A value that cannot be encoded is sent as an error, so that all ranks raise and none waits.
def _encode(value: Any) -> bytes:
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError) as error:
        return json.dumps({"error": f"{type(value).__name__}: {error}"}).encode()


def _decode(payload: bytes) -> Any:
    message = json.loads(payload)
    if "error" in message:
        raise DistributedError(
            f"got a value that JSON cannot hold ({message['error']}); "
            "expected numbers, strings, booleans, None, and lists and dicts of them"
        )
    return message["value"]


def _to_tensor(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(control_device())


def _to_bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
