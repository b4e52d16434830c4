"""Training tasks: what a run computes in a step. `base` is the contract, and each task is one file."""
