"""Time of the guards: the training loop with all of them and without, in turns.

Prints tables, after about 15 minutes on two CPU cores.

    OMP_NUM_THREADS=1 python benchmarks/guards.py

The method, and the model, are those of `benchmarks/training.py`, row `fsq`. `fsq` has the guards as they come: the look
at loss and gradient, spikes, collapse, and the watchdog for steps that hang. `fsq, unguarded` has none of them.

The rounds of two processes differ by more than the guards cost, so there are many, of one step each, and the last line
says between which ratios their median is with 95 % confidence (by order statistics: no distribution is supposed).
"""

from __future__ import annotations

import argparse
import math
import sys

import training
from vqclip.scenes import make_scenes


def confident_median(values: list[float]) -> tuple[float, float]:
    """Return an interval that contains the median of the distribution with at least 95 % confidence."""
    ordered, number = sorted(values), len(values)
    outside, rank = 0.0, 0
    while outside + math.comb(number, rank) / 2**number <= 0.025:
        outside += math.comb(number, rank) / 2**number
        rank += 1
    if rank == 0:
        return -math.inf, math.inf
    return ordered[rank - 1], ordered[-rank]


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="rounds of each, without the warm-up")
    parser.add_argument("--steps", type=int, default=1, help="steps of a round")
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    options.rows = (training.FSQ, training.UNGUARDED)
    rounds = training.measure(options, make_scenes() / "train")
    training.report(rounds)
    ratios = [on["cpu"] / off["cpu"] for on, off in zip(*rounds.values(), strict=True)]
    low, high = confident_median(ratios)
    print(f"\nCPU time of a step with guards over one without: the median is in {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
