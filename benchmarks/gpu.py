"""Training steps beside open_clip's on GPUs, with equal towers, and a roofline of our step.

Prints tables. With tiny sizes, which show that the program works and no more, after about 15 seconds on two CPU cores.

    torchrun --standalone --nproc-per-node 8 benchmarks/gpu.py --batch 512
    OMP_NUM_THREADS=1 python benchmarks/gpu.py --tiny

Method. All rows train in each process, over all processes of torchrun: `--rounds` rounds of `--steps` steps, one row
after the other, in changing order; the first round is warm-up and left out. A figure is that of the median round, a
ratio the median of the rounds' ratios, with the smallest and largest. A round ends when the GPU has done its work.
Memory is what a row allocates at most, what it holds between its turns included.

Equal in all rows: open_clip's towers `--model`, random images and texts in page-locked host memory, bf16 by autocast,
`torch.compile`, AdamW (fused), clipping at norm 1, contrastive loss over the batch of all processes. open_clip gets
images as normalised fp32, as from its loader, with `local_loss` and `gather_with_grad`; we get bytes. `identity` has no
codes, `fsq` 16 codebooks of 4,096; both have projections and pooling on top of the towers, without blocks.

Roofline. One step without compilation is recorded: for each operator its FLOPs by PyTorch's formulas and the bytes of
its inputs and outputs. Its least time is the larger one of FLOPs over the peak of its type and bytes over the memory's
rate, which are measured here, by a large matrix product and a large copy. Inputs count as a whole, also those of which
an operator reads a part, such as an embedding. A compiled step moves fewer bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import open_clip
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vqclip import dist
from vqclip.data import Batch
from vqclip.nn.precision import autocast
from vqclip.train import main as training
from vqclip.train.tasks.kinds import load_task_config

PEER, IDENTITY, FSQ = "open_clip", "vqclip, identity", "vqclip, fsq"
QUANTIZERS = {
    IDENTITY: {"kind": "identity", "dim": 64},
    FSQ: {"kind": "product", "codebooks": 16, "layer": {"kind": "fsq", "levels": [8, 8, 8, 8]}},
}
TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2, "head_width": 32},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
Step = Callable[[], object]


class Inputs(NamedTuple):
    """Samples of a process, in the memory of the host."""

    images: Tensor
    """(B, 3, H, W) uint8."""
    normalised: Tensor
    """(B, 3, H, W) float32."""
    texts: Tensor
    """(B, N) token ids of open_clip's vocabulary."""


def make_inputs(model: str, batch: int, device: torch.device) -> Inputs:
    """Draw images and texts, keyed by the rank."""
    config = open_clip.get_model_config(model)
    size, length = config["vision_cfg"]["image_size"], config["text_cfg"].get("context_length", 77)
    draws = torch.Generator().manual_seed(dist.rank())
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, generator=draws)
    words = torch.randint(0, 99, (batch, 8), generator=draws)
    captions = [" ".join(f"word{number}" for number in row) for row in words.tolist()]
    found = Inputs(images, images.float() / 128 - 1, open_clip.get_tokenizer(model)(captions, context_length=length))
    return Inputs(*(each.pin_memory() for each in found)) if device.type == "cuda" else found


def build_peer(options: argparse.Namespace, inputs: Inputs, device: torch.device) -> Step:
    """Return a step as open_clip's training loop makes it."""
    model = open_clip.create_model(options.model, output_dict=True, device=device)
    wrapped: Any = dist.wrap_ddp(model)
    wrapped = torch.compile(wrapped) if options.compile else wrapped
    loss = open_clip.ClipLoss(True, True, rank=dist.rank(), world_size=dist.world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-6, fused=True)

    def step() -> None:
        images, texts = (each.to(device, non_blocking=True) for each in (inputs.normalised, inputs.texts))
        optimizer.zero_grad()
        with autocast(device, options.precision):
            total = loss(**wrapped(images, texts))
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def build_ours(row: str, options: argparse.Namespace, inputs: Inputs, device: torch.device) -> Step:
    """Return a step of our training."""
    head = {"quantizer": QUANTIZERS[row], "depth": 0}
    towers = {"kind": "open_clip", "model": options.model}
    size = options.batch * dist.world_size()
    config = load_task_config(
        {
            "data": {"sources": [{"kind": "shards", "path": "none"}]},
            "model": {"towers": towers, "embed_dim": 32 if options.tiny else 512, "image": head, "text": head},
            "loss": {"kind": "contrastive"},
            "optim": {"lr": 1e-4, "warmup_steps": 1, "betas": [0.9, 0.98], "eps": 1e-6, "clip_grad_norm": 1.0},
            "train": {
                "steps": 10**6,
                "batch_size": size,
                "precision": options.precision,
                "compile": options.compile,
                "parallel": options.parallel,
            },
        }
    )
    step, number = training.build_step(config, training.build_task(config, device)), 0
    sizes = (options.batch,) * dist.world_size()
    places = torch.arange(options.batch) + options.batch * dist.rank()

    def run() -> None:
        nonlocal number
        step(Batch(number, 0, inputs.images, inputs.texts, places, places * 0 - 1, places, size, sizes), number)
        number += 1

    return run


class Turn(NamedTuple):
    """Figures of a round of steps."""

    seconds: float
    """A step."""
    memory: float
    """Most memory in GiB; 0 on a CPU."""
    exchanges: float
    """Part of the time (0..1) in exchanges between processes."""


class Row:
    """A row of the table: its step, and what it holds in memory."""

    def __init__(self, build: Callable[[], Step], device: torch.device):
        self._device, before = device, allocated_bytes(device)
        self.step = build()
        self.step()
        self._held = allocated_bytes(device) - before

    def turn(self, steps: int) -> Turn:
        """Run some steps."""
        others = allocated_bytes(self._device) - self._held
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        dist.exchange_timer.runs = True
        since = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronise(self._device)
        seconds = (time.perf_counter() - since) / steps
        dist.exchange_timer.runs = False
        peak = torch.cuda.max_memory_allocated() - others if self._device.type == "cuda" else 0
        return Turn(seconds, peak / 2**30, dist.exchange_timer.lap() / steps / seconds)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def synchronise(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Operators(TorchDispatchMode):
    """FLOPs and bytes of each operator, by name and type of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[tuple[str, torch.dtype]] = Counter()
        self.bytes: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, made = (
            [each for each in tree_leaves(part) if isinstance(each, Tensor)] for part in ((args, kwargs), out)
        )
        made = made or read  # written in place, as by the optimizer
        if made and not func.is_view and "empty" not in str(func):
            key = str(func._overloadpacket).removeprefix("aten."), made[0].dtype
            self.bytes[key] += sum(each.numel() * each.element_size() for each in [*read, *made])
            if (formula := flop_registry.get(func._overloadpacket)) is not None:
                self.flops[key] += formula(*args, **(kwargs or {}), out_val=out)
        return out


def measure_peaks(device: torch.device, tiny: bool) -> tuple[dict[torch.dtype, float], float]:
    """Return FLOP/s of matrix products by type, and bytes/s of a copy, read and written."""

    def best(work: Callable[[], object]) -> float:
        found = []
        for _ in range(5):
            synchronise(device)
            since = time.perf_counter()
            work()
            synchronise(device)
            found.append(time.perf_counter() - since)
        return min(found)

    side, peaks = 512 if tiny else 8192, {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a = torch.randn(side, side, device=device, dtype=dtype)
        peaks[dtype] = 2 * side**3 / best(lambda a=a: a @ a)  # type: ignore[misc]
    data = torch.empty(2**22 if tiny else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(data)
    return peaks, 2 * len(data) / best(lambda: target.copy_(data))


def roofline(row: Row, device: torch.device, options: argparse.Namespace, measured_s: float) -> None:
    """Print the operators of a step that is not compiled, with their least times."""
    with Operators() as seen:
        row.step()
    if not dist.is_main():
        return
    peaks, rate = measure_peaks(device, options.tiny)
    least = {
        key: max(seen.flops[key] / peaks.get(key[1], peaks[torch.float32]), size / rate)
        for key, size in seen.bytes.items()
    }
    named = ", ".join(f"{str(dtype).removeprefix('torch.')} {peak / 1e12:.1f}" for dtype, peak in peaks.items())
    print(f"\nMeasured peaks: {named} TFLOP/s; memory {rate / 1e9:.0f} GB/s\n")
    print("| operator | type | GFLOP | MB | FLOP a byte | least ms | limit |\n|---|---|---:|---:|---:|---:|---|")
    for key in sorted(least, key=least.__getitem__, reverse=True)[:12]:
        flops, size = seen.flops[key], seen.bytes[key]
        by = "computation" if flops / peaks.get(key[1], peaks[torch.float32]) > size / rate else "memory"
        kind = str(key[1]).removeprefix("torch.")
        print(f"| {key[0]} | {kind} | {flops / 1e9:.2f} | {size / 1e6:.1f} | {flops / size:.1f} |", end="")
        print(f" {1e3 * least[key]:.2f} | {by} |")
    total, products = sum(least.values()), sum(least[key] for key in seen.flops)
    print(f"\nLeast time of all {len(least)} kinds: {1e3 * total:.1f} ms, ", end="")
    print(f"matrix products alone {1e3 * products:.1f} ms; ", end="")
    print(f"measured (compile {options.compile}): {1e3 * measured_s:.1f} ms")


def report(turns: dict[str, list[Turn]], options: argparse.Namespace) -> None:
    """Print the table of rows."""
    print(
        f"{options.model}, {dist.world_size()} x batch {options.batch}, {options.precision}, compile {options.compile}"
    )
    print("\n| row | ms a step | images/s a process | in exchanges | GiB | time over open_clip's |")
    print("|---|---:|---:|---:|---:|---|")
    for row, found in turns.items():
        seconds, memory, waits = (statistics.median(column) for column in zip(*found, strict=True))
        ratios = [ours.seconds / peer.seconds for ours, peer in zip(found, turns[PEER], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        exchanges = "" if row == PEER else f"{waits:.1%}"
        print(
            f"| {row} | {1e3 * seconds:.1f} | {options.batch / seconds:.0f} | {exchanges} | {memory:.1f} | {spread} |"
        )


@contextmanager
def tiny_model(options: argparse.Namespace) -> Iterator[None]:
    """Register the model of `--tiny` with open_clip."""
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            (Path(folder) / "vqclip_tiny.json").write_text(json.dumps(TINY))
            open_clip.add_model_config(folder)
            options.model, options.batch, options.compile, options.precision = "vqclip_tiny", 16, False, "fp32"
        yield


def main() -> None:
    """Build the rows, let them take turns, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16", help="a model of open_clip")
    parser.add_argument("--batch", type=int, default=256, help="of a process")
    parser.add_argument("--rounds", type=int, default=7, help="without the warm-up")
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--parallel", default="ddp", choices=["ddp", "fsdp"], help="of our rows; open_clip has ddp")
    parser.add_argument(
        "--rows", nargs="*", default=list(QUANTIZERS), choices=list(QUANTIZERS), help="beside open_clip"
    )
    parser.add_argument("--tiny", action="store_true", help="small model and batch, fp32, not compiled")
    options = parser.parse_args()
    device = dist.choose_device("auto", "device")
    dist.init(device)
    if dist.is_main():
        print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    logging.getLogger().setLevel(logging.ERROR)  # open_clip warns of random weights
    with tiny_model(options):
        inputs = make_inputs(options.model, options.batch, device)
        rows = {PEER: Row(lambda: build_peer(options, inputs, device), device)}
        for name in options.rows:
            rows[name] = Row(lambda name=name: build_ours(name, options, inputs, device), device)  # type: ignore[misc]
        turns: dict[str, list[Turn]] = {row: [] for row in rows}
        for number in range(options.rounds + 1):
            order = list(rows)[number % len(rows) :] + list(rows)[: number % len(rows)]
            for row in order:
                turn = rows[row].turn(options.steps)
                if number:
                    turns[row].append(turn)
        if dist.is_main():
            report(turns, options)
        options_eager = argparse.Namespace(**vars(options) | {"compile": False})
        eager = Row(lambda: build_ours(options.rows[-1], options_eager, inputs, device), device)
        roofline(eager, device, options, statistics.median(each.seconds for each in turns[options.rows[-1]]))
    dist.shutdown()


if __name__ == "__main__":
    main()
