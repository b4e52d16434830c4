"""Random numbers from a key, in tensors: equal on every rank, without a generator's state or a look at a value."""

from __future__ import annotations

from torch import Tensor

LAST = 2**63 - 1
"""What is sorted behind every random number."""


def stream(key: int, step: Tensor) -> Tensor:
    """() int64 that names the stream of one layer in one step.

    Args:
        key: names the layer in the run.
        step: () int64, number of the optimizer step.
    """
    return _mix(_mix(step + key))


def random_integers(stream: Tensor, index: Tensor) -> Tensor:
    """One number of a stream for every entry of ``index``, int64, uniform over ``[0, 2^62)``.

    The finaliser of SplitMix64 (Steele et al. 2014) over a counter: any two of them are as good as independent. It
    needs int64 arithmetic only, so it compiles, runs on the device of ``index`` and never waits for it.
    """
    return _mix(stream + index) & (2**62 - 1)


def random_order(stream: Tensor, index: Tensor, keep: Tensor) -> Tensor:
    """Random permutation of the last dimension, in which what is not kept comes last.

    Args:
        stream: broadcast against ``index``.
        index: ``(..., n)`` int64, by which the entries are known: another arrangement of them is the same permutation.
        keep: ``(..., n)`` bool.
    """
    return random_integers(stream, index).masked_fill(~keep, LAST).argsort(dim=-1, stable=True)


def _mix(x: Tensor) -> Tensor:
    # int64 wraps around; the constants are SplitMix64's, as signed numbers.
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & (2 ** (64 - by) - 1)  # a logical shift: `>>` alone repeats the sign
