"""Speed of `vqclip.train` beside open_clip's training entry, `open_clip_train.main`, on equal towers and shards.

Prints tables, after about 5 minutes on two CPU cores.

    python -m venv peer && peer/bin/pip install open_clip_torch webdataset==0.2.86 tensorboard
    OMP_NUM_THREADS=1 python benchmarks/training.py --peer-python peer/bin/python

open_clip reads shards with webdataset 0.2.86, so it runs with a Python of its own; any environment that has it will do.

Method. Every row is a process that runs the real entry point up to the last round, before evaluation and checkpoints.
The clocks are torch's, the same for both: a hook after every step of any optimizer, so that only a step is
between two of them (reading and decoding images, forward, backward, clipping, the optimizer, and one report a round,
log line and TensorBoard), and a wrapper around the DataLoader's `next` for the share of the data. The
processes take turns, `--steps` steps each, one at a time, in changing order; the first round is warm-up and left out.
A figure is that of the median round, a ratio the median of the rounds' ratios, with the smallest and largest.
Other programs on the machine change images/s much and CPU seconds by several percent: read the ratios.

Equal on both sides: the drawn data set's shards, 64 px; batch 128, fp32, no data worker, one thread; random resized
crop (0.9 to 1 of the area, bicubic); AdamW with weight decay 0.1 and gradient clipping at norm 1; joint embedding of
192. Towers: ViT, patch 8, width 192, depth 6, 3 heads, class token; text transformer, width 192, depth 4, 3 heads, 32
tokens, causal, 49,408 byte pairs. open_clip has its own ViT. Ours is timm's ViT, and in the row `identity, same ViT`
open_clip's very modules. The text tower is open_clip's on both sides.

Captions of the drawn data have 5 to 30 tokens of the 32. open_clip computes all positions; our step leaves out the
columns that are padding in the whole batch (8 of 32, mostly). Our loop also keeps freed memory,
where open_clip's gives it back to the system.

On top of the towers open_clip has one projection a modality; ours has the projections around the quantizer, attention
pooling and the embedding head, with the width of the towers and no block between (depth 0). `identity` passes all 192
channels through. `fsq` is 4 codebooks of 512 codes on 12 channels, `identity, 12 channels` the same without rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PEER, IDENTITY, SAME, NARROW, FSQ = "open_clip", "identity", "identity, same ViT", "identity, 12 channels", "fsq"
UNGUARDED = "fsq, unguarded"
ROWS = (PEER, IDENTITY, SAME, NARROW, FSQ)
RATIOS = ((IDENTITY, PEER), (SAME, PEER), (FSQ, PEER), (FSQ, NARROW), (FSQ, UNGUARDED))
BATCH, WIDTH, HEADS, TOKENS, EMBED, MANY = 128, 192, 3, 32, 192, 100_000

PEER_MODEL = {
    "embed_dim": EMBED,
    "vision_cfg": {"image_size": 64, "patch_size": 8, "width": WIDTH, "layers": 6, "head_width": WIDTH // HEADS},
    "text_cfg": {"context_length": TOKENS, "vocab_size": 49408, "width": WIDTH, "heads": HEADS, "layers": 4},
}
TIMM_VIT = {
    "kind": "timm",
    "name": "vit_tiny_patch16_224",
    "image_size": 64,
    "args": {"patch_size": 8, "embed_dim": WIDTH, "depth": 6, "num_heads": HEADS},
}
SAME_VIT = {"kind": "open_clip", "model": "benchmark"}
TEXT_TOWER = {"kind": "transformer", "context_length": TOKENS, "width": WIDTH, "heads": HEADS, "layers": 4}
FSQ_CODES = {"kind": "product", "codebooks": 4, "layer": {"kind": "fsq", "levels": [8, 8, 8]}}
OURS = {
    IDENTITY: (TIMM_VIT, {"kind": "identity", "dim": WIDTH}),
    SAME: (SAME_VIT, {"kind": "identity", "dim": WIDTH}),
    NARROW: (TIMM_VIT, {"kind": "identity", "dim": 12}),
    FSQ: (TIMM_VIT, FSQ_CODES),
    UNGUARDED: (TIMM_VIT, FSQ_CODES),
}


class Turns:
    """In a child: times the steps, and after a round of them hands in the figures and waits for the next turn."""

    def __init__(self, steps: int):
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self.steps, self.done, self.data = steps, 0, 0.0
        self.out = os.fdopen(os.dup(1), "w")  # the entry points print to the standard output
        self.next_batch = _BaseDataLoaderIter.__next__
        _BaseDataLoaderIter.__next__ = lambda loader: self.timed_batch(loader)
        register_optimizer_step_post_hook(self.step)
        self.start()

    def start(self) -> None:
        """Set the clocks to zero."""
        self.data, self.wall, self.cpu = 0.0, time.perf_counter(), time.process_time()

    def timed_batch(self, loader: Any) -> Any:
        """The next batch of any torch DataLoader."""
        since = time.process_time()
        try:
            return self.next_batch(loader)
        finally:
            self.data += time.process_time() - since

    def step(self, optimizer: Any, *_: Any) -> None:
        """Called after every step of the optimizer."""
        self.done += 1
        if self.done % self.steps:
            return
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        weights = sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])
        seconds = {"wall": wall, "cpu": cpu, "data": self.data}
        print(json.dumps({"weights": weights} | {k: v / self.steps for k, v in seconds.items()}), file=self.out)
        self.out.flush()
        if not sys.stdin.readline():
            os._exit(0)  # the parent has seen enough
        self.start()


def child(row: str, shards: Path, folder: Path, steps: int) -> None:
    """Run one side's entry point until the parent closes the pipe."""
    import open_clip
    import torch

    torch.set_num_threads(1)
    open_clip.add_model_config(folder / "benchmark.json")
    Turns(steps)
    (run_peer if row == PEER else run_ours)(row, shards, folder, steps)
    raise SystemExit(f"{row}: ended by itself")


def run_peer(row: str, shards: Path, folder: Path, report_every: int) -> None:
    """open_clip's training entry."""
    from open_clip_train.main import main as train

    tars = sorted(shards.glob("*.tar"))
    pattern = f"{shards}/{{{tars[0].stem}..{tars[-1].stem}}}.tar"
    options = {
        "train-data": pattern,
        "dataset-type": "webdataset",
        "train-num-samples": MANY * BATCH,
        "batch-size": BATCH,
        "workers": 0,
        "model": "benchmark",
        "precision": "fp32",
        "device": "cpu",
        "epochs": 1,
        "lr": 1e-3,
        "warmup": 100,
        "beta1": 0.9,
        "beta2": 0.98,
        "eps": 1e-6,
        "wd": 0.1,
        "grad-clip-norm": 1.0,
        "log-every-n-steps": report_every,
        "report-to": "tensorboard",
        "logs": folder / "logs",
        "name": "peer",
    }
    train([part for name, value in options.items() for part in (f"--{name}", str(value))])


def run_ours(row: str, shards: Path, folder: Path, report_every: int) -> None:
    """Our training loop."""
    import logging

    from vqclip.train import TrainConfig
    from vqclip.train import run as train

    logging.basicConfig(level=logging.INFO)
    tower, quantizer = OURS[row]
    head = {"quantizer": quantizer, "width": WIDTH, "heads": HEADS, "depth": 0}
    config = {
        "run": {
            "name": row.replace(", ", "-").replace(" ", "-"),
            "folder": str(folder),
            "device": "cpu",
            **dict.fromkeys(("timeout_s", "step_timeout_s"), 604_800),  # a row waits long for its turn
        },
        "data": {"sources": [{"kind": "shards", "path": str(shards)}], "workers": 0},
        "model": {
            "embed_dim": EMBED,
            "image": {"tower": tower, **head},
            "text": {"tower": TEXT_TOWER, **head},
        },
        "loss": {"kind": "contrastive"},
        "optim": {
            "lr": 1e-3,
            "warmup_steps": 100,
            "betas": [0.9, 0.98],
            "eps": 1e-6,
            "weight_decay": 0.1,
            "clip_grad_norm": 1.0,
        },
        "train": {"steps": MANY, "batch_size": BATCH, "report_every": report_every, "checkpoint_every": MANY},
    }
    if row == UNGUARDED:
        config["guards"] = {"spikes": None, "collapse": None}
        config["run"]["step_timeout_s"] = None
        remove_checks()
    train(TrainConfig.model_validate(config), owns_process=True)  # as the command: it keeps freed memory


def remove_checks() -> None:
    """Remove the check of losses and gradient, which no configuration turns off."""
    import torch

    from vqclip.train.guards import Guards

    Guards.judge = lambda self, losses, grad_norm, batch, scaler: torch.tensor(False)


class RowProcess:
    """In the parent: one row's process."""

    def __init__(self, row: str, python: str, shards: Path, folder: Path, steps: int, script: str = __file__):
        command = [python, script, "--child", row, "--shards", shards, "--folder", folder, "--steps", str(steps)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.row, self.log = row, (folder / f"{row}.log").open("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.first = True

    def turn(self) -> dict[str, float]:
        """Let it run a round; the first one begins by itself."""
        assert self.process.stdin
        assert self.process.stdout
        if not self.first:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        self.first = False
        for line in self.process.stdout:
            if line.startswith('{"weights"'):
                return json.loads(line)
        self.log.seek(0)
        raise SystemExit(f"{self.row}: the process ended\n{self.log.read()[-3000:]}")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure(args: argparse.Namespace, shards: Path) -> dict[str, list[dict[str, float]]]:
    """Rounds of all rows in turn; the warm-up is left out."""
    rounds: dict[str, list[dict[str, float]]] = {row: [] for row in args.rows}
    sides: list[RowProcess] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "benchmark.json").write_text(json.dumps(PEER_MODEL))
        try:
            for row in args.rows:
                python = args.peer_python if row == PEER else sys.executable
                sides.append(RowProcess(row, python, shards, folder, args.steps))
                sides[-1].turn()  # warm-up, one at a time
            for number in range(args.rounds):
                first = number % len(sides)
                for side in sides[first:] + sides[:first]:
                    rounds[side.row].append(side.turn())
                print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
        finally:
            for side in sides:
                side.close()
    return rounds


def ratio(rounds: dict[str, list[dict[str, float]]], row: str, base: str, what: str) -> tuple[float, float, float]:
    """Return a row's time relative to the base: median, smallest and largest over the rounds."""

    def seconds(each: dict[str, float]) -> float:
        return each["cpu"] - each["data"] if what == "compute" else each[what]

    ratios = [seconds(a) / seconds(b) for a, b in zip(rounds[row], rounds[base], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def report(rounds: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Print both tables; returns the ratios."""
    print(f"{'':24}{'weights':>12}{'images/s':>10}{'CPU s/step':>12}{'of it data':>12}")
    for row, measured in rounds.items():
        wall, cpu, data = (statistics.median(each[name] for each in measured) for name in ("wall", "cpu", "data"))
        print(f"{row:24}{measured[0]['weights']:12,.0f}{BATCH / wall:10.1f}{cpu:12.3f}{data:12.3f}")
    print(f"\n{'speed ratio':48}{'CPU time':>20}{'without data':>20}{'wall time':>20}")
    results = []
    for row, base in RATIOS:
        if row in rounds and base in rounds:
            found = {what: ratio(rounds, row, base, what) for what in ("cpu", "compute", "wall")}
            cells = "".join(f"{1 / m:7.3f} ({1 / high:.2f}..{1 / low:.2f})" for m, low, high in found.values())
            print(f"{row + ' over ' + base:48}{cells}")
            results.append({"row": row, "base": base} | {what: each[0] for what, each in found.items()})
    return results


def main() -> None:
    """Parent or child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="a Python with open_clip_torch, tensorboard and webdataset 0.2.86")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS, help="rows to run")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of every row, without the warm-up")
    parser.add_argument("--steps", type=int, default=2, help="steps of a round")
    parser.add_argument("--json", type=Path, help="also write the rounds and ratios to this file")
    for hidden in ("--child", "--shards", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child, Path(args.shards), Path(args.folder), args.steps)
    if PEER in args.rows and not args.peer_python:
        parser.error(f"the row {PEER} needs --peer-python")

    from vqclip.scenes import make_scenes

    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    rounds = measure(args, make_scenes() / "train")
    results = report(rounds)
    if args.json:
        args.json.write_text(json.dumps({"rounds": rounds, "ratios": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
