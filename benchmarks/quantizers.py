"""Time and peak memory of the quantizers beside vector-quantize-pytorch's, forward and backward in training mode.

Prints a table row by row: about 10 minutes on two CPU cores.

    OMP_NUM_THREADS=1 python benchmarks/quantizers.py
    OMP_NUM_THREADS=1 python benchmarks/quantizers.py --rows "lfq 2^16" --rounds 5 --json quantizers.json

Both libraries run in this process on the same inputs, their rounds interleaved; the time is the CPU time of
the median round. An LFQ round is forward, the entropy losses and backward, with the same temperature for both. Peak
memory is that of all tensors alive at once, beyond the inputs: a dispatch mode sees every tensor made in forward and
backward, and counts its storage until that is freed. Temporaries inside one operator are in neither figure.

With ``--usage FOLDER`` (of tars of images, such as those of EuroSAT) it prints instead what becomes of 16,384 codes
of 256 channels by each learning rule: an encoder and a decoder of two layers learn to reconstruct patches of 8 × 8
pixels through the codes; then codes are counted over 65,536 patches of held-out images. About ten minutes on one core.

    OMP_NUM_THREADS=1 python benchmarks/quantizers.py --usage /data/cls_eurosat/train

With ``--device cuda`` the time is that until the GPU has done its work, and the memory what PyTorch's allocator counts,
temporaries included.
"""

from __future__ import annotations

import argparse
import functools
import gc
import io
import json
import operator
import statistics
import sys
import tarfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vector_quantize_pytorch as peer
from einops import rearrange
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vqclip.nn.dropout import set_dropout_keys
from vqclip.quantizers import FSQ, LFQ, VQ, Product, Quantizer, Residual, SimVQ

Step = Callable[[Tensor], Any]
TEMPERATURE = 0.01
DEVICE = torch.device("cpu")
"""Set by ``--device``."""


@dataclass(frozen=True)
class Row:
    """One comparison; the shape is that of the input, ``(B, N, D)``."""

    name: str
    shape: tuple[int, int, int]
    ours: Callable[[], Step]
    theirs: Callable[[], Step] | None = None
    """None: the peer would need more memory than the machine has."""


class PeakMemory(TorchDispatchMode):
    """Bytes of all storages made inside the context and alive at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in before | self._seen:
                    self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def lfq(bits: int, codebooks: int = 1) -> Step:
    """Our LFQ with the three losses."""
    layer = LFQ(bits, TEMPERATURE)
    quantizer = (Product(layer, codebooks) if codebooks > 1 else layer).train().to(DEVICE)

    def step(x: Tensor) -> None:
        out = quantizer(x)
        losses = quantizer.losses(out.stats)
        (out.vectors.mean() + sum(losses.values())).backward()

    return step


def peer_lfq(bits: int, codebooks: int = 1) -> Step:
    """The peer's LFQ with the same losses."""
    quantizer = peer.LFQ(
        dim=bits * codebooks, codebook_size=2**bits, num_codebooks=codebooks, commitment_loss_weight=0.25
    )
    quantizer.train().to(DEVICE)

    def step(x: Tensor) -> None:
        out = quantizer(x, inv_temperature=1 / TEMPERATURE)
        (out.quantized.mean() + out.entropy_aux_loss).backward()

    return step


def fsq(levels: tuple[int, ...], codebooks: int) -> Step:
    """Our FSQ with its statistics."""
    quantizer = Product(FSQ(levels), codebooks).train().to(DEVICE)
    return lambda x: quantizer(x).vectors.mean().backward()


def peer_fsq(levels: tuple[int, ...], codebooks: int) -> Step:
    """The peer's FSQ."""
    quantizer = peer.FSQ(list(levels), num_codebooks=codebooks).train().to(DEVICE)
    return lambda x: quantizer(x)[0].mean().backward()


def vq(dim: int, size: int, depth: int = 1, learning: Any = "ema") -> Step:
    """Our VQ: moving means, dead codes replaced, the rotation trick, the update of the step included."""
    layer = VQ(dim, size, kmeans=False, learning=learning)
    quantizer = (Residual(layer, depth) if depth > 1 else layer).train().to(DEVICE)

    def step(x: Tensor) -> None:
        out = quantizer(x)
        losses = quantizer.losses(out.stats)
        (out.vectors.mean() + sum(losses.values())).backward()
        quantizer.update(out.stats)

    return step


def peer_vq(dim: int, size: int, depth: int = 1, learning: Any = "ema") -> Step:
    """The peer's, with the same switched on."""
    options: dict[str, Any] = {
        "codebook_size": size,
        "decay": 0.99,
        "threshold_ema_dead_code": 2,
        "rotation_trick": learning == "ema",
    }
    if learning == "diveq":
        options["directional_reparam"] = True
    one = depth == 1
    quantizer = (
        peer.VectorQuantize(dim, **options) if one else peer.ResidualVQ(dim=dim, num_quantizers=depth, **options)
    )
    quantizer.train().to(DEVICE)

    def step(x: Tensor) -> None:
        vectors, _, losses = quantizer(x)
        (vectors.mean() + losses.sum()).backward()

    return step


ROWS = [
    Row("fsq 8x5x5x5, 64 codebooks", (16, 256, 256), lambda: fsq((8, 5, 5, 5), 64), lambda: peer_fsq((8, 5, 5, 5), 64)),
    Row("lfq 2^10", (16, 256, 10), lambda: lfq(10), lambda: peer_lfq(10)),
    Row("lfq 2^14", (16, 256, 14), lambda: lfq(14), lambda: peer_lfq(14)),
    Row("lfq 2^16", (16, 256, 16), lambda: lfq(16), lambda: peer_lfq(16)),
    Row("lfq 2^18", (16, 256, 18), lambda: lfq(18)),
    Row("vq 1024 codes", (16, 256, 256), lambda: vq(256, 1024), lambda: peer_vq(256, 1024)),
    Row("vq 1024 codes, ibq", (16, 256, 256), lambda: vq(256, 1024, learning="ibq")),
    Row(
        "vq 1024 codes, diveq",
        (16, 256, 256),
        lambda: vq(256, 1024, learning="diveq"),
        lambda: peer_vq(256, 1024, learning="diveq"),
    ),
    Row("vq 8192 codes", (16, 256, 32), lambda: vq(32, 8192), lambda: peer_vq(32, 8192)),
    Row("residual vq, 4 x 1024", (16, 256, 256), lambda: vq(256, 1024, 4), lambda: peer_vq(256, 1024, 4)),
]


PLAIN: dict[str, Any] = {"kmeans": False, "dead_below": 0.0}
REPLACED: dict[str, Any] = {"kmeans": False, "decay": 0.9}
"""Counts of codes begin at 1: with the default, 0.99, no code would be dead within the first 600 steps."""
RULES: dict[str, Callable[[], Quantizer]] = {
    "vq, gradient": lambda: VQ(256, 2**14, learning="gradient", **PLAIN),
    "vq, ema": lambda: VQ(256, 2**14, **PLAIN),
    "vq, ibq": lambda: VQ(256, 2**14, learning="ibq", **PLAIN),
    "vq, diveq": lambda: VQ(256, 2**14, learning="diveq", **PLAIN),
    "simvq": lambda: SimVQ(256, 2**14),
    "simvq, 2 blocks": lambda: SimVQ(256, 2**14, blocks=2),
    "vq, gradient, dead codes replaced": lambda: VQ(256, 2**14, learning="gradient", **REPLACED),
    "vq, ema, dead codes replaced": lambda: VQ(256, 2**14, **REPLACED),
    "vq, ibq, dead codes replaced": lambda: VQ(256, 2**14, learning="ibq", **REPLACED),
    "vq, diveq, dead codes replaced": lambda: VQ(256, 2**14, learning="diveq", **REPLACED),
}


def patches(folder: Path) -> Tensor:
    """Return patches of 8 × 8 pixels, ``(T, 192)``, image by image, of mean 0 and standard deviation 1."""
    found = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith((".jpg", ".jpeg", ".png")):
                    image = Image.open(io.BytesIO(tar.extractfile(member).read())).convert("RGB")
                    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
                    found.append(pixels.view(image.height, image.width, 3))
    images = torch.stack(found).float()
    images = (images - images.mean()) / images.std()
    return rearrange(images, "b (h i) (w j) c -> (b h w) (i j c)", i=8, j=8)


def usage(name: str, data: Tensor, steps: int = 100, tokens: int = 1024) -> str:
    """Train with one rule; return a row of Markdown."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(192, 256), nn.GELU(), nn.Linear(256, 256), nn.LayerNorm(256)).to(DEVICE)
    decoder = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 192)).to(DEVICE)
    quantizer = RULES[name]().to(DEVICE)
    quantizer.set_seed(0)
    model = nn.ModuleList([encoder, decoder, quantizer])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    held_out, data = data[: 2**16], data[2**16 :]
    started = time.process_time()
    for step in range(steps):
        x = data[torch.randint(len(data), (tokens,))].to(DEVICE)
        set_dropout_keys(model, 0, step, torch.arange(tokens, device=DEVICE))
        out = quantizer(encoder(x))
        losses = quantizer.losses(out.stats)
        loss = (decoder(out.vectors) - x).square().mean()
        optimizer.zero_grad()
        (loss + sum(quantizer.loss_weights[each] * losses[each] for each in losses)).backward()
        optimizer.step()
        quantizer.update(out.stats)
    seconds = (time.process_time() - started) / steps
    model.eval()
    with torch.no_grad():
        parts = held_out.to(DEVICE).split(2**12)
        outs = [quantizer(encoder(part)) for part in parts]
        errors = [(decoder(out.vectors) - part).square().mean() for out, part in zip(outs, parts, strict=True)]
    metrics = quantizer.metrics(functools.reduce(operator.add, [out.stats for out in outs]))
    shares = f"{100 * metrics['usage']:.1f} % | {metrics['perplexity']:,.0f}"
    return f"| {name} | {shares} | {torch.stack(errors).mean():.3f} | {seconds:.2f} |"


def inputs(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return vectors on the device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).requires_grad_()


def once(step: Step, shape: tuple[int, ...], seed: int) -> float:
    """CPU seconds of one round; on a GPU the seconds until it is done."""
    x = inputs(shape, seed)
    if DEVICE.type == "cpu":
        before = time.process_time()
        step(x)
        return time.process_time() - before
    torch.cuda.synchronize()
    before = time.perf_counter()
    step(x)
    torch.cuda.synchronize()
    return time.perf_counter() - before


def peak_bytes(step: Step, shape: tuple[int, ...]) -> int:
    """Peak tensor memory of one round."""
    x = inputs(shape, 0)
    gc.collect()
    if DEVICE.type == "cuda":
        step(inputs(shape, 1))  # libraries take memory that they keep
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(x)
        return torch.cuda.max_memory_allocated() - before
    with PeakMemory() as memory:
        step(x)
    return memory.peak


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Interleaved rounds of both libraries."""
    steps = {"ours": row.ours()} | ({"theirs": row.theirs()} if row.theirs else {})
    peaks = {name: peak_bytes(step, row.shape) for name, step in steps.items()}  # also the warm-up
    times: dict[str, list[float]] = {name: [] for name in steps}
    for seed in range(rounds):
        for name, step in steps.items():
            times[name].append(once(step, row.shape, seed))
    seconds = {name: statistics.median(each) for name, each in times.items()}
    return {
        "row": row.name,
        "shape": row.shape,
        "ms": {name: 1e3 * value for name, value in seconds.items()},
        "mib": {name: value / 2**20 for name, value in peaks.items()},
        "time_ratio": seconds["ours"] / seconds["theirs"] if row.theirs else None,
        "memory_ratio": peaks["ours"] / peaks["theirs"] if row.theirs else None,
    }


def line(result: dict[str, Any]) -> str:
    """A row of the table."""
    ms, mib = result["ms"], result["mib"]
    shape = "x".join(map(str, result["shape"]))
    if result["time_ratio"] is None:
        theirs = f"{'-':>11}{'-':>9}", f"{'-':>12}{'-':>9}"
    else:
        theirs = (
            f"{ms['theirs']:8.1f} ms{1 / result['time_ratio']:8.1f}x",
            f"{mib['theirs']:8.1f} MiB{1 / result['memory_ratio']:8.1f}x",
        )
    return f"{result['row']:28}{shape:>16}{ms['ours']:8.1f} ms{theirs[0]}{mib['ours']:7.1f} MiB{theirs[1]}"


def main() -> None:
    """Print one line per row."""
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[row.name for row in ROWS], help="names of the rows to run")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds per row")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--usage", type=Path, help="folder of images: print the table of learning rules instead")
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=list(RULES), help="with --usage: rows")
    args = parser.parse_args()
    if unknown := set(args.rows) - {row.name for row in ROWS}:
        parser.error(f"no row {sorted(unknown)}; there are {[row.name for row in ROWS]}")
    torch.set_num_threads(args.threads)
    DEVICE = torch.device(args.device)
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    if args.usage:
        data = patches(args.usage)
        print("| rule | codes used | perplexity | error of patches | CPU seconds a step |\n|---|---|---|---|---|")
        for name in args.rules:
            print(usage(name, data), flush=True)
        return
    clock = f"{args.threads} thread(s), median CPU time" if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {clock} of {args.rounds} rounds")
    print(f"{'row':28}{'input':>16}{'ours':>11}{'peer':>11}{'faster':>9}{'ours':>11}{'peer':>12}{'smaller':>9}")
    results = []
    for row in ROWS:
        if row.name not in args.rows:
            continue
        result = measure(row, args.rounds)
        results.append(result)
        print(line(result), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
