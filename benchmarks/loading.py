"""Time and memory of loading a tokenizer: whole processes, beside one that only imports torch.

Prints a table, after about 4 minutes on two CPU cores.

    OMP_NUM_THREADS=1 python benchmarks/loading.py
    OMP_NUM_THREADS=1 python benchmarks/loading.py --tokenizer runs/base/tokenizer --rounds 20

A round starts each process once, in turn, and takes its wall time, its CPU time and its peak memory. Ratios are to the
`import torch` of the same round; the table has their medians and ranges. The first round, which brings files into the
page cache, is left out. Without `--tokenizer` one is made of a configuration's sizes, with random weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

TORCH = "import torch"
READ = """
import torch, vqclip
tokenizer = vqclip.load_tokenizer({folder!r}, {modality!r}, encode=False)
ids = torch.zeros(1, tokenizer.num_tokens, len(tokenizer.codebook_sizes), dtype=torch.int64)
tokenizer.decode(ids), tokenizer.embed(ids)
"""
ENCODE = """
import vqclip
from PIL import Image
tokenizer = vqclip.load_tokenizer({folder!r}, {modality!r})
tokenizer.encode({sample})
"""
SAMPLES = {"image": 'Image.new("RGB", (64, 64))', "text": '["a red star"]'}


class Cost(NamedTuple):
    """Time and memory of a whole process."""

    wall: float
    """Seconds."""
    cpu: float
    """Seconds."""
    memory: float
    """Peak memory in MiB."""


def rows(folder: str) -> dict[str, str]:
    """Programs by the names of their rows."""
    programs = {"`import torch`": TORCH}
    for modality, sample in SAMPLES.items():
        programs[f"load, decode and embed ids of {modality}s"] = READ.format(folder=folder, modality=modality)
        programs[f"load, encode one {modality}"] = ENCODE.format(folder=folder, modality=modality, sample=sample)
    return programs


def cost(program: str) -> Cost:
    """Run a program in a process of its own."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program])
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"a process ended with status {process.returncode}:\n{program}")
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def make_folder(config: Path, folder: Path) -> str:
    """A tokenizer folder of a configuration's sizes, with random weights."""
    make = (
        "import sys; from vqclip.config import load_config; from vqclip.train import TrainConfig;"
        "load_config(TrainConfig, sys.argv[1]).model.build().save_pretrained(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", make, str(config), str(folder)], check=True)
    return str(folder)


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="the tokenizer folder")
    parser.add_argument("--config", type=Path, default=Path("configs/base.yaml"), help="without --tokenizer")
    parser.add_argument("--rounds", type=int, default=10, help="without the first")
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    with tempfile.TemporaryDirectory() as aside:
        folder = str(options.tokenizer) if options.tokenizer else make_folder(options.config, Path(aside) / "tokenizer")
        programs = rows(folder)
        rounds = [
            {name: cost(program) for name, program in programs.items()}
            for _ in tqdm(range(options.rounds + 1), disable=None)
        ][1:]
        size = (Path(folder) / "model.safetensors").stat().st_size / 2**20
    print(
        f"{options.tokenizer or options.config}: {size:,.1f} MiB of weights; {options.rounds} rounds, median (range)\n"
    )
    print("| process | × wall time of `import torch` | × CPU time | peak memory, MiB |\n|---|---|---|---|")
    for name in programs:
        base = [each["`import torch`"] for each in rounds]
        theirs = [each[name] for each in rounds]
        wall = [b.wall / a.wall for a, b in zip(base, theirs, strict=True)]
        cpu = [b.cpu / a.cpu for a, b in zip(base, theirs, strict=True)]
        print(f"| {name} | {spread(wall, 2)} | {spread(cpu, 2)} | {spread([b.memory for b in theirs], 0)} |")


if __name__ == "__main__":
    main()
