"""What the guards cost: the training loop with all of them beside one without, in turns.

    OMP_NUM_THREADS=1 python benchmarks/guards.py

The method, and the model, are those of `benchmarks/training.py`, row `fsq`. `fsq` has the guards as they come: the look
at loss and gradient, spikes, collapse, and the watchdog for steps that hang. `fsq, unguarded` has none of them.
"""

from __future__ import annotations

import argparse

import training
from vqclip.data.scenes import make_scenes


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each, without the warm-up")
    parser.add_argument("--steps", type=int, default=2, help="steps of a round")
    options = parser.parse_args()
    options.rows = (training.FSQ, training.UNGUARDED)
    training.report(training.measure(options, make_scenes().train))


if __name__ == "__main__":
    main()
