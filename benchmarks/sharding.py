"""Memory of a process: all weights on every process (`train.parallel: ddp`), and weights in shards (`fsdp`).

Prints a table, after about 2 minutes on two CPU cores.

    OMP_NUM_THREADS=1 python benchmarks/sharding.py
    OMP_NUM_THREADS=1 python benchmarks/sharding.py --depth 4 --ddp 4
    OMP_NUM_THREADS=1 python benchmarks/sharding.py --depth 8 --image-size 64

The image tower is a ViT of width 1024 with 12.6 M weights a block; all else is tiny, as are the images and the batch.
The processes of one way run at once, each for some steps with AdamW, in fp32, and save a checkpoint. A process's peak
is that of its resident memory over its whole life (VmHWM), building and sharding the model included, less what it had
after the imports. The last step is also measured alone, beside what `vqclip plan` says of it. What
a process of `ddp` needs does not depend on the number of processes, so there are fewer of them. The C library returns
freed memory to the system from 1 MiB on (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from vqclip import dist
from vqclip.data import Batch
from vqclip.train import main as training
from vqclip.train.checkpointer import Checkpointer
from vqclip.train.plan import plan_step
from vqclip.train.tasks.kinds import load_task_config

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}


def configuration(parallel: str, depth: int, image_size: int) -> dict[str, Any]:
    """Return the settings of a run, whose data are never read."""
    args = {"patch_size": 8, "embed_dim": 1024, "depth": depth, "num_heads": 16}
    quantizer = {"kind": "fsq", "levels": [4, 4, 4]}
    common = {"quantizer": quantizer, "width": 16, "heads": 2, "depth": 1}
    image = {"kind": "timm", "name": "vit_tiny_patch16_224", "image_size": image_size, "args": args}
    text = {"kind": "transformer", "context_length": 12, "width": 16, "heads": 2, "layers": 1}
    return {
        "data": {"sources": [{"kind": "shards", "path": "none"}]},
        "model": {"embed_dim": 16, "image": common | {"tower": image}, "text": common | {"tower": text}},
        "loss": {"kind": "contrastive"},
        "optim": {"warmup_steps": 1},
        "train": {"steps": 100, "batch_size": 8, "parallel": parallel},
    }


def resident_mib(key: str) -> float:
    """Return a figure of this process's memory: VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def run_rank(parallel: str, depth: int, image_size: int, steps: int) -> None:
    """Train for some steps as a rank under torchrun; rank 0 prints the figures of all."""
    before = resident_mib("VmRSS")
    dist.init("cpu")
    config = load_task_config(configuration(parallel, depth, image_size))
    task = training.build_task(config, torch.device("cpu"))
    weights = sum(each.numel() for each in task.towers["image"].parameters())
    step = training.build_step(config, task)
    own = torch.arange(8).tensor_split(dist.world_size())[dist.rank()]
    images = torch.randint(0, 256, (8, 3, image_size, image_size), dtype=torch.uint8)[own]
    texts = task.tokenize(["a star"] * 8)[0][own]
    for number in range(steps):
        if number == steps - 1:
            earlier = resident_mib("VmHWM")
            Path("/proc/self/clear_refs").write_text("5")  # restart the peak
        step(Batch(number, 0, images, texts, own, own * 0 - 1, own, 8), number)
    last = resident_mib("VmHWM") - before
    trained = max(earlier - before, last), resident_mib("VmRSS") - before
    with tempfile.TemporaryDirectory() as own:
        folder = Path(dist.broadcast_json(own)) / "run" / "checkpoints"  # on one disk, which all ranks see
        with Checkpointer(folder, {}, step, 1) as checkpointer:
            begun = time.perf_counter()
            checkpointer.save(steps, {"replaced": {}, "caption_lengths": {}})
            paused = time.perf_counter() - begun
        written = time.perf_counter() - begun
        dist.barrier()
    found = dist.gather_json([weights, before, *trained, resident_mib("VmHWM") - before, paused, written, last])
    if dist.is_main():
        print(json.dumps(found))
    dist.shutdown()


def measure(parallel: str, processes: int, options: argparse.Namespace) -> list[list[float]]:
    """Return figures of each process.

    They are weights, memory after the imports, peak up to the last step, memory after it, peak with a save, the seconds
    that the save took, of the training and in all, and the peak in the last step.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    settings = [
        "--rank",
        parallel,
        "--depth",
        str(options.depth),
        "--image-size",
        str(options.image_size),
        "--steps",
        str(options.steps),
    ]
    done = subprocess.run(
        [*torchrun, __file__, *settings], check=True, stdout=subprocess.PIPE, env=ENVIRONMENT | os.environ
    )
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure both ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=16, help="blocks of the tower")
    parser.add_argument("--image-size", type=int, default=16, help="side of the images, of patches of 8 pixels")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ddp", type=int, default=2, help="processes with all weights")
    parser.add_argument("--fsdp", type=int, default=4, help="processes with shards")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank, options.depth, options.image_size, options.steps)
        return
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    ways = {kind: measure(kind, getattr(options, kind), options) for kind in ("ddp", "fsdp")}
    print(f"{ways['ddp'][0][0] / 1e6:.0f} M weights in the image tower, {options.steps} steps; memory in MiB\n")
    names = ("", "processes", "peak", "after a step", "peak with a save", "pause, s", "whole save, s", "step", "plan")
    print(f"| {' | '.join(names)} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for kind, found in ways.items():
        _, _, peak, held, saving, paused, written, last = (max(column) for column in zip(*found, strict=True))
        config = load_task_config(configuration(kind, options.depth, options.image_size))
        plan = plan_step(config, len(found)).peak / 2**20
        times = f"{paused:.2f} | {written:.1f}"
        print(f"| {kind} | {len(found)} | {peak:.0f} | {held:.0f} | {saving:.0f} | {times} | {last:.0f} | {plan:.0f} |")
    shares = [max(row[i] for row in ways["fsdp"]) / max(row[i] for row in ways["ddp"]) for i in (2, 3, 4)]
    print("\nWith shards: {:.2f} of the peak, {:.2f} of the memory after a step, {:.2f} with a save.".format(*shares))


if __name__ == "__main__":
    main()
