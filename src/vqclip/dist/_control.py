"""Small messages between ranks: flags, seeds, and plain values as JSON (never pickle, which can run code)."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from vqclip import errors
from vqclip.dist._collectives import all_gather, reduce_
from vqclip.dist._state import Group, control_device, is_distributed, is_main, rank, run_collective, world_size
from vqclip.errors import DistributedError, StopRequested


def any_rank(flag: bool | Tensor, group: Group = None) -> bool:
    """Whether `flag` is true on at least one rank: how ranks agree to stop at the same step."""
    return any_rank_each([flag], group)[0]


def any_rank_each(flags: Sequence[bool | Tensor], group: Group = None) -> list[bool]:
    """`any_rank` for several flags, in one exchange."""
    mine = [bool(flag) for flag in flags]
    if not is_distributed(group):
        return mine
    return [
        bool(each) for each in reduce_(torch.tensor(mine, device=control_device(group)).int(), "max", group).tolist()
    ]


def barrier(group: Group = None) -> None:
    """Wait until every rank is here."""
    any_rank(False, group)


def shared_seed(group: Group = None) -> int:
    """A fresh random integer in [0, 2^63), the same on every rank; drawn from the system, touching no generator."""
    return int(broadcast_json(secrets.randbits(63), group=group))


def broadcast_json(value: Any, src: int = 0, group: Group = None) -> Any:
    """Give every rank the `value` that rank `src` of the group holds.

    Args:
        value: What JSON can hold; what the other ranks pass is ignored. Comes back as JSON gives it: tuples as lists,
            keys as strings.
        src: Rank within `group`.
        group: The ranks that take part; all of them by default.

    Raises:
        DistributedError: `value` cannot be written as JSON, or `src` is no rank of the group. Raised on every rank.
    """
    if not 0 <= src < world_size(group):
        raise DistributedError(f"broadcast_json: src is {src}, expected a rank from 0 to {world_size(group) - 1}")
    if not is_distributed(group):
        return _decode(_encode(value))
    source = src if group is None else c10d.get_global_rank(group, src)
    sends = c10d.get_rank() == source
    payload = _encode(value) if sends else b""
    length = torch.tensor(len(payload), device=control_device(group))
    run_collective("broadcast_json", c10d.broadcast, length, source, group=group)
    data = _to_tensor(payload, group) if sends else torch.empty(int(length), dtype=torch.uint8, device=length.device)
    run_collective("broadcast_json", c10d.broadcast, data, source, group=group)
    return _decode(_to_bytes(data))


def run_on_main(work: Callable[[], Any], group: Group = None) -> Any:
    """Run `work` on rank 0 alone and give every rank its result.

    Args:
        work: Returns what JSON can hold; uses no collective.
        group: The ranks that take part; all of them by default.

    Raises:
        VqclipError: What `work` raised, on every rank; for an error of another kind, a DistributedError that names it
            on all ranks but 0.
    """
    result, failure = None, None
    if is_main(group):
        try:
            result = work()
        except Exception as error:  # whatever it is, the others wait to hear of it
            failure = error
    result, description = broadcast_json([result, _describe(failure)], group=group)
    if description is not None:
        raise failure or _rebuild(description, 0)
    return result


@contextlib.contextmanager
def raise_on_all_ranks(group: Group = None) -> Iterator[None]:
    """Run the block on every rank; if it fails on one, raise on all of them instead of leaving the others waiting.

    The block must not contain a collective.

    Args:
        group: The ranks that take part; all of them by default.

    Raises:
        StopRequested: On every rank, if one raised it.
        VqclipError: What the first failed rank raised, on every rank; for an error of another kind, a DistributedError
            that names it on the other ranks.
    """
    failure = None
    try:
        yield
    except Exception as error:  # whatever it is, the others wait to hear of it
        failure = error
    descriptions = gather_json(_describe(failure), group)
    failed = [each for each in range(len(descriptions)) if descriptions[each] is not None]
    if failed:
        first = min(failed, key=lambda each: (descriptions[each][0] != StopRequested.__name__, each))
        raise failure if failure and first == rank(group) else _rebuild(descriptions[first], first)


def _describe(failure: Exception | None) -> list[str] | None:
    return None if failure is None else [type(failure).__name__, str(failure)]


def _rebuild(description: list[str], rank: int) -> Exception:
    name, message = description
    kind = getattr(errors, name, None)
    return kind(message) if kind else DistributedError(f"rank {rank} failed: {name}: {message}")


def gather_json(value: Any, group: Group = None) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank.

    Args:
        value: What JSON can hold. Comes back as JSON gives it: tuples as lists, keys as strings.
        group: The ranks that take part; all of them by default.

    Raises:
        DistributedError: Some rank's value cannot be written as JSON. Raised on every rank.
    """
    if not is_distributed(group):
        return [_decode(_encode(value))]
    payload = _to_tensor(_encode(value), group)
    lengths = all_gather(torch.tensor([len(payload)], device=payload.device), [1] * world_size(group), group).tolist()
    parts = all_gather(payload, lengths, group).split(lengths)
    return [_decode(_to_bytes(part)) for part in parts]


# A value that cannot be encoded travels as an error, so that all ranks raise instead of some waiting.
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


def _to_tensor(payload: bytes, group: Group) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(control_device(group))


def _to_bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
