"""Images a second from shards at a web server, beside the same shards on a local disk, under the windowed order.

Prints a table, after about 5 minutes on two CPU cores.

    python benchmarks/remote.py
    python benchmarks/remote.py --rate 50 --window 20 --rounds 8

The server is a process of its own on this machine; all its answers together are limited to a number of MB a second. The
cache holds two of the windows, a fraction of the data, and is empty at the beginning of each round, as is that for the
local shards. A round reads all samples once with each, in turn, from workers that do nothing but decode JPEGs of 480 x
360 to 224 px. The first batch, which waits for the first chunks, counts. CPU seconds are those of all processes but the
server.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from vqclip.data import DataConfig

SHARDS = 20
SIDE = 224
CHUNK = 128


class Round(NamedTuple):
    """One pass over the data."""

    rate: float
    """Images a second."""
    cpu: float
    """CPU milliseconds an image."""


class Limit:
    """Limits the bytes that all threads of the server send."""

    def __init__(self, rate: float):
        self._rate, self._free_at, self._lock = rate, 0.0, threading.Lock()

    def wait(self, size: int) -> None:
        """Wait until ``size`` bytes may be sent."""
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + size / self._rate
        time.sleep(max(0.0, self._free_at - time.monotonic()))


def serve(folder: Path, rate: float, pipe: Connection) -> None:
    """Serve ranges of the files in a folder; runs in a process of its own."""
    limit = Limit(rate)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = folder / Path(self.path).name
            if not path.is_file():
                self.send_error(404)
                return
            size = path.stat().st_size
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, last = (int(wanted[1]), min(int(wanted[2]), size - 1)) if wanted else (0, size - 1)
            limit.wait(last - first + 1)
            with path.open("rb") as file:
                file.seek(first)
                body = file.read(last - first + 1)
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None: ...  # connections end with their workers

    server = Server(("127.0.0.1", 0), Handler)
    pipe.send(server.server_port)
    server.serve_forever()


def write_shards(folder: Path, samples: int) -> None:
    """Write shards of JPEGs of noise at low resolution, scaled to 480 x 360: about 20 kB each."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(samples // SHARDS):
                image = Image.fromarray(random.integers(0, 256, (45, 60, 3), dtype=np.uint8)).resize((480, 360))
                stream = io.BytesIO()
                image.save(stream, "JPEG", quality=85)
                for kind, data in (("jpg", stream.getvalue()), ("txt", b"noise")):
                    entry = tarfile.TarInfo(f"{shard:05d}{number:05d}.{kind}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))


def tokenize(captions: list[str]) -> tuple[torch.Tensor, list[int]]:
    """Captions → ``(B, 1)`` zeros."""
    return torch.zeros(len(captions), 1, dtype=torch.int64), [1] * len(captions)


def cpu_seconds() -> float:
    """CPU seconds of this process and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def read_once(path: str, cache: Path, cache_gib: float, options: argparse.Namespace) -> Round:
    """Read all samples once, from an empty cache of chunks."""
    shutil.rmtree(cache / "chunks", ignore_errors=True)
    config = DataConfig.model_validate(
        {
            "sources": [{"kind": "shards", "path": path, "remote": {"cache_gib": cache_gib}}],
            "order": {"kind": "windowed", "chunk": CHUNK, "window": options.window},
            "workers": options.workers,
        }
    )
    data = config.build(size=SIDE, tokenize=tokenize, batch_size=options.batch, seed=0)
    steps = len(data) // options.batch
    begun, used = time.perf_counter(), cpu_seconds()
    for _ in data.batches(0, steps):
        pass
    seconds = time.perf_counter() - begun
    return Round(steps * options.batch / seconds, (cpu_seconds() - used) * 1000 / (steps * options.batch))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200, help="MB a second of the server")
    parser.add_argument("--samples", type=int, default=25_600)
    parser.add_argument("--window", type=int, default=8, help="chunks of a window")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        shards, cache = Path(folder) / "shards", Path(folder) / "cache"
        os.environ["VQCLIP_CACHE"] = str(cache)
        write_shards(shards, options.samples)
        size = sum(path.stat().st_size for path in shards.iterdir())
        cache_gib = 2.4 * options.window * CHUNK / options.samples * size / 2**30
        mine, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(shards, options.rate * 1e6, theirs), daemon=True
        )
        server.start()
        port = mine.recv()
        paths = {"local": str(shards), "server": f"http://127.0.0.1:{port}/{{00000..{SHARDS - 1:05d}}}.tar"}
        for path in paths.values():
            subprocess.run([sys.executable, "-m", "vqclip", "data", "index", path], check=True, capture_output=True)
        found: dict[str, list[Round]] = {name: [] for name in paths}
        for _ in range(options.rounds + 1):
            for name, path in paths.items():
                found[name].append(read_once(path, cache, cache_gib, options))
        server.kill()
    print(f"{size / 1e6:.0f} MB, cache {cache_gib * 2**30 / 1e6:.0f} MB\n")
    print("| | images a second | CPU ms an image |\n|---|---|---|")
    for name, rounds in found.items():
        rates, cpu = zip(*rounds[1:], strict=True)  # the first warms the disk up
        rate = f"{statistics.median(rates):.0f} ({min(rates):.0f}–{max(rates):.0f})"
        print(f"| {name} | {rate} | {statistics.median(cpu):.2f} |")
    ratios = [far.rate / near.rate for near, far in zip(found["local"][1:], found["server"][1:], strict=True)]
    print(f"\nserver / local: {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")


if __name__ == "__main__":
    main()
