"""Time, peak memory and traffic of the losses beside open_clip's, forward and backward.

Prints a table row by row: about half an hour on two CPU cores.

    OMP_NUM_THREADS=1 python benchmarks/losses.py
    OMP_NUM_THREADS=1 python benchmarks/losses.py --losses softmax --sizes 2048 --ranks 1 2 --json losses.json

Time is the CPU time of the median round, summed over ranks; all run in the same processes on the same unit features,
their rounds interleaved. A ratio of times is ours over open_clip's: the median of the rounds' ratios, with the smallest
and largest. The first is of vqclip as it is, whose products go to oneDNN. The second, "one kernel", is of vqclip with
PyTorch's own products (MKL), those of open_clip: what the algorithm saves. The head says what a kernel saves: CPU,
instruction set and GFLOP/s of both. Other instruction sets, and memory that is kept when it is freed (as `vqclip.train`
keeps it, and glibc does not by itself: fresh pages cost open_clip's larger matrices more than our tiles):

    ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/losses.py
    GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592 \\
        python benchmarks/losses.py

Peak memory is what a process of its own needs beyond its inputs: the growth of its
resident set at its highest. Bytes are those that a rank sends, counted at torch's collectives as rings (and NCCL) send
them; gloo, which runs here, makes an all-reduce of a reduce-scatter and so sends more of ours: 0.75 and not 0.5 times
open_clip's on two ranks. open_clip runs with local_loss and gather_with_grad, its options whose gradients are right on
several ranks.

With ``--device cuda`` one rank runs on a GPU: the time is that until the GPU has done its work, and the memory what
PyTorch's allocator counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
import torch.nn.functional as F
from torch import Tensor

WIDTH = 512
NUMBERS = {"softmax": (100.0,), "sigmoid": (10.0, -10.0)}
"""Scale and bias of each loss."""
LIMIT_GIB = 12
"""open_clip is left out where its matrices would need more."""

FORCING = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", "GLIBC_TUNABLES")
"""Environment variables that set instruction sets and memory."""

Loss = Callable[..., Tensor]
DEVICE = torch.device(os.environ.get("BENCHMARK_DEVICE", "cpu"))
"""Set by ``--device``, for the processes that are started."""


def ours(name: str, impl: str) -> Loss:
    """Return a loss of vqclip."""
    from vqclip.losses import ContrastiveLoss, SigmoidLoss

    return {"softmax": ContrastiveLoss, "sigmoid": SigmoidLoss}[name](impl)


def theirs(name: str, rank: int, ranks: int) -> Loss:
    """Return a loss of open_clip."""
    from open_clip.loss import ClipLoss, SigLipLoss

    if name == "sigmoid":
        return SigLipLoss(rank=rank, world_size=ranks)
    return ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=ranks)


def features(size: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """This rank's pairs of a global batch of unit features, more similar than random ones."""
    generator = torch.Generator().manual_seed(0)
    image, noise = torch.randn(2, size, WIDTH, generator=generator)
    pair = F.normalize(image, dim=1), F.normalize(image + noise, dim=1)
    return tuple(each.chunk(ranks)[rank].clone().to(DEVICE) for each in pair)  # type: ignore[return-value]


def once(loss: Loss, name: str, image: Tensor, text: Tensor) -> float:
    """CPU seconds of forward and backward; on a GPU the seconds until it is done."""
    image, text = image.detach().requires_grad_(), text.detach().requires_grad_()
    numbers = [torch.tensor(number, device=DEVICE, requires_grad=True) for number in NUMBERS[name]]
    if DEVICE.type == "cpu":
        before = time.process_time()
        loss(image, text, *numbers).backward()
        return time.process_time() - before
    torch.cuda.synchronize()
    before = time.perf_counter()
    loss(image, text, *numbers).backward()
    torch.cuda.synchronize()
    return time.perf_counter() - before


def _nbytes(value: Any) -> int:
    parts = value if isinstance(value, list | tuple) else [value]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))


@contextmanager
def counted(ranks: int) -> Iterator[dict[str, int]]:
    """Bytes that this rank sends within the block."""
    sent = {"bytes": 0}
    others = ranks - 1
    cost = {
        "all_gather": lambda out, x, *_: others * _nbytes(x),
        "all_gather_into_tensor": lambda out, x, *_: others * _nbytes(x),
        "all_reduce": lambda x, *_: 2 * others * _nbytes(x) // ranks,
        "reduce_scatter_tensor": lambda out, x, *_: others * _nbytes(x) // ranks,
        "scatter": lambda out, parts=None, *_: others * _nbytes(parts or []) // ranks,
        "batch_isend_irecv": lambda ops: sum(_nbytes(op.tensor) for op in ops if op.op is c10d.isend),
    }
    originals = {name: getattr(c10d, name) for name in cost}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent["bytes"] += cost[name](*args)
            return originals[name](*args, **kwargs)

        return call

    for name in cost:
        setattr(c10d, name, counting(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(c10d, name, original)


def in_rank(rank: int, ranks: int, port: int, job: Callable[..., Any], args: tuple[Any, ...], queue: Any) -> None:
    """A process: join the others, do the job, hand the result back."""
    torch.set_num_threads(1)
    if ranks > 1:
        c10d.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        queue.put((rank, job(rank, ranks, *args)))
    except Exception as error:
        queue.put((rank, error))
        raise
    if ranks > 1:
        c10d.destroy_process_group()


def on_ranks(ranks: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``job(rank, ranks, *args)`` in fresh processes and return the results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=in_rank, args=(r, ranks, port, job, args, queue)) for r in range(ranks)]
    for process in processes:
        process.start()
    results = dict(queue.get(timeout=3600) for _ in processes)
    for process in processes:
        process.join()
    for rank, result in results.items():
        if isinstance(result, Exception):
            raise SystemExit(f"rank {rank}: {result}")
    return [results[rank] for rank in range(ranks)]


def times_and_bytes(rank: int, ranks: int, name: str, size: int, impl: str, rounds: int, peer: bool) -> dict[str, Any]:
    """CPU seconds of every round, and bytes sent in one."""
    pair = features(size, rank, ranks)
    losses = dict.fromkeys(("ours", "one kernel"), ours(name, impl))
    losses |= {"theirs": theirs(name, rank, ranks)} if peer else {}
    found: dict[str, Any] = {"seconds": {key: [] for key in losses}, "bytes": {}}
    for number in range(rounds + 1):
        for key, loss in losses.items():
            torch.backends.mkldnn.enabled = key != "one kernel"
            with counted(ranks) as sent:
                seconds = once(loss, name, *pair)
            if number:  # the first warms up
                found["seconds"][key].append(seconds)
            found["bytes"][key] = sent["bytes"]
    return found


def peak_mib(rank: int, ranks: int, name: str, size: int, impl: str | None) -> float:
    """Growth of the resident set in one round; ``impl`` None is open_clip."""
    loss = theirs(name, rank, ranks) if impl is None else ours(name, impl)
    once(loss, name, *features(64 * ranks, rank, ranks))  # libraries load what they need
    pair = features(size, rank, ranks)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        once(loss, name, *pair)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    before = _memory_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    once(loss, name, *pair)
    return (_memory_kib("VmHWM") - before) / 1024


def _memory_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field)))


def measure(name: str, size: int, ranks: int, impl: str, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    peer = 16 * size * size < LIMIT_GIB * 2**30  # about four matrices of fp32 on all ranks together
    parts = on_ranks(ranks, times_and_bytes, name, size, impl, rounds if size < 2**14 else 1, peer)
    seconds = {
        key: [sum(both) for both in zip(*(part["seconds"][key] for part in parts), strict=True)]
        for key in parts[0]["seconds"]
    }
    memory = {"ours": max(on_ranks(ranks, peak_mib, name, size, impl))}
    if peer:
        memory["theirs"] = max(on_ranks(ranks, peak_mib, name, size, None))
    sent = {key: max(part["bytes"][key] for part in parts) / 2**20 for key in seconds if key != "one kernel"}
    return {"loss": name, "impl": impl, "size": size, "ranks": ranks, "s": seconds, "mib": memory, "sent_mib": sent}


def line(result: dict[str, Any]) -> str:
    """A row of the table."""

    def pair(key: str, digits: int) -> str:
        mine, other = result[key]["ours"], result[key].get("theirs")
        ratio = f"{mine / other:.3f}" if other else "-"
        return f"{mine:.{digits}f} | {'-' if other is None else f'{other:.{digits}f}'} | {ratio}"

    rounds = result["s"]
    times = [
        f"{statistics.median(rounds[key]):.3f}" if key in rounds else "-" for key in ("ours", "one kernel", "theirs")
    ]
    for key in ("ours", "one kernel"):
        ratios = [mine / other for mine, other in zip(rounds[key], rounds.get("theirs", []), strict=False)]
        times.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})" if ratios else "-")
    head = f"| {result['loss']} | {result['impl']} | {result['ranks']} | {result['size']} "
    return f"{head}| {' | '.join(times)} | {pair('mib', 0)} | {pair('sent_mib', 1)} |"


def machine() -> str:
    """CPU, instruction set, and how fast both kernels multiply on one thread; or the GPU's name."""
    if DEVICE.type == "cuda":
        return torch.cuda.get_device_name()
    from vqclip.losses.tiled import product

    torch.set_num_threads(1)
    left, right = torch.randn(2, 2048, WIDTH)
    speeds = []
    for enabled in (False, True):
        torch.backends.mkldnn.enabled = enabled
        seconds = []
        for _ in range(10):
            before = time.process_time()
            product(left, right.T)
            seconds.append(time.process_time() - before)
        speeds.append(2 * 2048 * 2048 * WIDTH / min(seconds) / 1e9)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = {key.strip(): value.strip() for key, _, value in (each.partition(":") for each in lines)}
    forced = [f"{key}={os.environ[key]}" for key in FORCING if key in os.environ]
    return (
        f"{cpu.get('model name')} (family {cpu.get('cpu family')}, model {cpu.get('model')}), "
        f"{torch.backends.cpu.get_cpu_capability()}{''.join(f', {each}' for each in forced)}; "
        f"products of 2048 x {WIDTH} x 2048: PyTorch's own {speeds[0]:.0f} GFLOP/s, ours {speeds[1]:.0f}"
    )


def main() -> None:
    """Print one line per row, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="*", default=list(NUMBERS), choices=list(NUMBERS))
    parser.add_argument("--impl", nargs="*", default=["tiled"], choices=["tiled", "ring", "gather"])
    parser.add_argument("--sizes", nargs="*", type=int, default=[2**k for k in range(10, 16)], help="global batches")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds per row; one from 16,384 on")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: with --ranks 1")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    if args.device != DEVICE.type:
        if args.ranks != [1]:
            parser.error("--device cuda takes --ranks 1")
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"BENCHMARK_DEVICE": args.device})
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    clock = "1 thread a rank, median CPU time" if args.device == "cpu" else "median time"
    print(f"torch {torch.__version__}, width {WIDTH}, {clock} of {args.rounds} rounds")
    print(f"(one from 16,384 on); {machine()}\n")
    print(
        "| loss | impl | ranks | batch | s | s, one kernel | s, open_clip | ratio | ratio, one kernel "
        "| MiB | open_clip | ratio | MiB sent | open_clip | ratio |"
    )
    print("|---" * 15 + "|")
    results = []
    for name in args.losses:
        for ranks in args.ranks:
            for impl in args.impl:
                for size in args.sizes:
                    results.append(measure(name, size, ranks, impl, args.rounds))
                    print(line(results[-1]), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
