"""Random numbers from a key, in tensors: equal on every rank, without a generator's state or a look at a value."""

from __future__ import annotations

import torch
from torch import Tensor


def keyed_integers(key: int, step: Tensor, count: int) -> Tensor:
    """``(count,)`` int64, uniform over ``[0, 2^62)``, keyed by (key, step, index).

    The finaliser of SplitMix64 (Steele et al. 2014) over a counter: any two of them are as good as independent. It
    needs int64 arithmetic only, so it compiles, runs on the device of ``step`` and never waits for it.

    Args:
        key: names the stream, such as one layer's in one run.
        step: () int64, number of the optimizer step.
        count: how many numbers.
    """
    index = torch.arange(count, device=step.device)
    return _mix(_mix(_mix(step + key) + index)) & (2**62 - 1)


def _mix(x: Tensor) -> Tensor:
    # int64 wraps around; the constants are SplitMix64's, as signed numbers.
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & (2 ** (64 - by) - 1)  # a logical shift: `>>` alone repeats the sign
