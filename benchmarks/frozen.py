"""Cost of a training step by the part of the image tower that trains: memory, optimizer state, checkpoint, time.

Prints a table, after about 1 minute on two CPU cores.

    OMP_NUM_THREADS=1 python benchmarks/frozen.py
    OMP_NUM_THREADS=1 python benchmarks/frozen.py --tower vit_small_patch16_224 --batch 64 --rounds 5

The image tower is a ViT of timm with random weights; adapters need `pip install 'vqclip[lora]'`. A small text
transformer and both heads train in every row, so no figure can reach zero. Images and captions are random numbers.

Peak memory is that of a whole step on the CPU (forward, backward, clipping, update) above what exists before it:
weights, optimizer state and the batch. torch's profiler records every block that torch's CPU allocator gives out and
takes back in the step; the peak is the largest running sum. It contains activations, gradients, and the temporary
tensors of kernels that torch allocates; not memory that oneDNN or MKL take by themselves. It is the same in each run.

Checkpoints are saved after a step and their files counted. `frozen/` is written once in a run; its size is added in the
column after that of a checkpoint. In a round each row runs one step, in changing order; seconds are CPU time, the first
two rounds are left out. Prints a Markdown table of medians; in brackets the ratio to `all`, for seconds the median of
the rounds' ratios with the smallest and largest.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from vqclip.data import Batch
from vqclip.process.memory import keep_freed_memory
from vqclip.train import TrainConfig
from vqclip.train.checkpointer import Checkpointer
from vqclip.train.optim import Schedule
from vqclip.train.step import TrainStep
from vqclip.train.tasks.contrastive import ContrastiveTask

MIB = 2**20
WARM_UP = 2
ROWS = ("all", "{last: 2}", "{lora: {rank: 8}}", "none")
COLUMNS = (
    "| image tower's `train` | weights that train, millions | peak memory of a step, MiB | optimizer state, MiB "
    "| checkpoint, MiB | checkpoint and `frozen/`, MiB | CPU s a step |"
)
CODES = {"kind": "product", "codebooks": 4, "layer": {"kind": "fsq", "levels": [8, 8, 8]}}
HEAD = {"quantizer": CODES, "width": 64, "heads": 2, "depth": 0}
TEXT = {"kind": "transformer", "context_length": 16, "width": 32, "heads": 2, "layers": 2}


def training_step(options: argparse.Namespace, row: str) -> TrainStep:
    """Build a step whose image tower trains as ``row`` says."""
    tower = {"kind": "timm", "name": options.tower, "image_size": options.image_size, "train": yaml.safe_load(row)}
    tree = {
        "data": {"sources": [{"kind": "shards", "path": "unused"}]},
        "model": {"embed_dim": 64, "image": {"tower": tower, **HEAD}, "text": {"tower": TEXT, **HEAD}},
        "loss": {"kind": "contrastive"},
        "optim": {"warmup_steps": 10},
    }
    config = TrainConfig.model_validate(tree)
    torch.manual_seed(0)
    model = config.model.build().train()
    optimizer, schedule = config.optim.build(model), Schedule(config.optim, config.train.steps)
    clip_norm = config.optim.clip_grad_norm
    return TrainStep(
        ContrastiveTask(model, config.loss.build()), optimizer, schedule, config.train, clip_norm, config.run.seed
    )


def random_batch(options: argparse.Namespace, step: TrainStep) -> Batch:
    """Draw images, and captions of random numbers."""
    size, side = options.batch, options.image_size
    numbers = torch.arange(size)
    images = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8)
    texts = step.model.text.preprocess([f"a {number}" for number in torch.randint(0, 10**6, (size,)).tolist()])
    return Batch(0, 0, images, texts, numbers, torch.full((size,), -1), numbers, size)


def peak_memory(step: TrainStep, batch: Batch, number: int) -> int:
    """Return the bytes at the peak of a step above those before it."""
    step.optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(batch, number)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def optimizer_bytes(step: TrainStep) -> int:
    """Return the bytes of the optimizer's state."""
    return sum(t.nbytes for state in step.optimizer.state.values() for t in state.values() if t.ndim)


def saved_bytes(step: TrainStep, run: Path) -> tuple[int, int]:
    """Save a checkpoint; return the bytes of its files, and of those that the run stores once."""
    checkpointer = Checkpointer(run / "checkpoints", {}, step, 1, in_background=False)
    checkpointer.frozen.write()
    checkpointer.save(1, {"replaced": {}, "caption_lengths": {}})
    return folder_bytes(checkpointer.path(1)), folder_bytes(checkpointer.frozen.path.parent)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 without one."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure_seconds(steps: dict[str, TrainStep], batch: Batch, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of a step of each row, for each round."""
    seconds: dict[str, list[float]] = {row: [] for row in steps}
    for number in tqdm(range(rounds + WARM_UP), desc="rounds", disable=None):
        names = list(steps)
        first = number % len(names)
        for row in names[first:] + names[:first]:
            begun = time.process_time()
            steps[row](batch, number)
            if number >= WARM_UP:
                seconds[row].append(time.process_time() - begun)
    return seconds


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", default="vit_tiny_patch16_224", help="name of timm")
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10, help="without the first two")
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    keep_freed_memory()
    steps = {row: training_step(options, row) for row in ROWS}
    batch = random_batch(options, steps["all"])
    seconds = measure_seconds(steps, batch, options.rounds)
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (row, step) in enumerate(steps.items()):
            weights = sum(weight.numel() for weight in step.model.parameters() if weight.requires_grad)
            memory = peak_memory(step, batch, options.rounds + WARM_UP)
            changing, constant = saved_bytes(step, Path(folder) / str(number))
            sizes = (memory, optimizer_bytes(step), changing, changing + constant)
            figures[row] = [weights / 1e6, *(size / MIB for size in sizes)]
    print(f"{options.tower}, {options.image_size} px, batch {options.batch}, {options.rounds} rounds\n")
    print(f"{COLUMNS}\n|{'---|' * 7}")
    for row in steps:
        cells = [f"{one:.1f} ({one / base:.2f})" for one, base in zip(figures[row], figures["all"], strict=True)]
        ratios = [one / base for one, base in zip(seconds[row], seconds["all"], strict=True)]
        spread = f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"| `{row}` | {' | '.join(cells)} | {statistics.median(seconds[row]):.3f} ({spread}) |")


if __name__ == "__main__":
    main()
