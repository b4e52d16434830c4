"""Pause of training by a checkpoint: saved in the background, and saved in the loop.

Prints a table, after about 1 minute on two CPU cores.

    OMP_NUM_THREADS=1 python benchmarks/saving.py
    OMP_NUM_THREADS=1 python benchmarks/saving.py --config configs/base.yaml --rounds 5

Model and optimizer are the configuration's, with an optimizer state as after a step. A round saves once each way, in
turn; a background save is waited for before the next round begins, outside of the pause. The first of each is left out:
it makes the folder and takes the host's memory, which later ones find. Prints a Markdown table of medians, with the
range of the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

from vqclip.config import load_config
from vqclip.process.memory import keep_freed_memory
from vqclip.train import TrainConfig
from vqclip.train.checkpointer import Checkpointer
from vqclip.train.optim import Schedule
from vqclip.train.step import TrainStep
from vqclip.train.tasks.contrastive import ContrastiveTask


def training_step(config: TrainConfig) -> TrainStep:
    """A step whose optimizer holds what it holds after the first update."""
    model = config.model.build()
    optimizer = config.optim.build(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    schedule = Schedule(config.optim, config.train.steps)
    return TrainStep(
        ContrastiveTask(model, config.loss.build()), optimizer, schedule, config.train, None, config.run.seed
    )


def main() -> None:
    """Time the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/vit_b16.yaml"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to save; by default a temporary folder")
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    keep_freed_memory()
    step = training_step(load_config(TrainConfig, options.config, []))
    size = sum(tensor.nbytes for tensor in step.model.state_dict().values())
    size += sum(t.nbytes for state in step.optimizer.state.values() for t in state.values() if t.ndim)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ways = {
            "waited for": Checkpointer(Path(folder) / "waited", {}, step, 1, in_background=False),
            "in the background": Checkpointer(Path(folder) / "background", {}, step, 1),
        }
        pauses: dict[str, list[float]] = {name: [] for name in ways}
        wholes: dict[str, list[float]] = {name: [] for name in ways}
        for number in tqdm(range(options.rounds + 1), desc="rounds", disable=None):
            for name, checkpointer in ways.items():
                begun = time.perf_counter()
                checkpointer.save(number, {"replaced": {}, "caption_lengths": {}})
                paused = time.perf_counter() - begun
                checkpointer.wait()
                if number:
                    pauses[name].append(paused)
                    wholes[name].append(time.perf_counter() - begun)
    print(f"{options.config}: {size / 2**20:,.0f} MiB of weights and optimizer state, {options.rounds} rounds\n")
    print("| save | pause, s | until on the disk, s |\n|---|---|---|")
    for name in ways:
        print(f"| {name} | {statistics.median(pauses[name]):.3f} | {statistics.median(wholes[name]):.2f} |")
    ratios = [b / w for w, b in zip(pauses["waited for"], pauses["in the background"], strict=True)]
    print(f"\nratio of the pauses: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
