"""Random numbers from a key, as tensors: equal on every rank, without generator state or device synchronisation."""

from __future__ import annotations

from torch import Tensor

LAST = 2**63 - 1
"""Sort key that is larger than every random number."""


def stream(key: int, step: Tensor) -> Tensor:
    """Return the () int64 random stream of one layer in one step.

    Args:
        key: key of the layer in the run.
        step: () int64, the number of the optimizer step.
    """
    return _mix(_mix(step + key))


def random_integers(stream: Tensor, index: Tensor) -> Tensor:
    """Return one number of a stream for every entry of ``index``, int64, uniform over ``[0, 2^62)``.

    The finaliser of SplitMix64 (Steele et al. 2014) over a counter: different indices give practically independent
    numbers. It uses only int64 arithmetic, so it can be compiled and runs on the device of ``index`` without waiting.
    """
    return _mix(stream + index) & (2**62 - 1)


def random_order(stream: Tensor, index: Tensor, keep: Tensor) -> Tensor:
    """Return a random permutation of the last dimension, with the entries that are not kept at the end.

    Args:
        stream: broadcast against ``index``.
        index: ``(..., n)`` int64, the identity of each entry: the permutation does not depend on their arrangement.
        keep: ``(..., n)`` bool.
    """
    return random_integers(stream, index).masked_fill(~keep, LAST).argsort(dim=-1, stable=True)


def _mix(x: Tensor) -> Tensor:
    # int64 wraps around. The constants of SplitMix64 as signed numbers.
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & (2 ** (64 - by) - 1)  # a logical shift: `>>` alone repeats the sign
