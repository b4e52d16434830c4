"""Training with stored features of frozen towers beside the same training with towers that run in every step.

Prints a table, after about 7 minutes on two CPU cores.

    pip install 'vqclip[small-towers]'
    OMP_NUM_THREADS=1 python benchmarks/feature_cache.py --shards data/captions_noto_emoji/train

Both rows are processes that run `vqclip.train.run` with one configuration, seed and data, so they see the same samples
and views: EfficientNet-Lite0 at 128 px and MiniLM-L6, frozen, with small heads and FSQ; no data worker, one thread.
They differ in `data.feature_cache` alone. Clocks and rounds are those of `benchmarks/training.py`: the processes take
turns, `--steps` steps each, in changing order, and the first round is left out. Shards and features are in the page
cache. Savings are counted in CPU time, since other programs on the machine change wall time more.

The cache is built once, in a process of its own, and the process that is measured verifies it, as every start of a run
does. Both are timed from before to after `store_features`. The cache pays after the time to build it over the time that
it saves in an epoch. Prints a Markdown table of medians, for the ratio with the smallest and largest of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from training import MANY, RowProcess, Turns, ratio

TOWERS, CACHE = "towers in every step", "stored features"
CODES = {"kind": "product", "codebooks": 32, "layer": {"kind": "fsq", "levels": [8, 8, 8, 8]}}
HEAD = {"quantizer": CODES, "width": 256, "heads": 4, "depth": 0}
HEAD |= {"reduce": {"kind": "mean"}, "project_in": {"kind": "mlp", "hidden": 1280}}
IMAGE = {"kind": "timm", "package": "efficientnet-lite0", "image_size": 128, "train": "none"}
TEXT = {"kind": "transformers", "package": "minilm-l6", "context_length": 32, "train": "none"}


def make_config(options: argparse.Namespace, row: str, folder: Path) -> dict[str, Any]:
    """Return the configuration of a row."""
    long = dict.fromkeys(("timeout_s", "step_timeout_s"), 604_800)  # a row waits long for its turn
    return {
        "run": {"name": row.replace(" ", "-"), "folder": str(folder), "device": "cpu", **long},
        "data": {
            "sources": [{"kind": "shards", "path": str(options.shards)}],
            "transform": {"scale": [0.8, 1.0], "ratio": [0.9, 1.1], "translation": 0.1},
            "views": options.views,
            "feature_cache": {"dtype": options.dtype, "folder": str(folder / "features")} if row == CACHE else None,
            "workers": 0,
        },
        "model": {"embed_dim": 256, "image": {"tower": IMAGE, **HEAD}, "text": {"tower": TEXT, **HEAD}},
        "loss": {"kind": "contrastive"},
        "train": {"batch_size": options.batch, "steps": MANY, "checkpoint_every": MANY},
    }


def child(row: str, folder: Path, steps: int) -> None:
    """Train until the parent closes the pipe."""
    import torch

    import vqclip.train.main as entry
    from vqclip.train import TrainConfig

    store_features = entry.store_features

    def time_storing(config: TrainConfig, task: Any, data: Any) -> None:
        """Write down how long the features took, and the samples of an epoch."""
        wall, cpu = time.perf_counter(), time.process_time()
        store_features(config, task, data)
        seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        (folder / "stored.json").write_text(json.dumps(seconds | {"samples": data.epoch_size}))

    entry.store_features = time_storing
    torch.set_num_threads(1)
    Turns(steps)
    entry.run(TrainConfig.model_validate_json((folder / f"{row}.json").read_text()))
    raise SystemExit(f"{row}: ended by itself")


def measure(
    options: argparse.Namespace, folder: Path
) -> tuple[dict[str, list[dict[str, float]]], list[dict[str, Any]]]:
    """Return the rounds of both rows, and the figures of the building and of the verifying start."""
    starts, processes = [], []

    def start(row: str) -> RowProcess:
        (folder / f"{row}.json").write_text(json.dumps(make_config(options, row, folder)))
        process = RowProcess(row, sys.executable, options.shards, folder, options.steps, script=__file__)
        processes.append(process)
        process.turn()  # warm-up, one at a time
        return process

    try:
        for _ in range(2):
            cached = start(CACHE)
            starts.append(json.loads((folder / "stored.json").read_text()))
            if len(starts) == 1:
                cached.close()
        rows = [start(TOWERS), cached]
        rounds: dict[str, list[dict[str, float]]] = {process.row: [] for process in rows}
        for number in range(options.rounds):
            for process in rows if number % 2 else rows[::-1]:
                rounds[process.row].append(process.turn())
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    finally:
        for process in processes:
            process.close()
    return rounds, starts


def report(
    options: argparse.Namespace, rounds: dict[str, list[dict[str, float]]], starts: list[Any], size: int
) -> None:
    """Print the table and what the cache costs."""
    print(f"{options.shards}: views {options.views}, {options.dtype}, batch {options.batch}, {options.rounds} rounds\n")
    print("| features | CPU s a step | of it reading samples, s | CPU time, ratio | wall time, ratio |")
    print("|---|---|---|---|---|")
    for row in rounds:
        cpu, data = (statistics.median(each[name] for each in rounds[row]) for name in ("cpu", "data"))
        ratios = ("{:.3f} ({:.3f} to {:.3f})".format(*ratio(rounds, row, TOWERS, name)) for name in ("cpu", "wall"))
        print(f"| {row} | {cpu:.3f} | {data:.3f} | {' | '.join(ratios)} |")
    towers, cached = (statistics.median(each["cpu"] for each in rounds[row]) for row in (TOWERS, CACHE))
    build, verify = starts
    saved = (towers - cached) * build["samples"] / options.batch
    print(f"\ncache of {build['samples']:,} samples: {size / 1e6:.1f} MB")
    print(f"build: {build['cpu']:.1f} s CPU ({build['wall']:.1f} s wall); verify: {verify['cpu']:.2f} s CPU")
    print(f"an epoch with towers: {towers * build['samples'] / options.batch:.1f} s CPU; the cache saves {saved:.1f} s")
    print(f"the cache pays after {build['cpu'] / saved:.2f} epochs")


def main() -> None:
    """Parent or child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, required=True, help="folder of shards with images and captions")
    parser.add_argument("--views", type=int, default=4, help="data.views of both rows")
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), default="fp16", help="of the stored features")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each row, without the warm-up")
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    for hidden in ("--child", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, Path(options.folder), options.steps)
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        rounds, starts = measure(options, Path(folder))
        size = sum(path.stat().st_size for path in (Path(folder) / "features").rglob("*") if path.is_file())
    report(options, rounds, starts, size)


if __name__ == "__main__":
    main()
