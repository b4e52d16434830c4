"""Orders of samples: time and memory before the first batch, and shuffling of data that are sorted by topic.

Prints a table, after about 2 minutes on two CPU cores.

    python benchmarks/order.py start                        # made indexes of 1e6, 1e7 and 1.3e9 samples, 30 s, 250 MB
    python benchmarks/order.py mixing                       # 1.3e9 samples in 130,000 shards, batches of 32,768
    python benchmarks/order.py mixing --samples 1e6 --shards 100 --scale 16

start: a process of its own reads the index and computes its part of a batch of 32,768, as rank 0 of 8 on each of 64
nodes; a further process does so at the same time. Seconds begin with the process; of the index, after the imports. MB
are its share of all memory (PSS): for index and order alone, and with Python and its modules. Milliseconds are medians,
of a whole batch and of a rank's part. At URLs, the `data` section of a configuration is built, from the names of the
shards on. In the full order the index has the places of all members.

mixing: every shard has one topic. The figure is the variance of the topic shares of a batch, over that of independent
draws; in the second column that of 16 successive batches together. MosaicML's py1br and a shuffle buffer are simulated
from their documentation: blocks of 0.75 to 1.25 times 4,000,000 / canonical nodes samples, of consecutive shards in a
random order; a buffer of samples in each of 64 workers, which read one shard after another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vqclip.data import DataConfig
from vqclip.data.draws import hash_integers
from vqclip.data.order import FullOrder, GlobalOrder, WindowedOrder
from vqclip.data.sources.paths import find_shards
from vqclip.data.table_file import Texts
from vqclip.data.tars.index import BLOCK, IndexFacts, open_index, write_index
from vqclip.data.tars.members import DIGEST, USUAL
from vqclip.data.tars.open import cached_index

DRAWS, TOGETHER = 8, 16
BATCH, NODES, GPUS = 32_768, 64, 8
SHARD, SAMPLE_BYTES, CHUNK = 10_000, 7680, 128
"""Samples of a shard, bytes of a sample, samples of a chunk."""


def blocks(samples: int, shards: int, batch: int, nodes: int, block: int, seed: int) -> np.ndarray:
    """Draw the samples of a batch from one block of each canonical node, as py1br's batches have them."""
    rng = np.random.default_rng(seed)
    each = samples // shards
    order = rng.permutation(shards)
    found = []
    for node in range(nodes):
        first, end = node * samples // nodes, (node + 1) * samples // nodes
        size = min(int(block * rng.uniform(0.75, 1.25)), end - first)
        start = first + int(rng.integers(end - first - size + 1))
        places = start + rng.choice(size, min(batch // nodes, size), replace=False)
        found.append(order[places // each] * each + places % each)
    return np.concatenate(found)


def buffers(samples: int, shards: int, batch: int, workers: int, buffer: int, seed: int) -> np.ndarray:
    """Draw the samples of a batch from shuffle buffers in the middle of an epoch."""
    rng = np.random.default_rng(seed)
    each, found = samples // shards, []
    for worker in range(workers):
        mine = rng.permutation(shards // workers) * workers + worker
        places = int(rng.integers(each)) + np.arange(5 * buffer + batch // workers)  # long enough to forget its start
        stream = mine[places // each % len(mine)] * each + places % each
        held = stream[:buffer].copy()
        for new, slot in zip(stream[buffer:], rng.integers(buffer, size=len(stream) - buffer), strict=True):
            found.append(held[slot])
            held[slot] = new
        found[-(4 * buffer + batch // workers) :] = found[-(batch // workers) :]
    return np.array(found)


def topic_variance(samples: np.ndarray, size: int, topics: int) -> float:
    """Return the variance of the topic shares of some samples over that of independent draws.

    Args:
        samples: int64 in 0 ... size - 1.
        size: samples of the data, which are sorted: each topic is a run of about ``size / topics`` of them.
        topics: number of topics, at least 2.
    """
    edges = -(-np.arange(topics + 1) * size // topics)
    expected = np.diff(edges) * (len(samples) / size)
    counts = np.bincount(samples * topics // size, minlength=topics)
    return float(((counts - expected) ** 2 / expected).sum() / (topics - 1))


def simulate_mixing(
    order: GlobalOrder, batch_size: int, topics: int, seed: int, draws: int = 8, steps: int = 1
) -> float:
    """Return the mean `topic_variance` of some batches of the first epoch.

    Args:
        order: order of one source.
        batch_size: G, samples of a global batch.
        topics: number of topics in the data.
        seed: chooses the batches.
        draws: number of simulated batches.
        steps: successive batches that are taken as one; the topics of neighbouring batches may be correlated.
    """
    size, together = order.sizes[0], batch_size * steps
    places = max(1, order.epoch_size // together)
    chosen: list[int] = (hash_integers(seed, np.arange(draws)) % np.uint64(places)).tolist()
    return float(
        np.mean(
            [topic_variance(order[place * together + np.arange(together)].sample, size, topics) for place in chosen]
        )
    )


def mixing(samples: int, shards: int, batch: int = 32_768, scale: int = 1) -> list[tuple[str, float, float]]:
    """Return for each order its name, the figure of one batch, and that of the batches of a window together."""
    batch //= scale
    rows = []
    for chunk, window in ((0, 0), (128, 32_768 // scale), (512, 8192 // scale), (128, 2048 // scale)):
        kind = WindowedOrder(chunk=chunk, window=window) if chunk else FullOrder()
        order = kind.build([samples], [1.0], 1, batch)
        name = f"windowed, {window:,} chunks of {chunk}" if chunk else "full"
        figures = [simulate_mixing(order, batch, shards, 7, DRAWS, steps) for steps in (1, TOGETHER)]
        rows.append((name, figures[0], figures[1]))
    peers: dict[str, Callable[[int, int], np.ndarray]] = {
        f"py1br, 8 canonical nodes, blocks of {500_000 // scale:,}": lambda count, seed: blocks(
            samples, shards, count, 8, 500_000 // scale, seed
        ),
        f"buffer of {5000 // scale:,}, 64 workers": lambda count, seed: buffers(
            samples, shards, count, 64, 5000 // scale, seed
        ),
    }
    for name, draw in peers.items():
        figures = [
            float(np.mean([topic_variance(draw(batch * steps, seed), samples, shards) for seed in range(DRAWS)]))
            for steps in (1, TOGETHER)
        ]
        rows.append((name, figures[0], figures[1]))
    return rows


def make_index(path: Path, samples: int, with_members: bool = False) -> None:
    """Write the index of shards that do not exist."""
    shards = -(-samples // SHARD)
    firsts = np.minimum(np.arange(shards + 1) * SHARD, samples)
    begins = np.arange(0, samples, CHUNK)
    rng = np.random.default_rng(0)
    arrays = {
        "lengths": np.diff(firsts) * SAMPLE_BYTES + 1024,
        "firsts": firsts,
        "starts": begins % SHARD * SAMPLE_BYTES,
        "digests": rng.integers(256, size=(len(begins), DIGEST), dtype=np.uint8),
        "shard_digests": rng.integers(256, size=(shards, 32), dtype=np.uint8),
    }
    arrays["names"], arrays["name_ends"] = Texts.join(f"{number:06}.tar" for number in range(shards))
    arrays["tags"], arrays["tag_ends"] = Texts.join(["1"] * shards)
    if with_members:
        first = np.arange(samples) % SHARD * (SAMPLE_BYTES // BLOCK)
        none = np.full(samples, 2**32 - 1)
        arrays["offsets"] = np.stack([first + 1, first + 13, none, none], axis=1).astype(np.uint32)
        arrays["sizes"] = np.tile(np.array([6000, 100, 0, 0], np.uint32), (samples, 1))
        arrays["keys"], arrays["key_ends"] = np.full(9 * samples, 48, np.uint8), np.arange(1, samples + 1) * 9
    counts = (samples, samples, 0, 0)
    facts = IndexFacts(chunk=CHUNK, members=counts, complete=counts, content="0" * 64, rules=USUAL.to_json())
    write_index(path, facts, arrays)


def memory() -> dict[str, float]:
    """Return this process's share of all memory, and its private memory, in MB."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = {name: float(size) / 1000 for name, size in re.findall(r"(\w+): +(\d+) kB", text)}
    return {"pss": found["Pss"], "uss": found["Private_Clean"] + found["Private_Dirty"]}


def measure(where: str, verify: bool, began: float) -> None:
    """Print, as JSON, what this process needs to the first positions; wait until its input ends."""
    before, start, path = memory(), time.time(), Path(where)
    if "://" in where:
        tree = {"sources": [{"kind": "shards", "path": where}], "order": {"kind": "windowed"}, "workers": 0}
        order = DataConfig.model_validate(tree).build(224, None, BATCH, 0).order  # type: ignore[arg-type]
    else:
        index = open_index(path, verify=verify)
        order = (FullOrder() if index.keys is not None else WindowedOrder()).build([index.samples], [1.0], 1, BATCH)
    nodes = np.repeat(np.arange(NODES), GPUS).tolist()
    slots, _ = order.deal(0, 0, nodes)
    end, after = time.time(), memory()
    whole = [median_ms(lambda step=step: order.deal(step, 0, [0])) for step in (0, 1_000_000)]  # type: ignore[misc]
    found = {"since_start": end - began, "seconds": end - start, "before": before, "after": after, "whole": whole}
    dealt = median_ms(lambda: order.deal(1_000_000, 0, nodes))
    print(json.dumps({**found, "dealt": dealt, "samples": slots.sample.tolist()}), flush=True)
    sys.stdin.read()


def median_ms(function: Callable[[], object], rounds: int = 15) -> float:
    """Return the median time of a call in milliseconds."""
    times = []
    for _ in range(rounds):
        last = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - last))
    return statistics.median(times)


@contextlib.contextmanager
def measured(path: Path | str, verify: bool) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """Run `measure` in a process of its own, which lives until the context ends."""
    command = [sys.executable, __file__, "measure", str(path), str(verify), str(time.time())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), process


def start(samples: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the first and a further process of a node need in the windowed order."""
    path = folder / f"{samples}.index"
    make_index(path, samples)
    with measured(path, True) as (first, _), measured(path, False) as (further, _):
        path.unlink()
        return first, further


def start_at_urls(samples: int, folder: Path) -> dict[str, Any]:
    """Return what a process needs that builds the `data` section for shards at URLs, whose index is in the cache."""
    os.environ["VQCLIP_CACHE"] = str(folder / "cache")
    url = f"http://127.0.0.1:9/{{000000..{-(-samples // SHARD) - 1:06}}}.tar"
    path = cached_index(find_shards([url]))
    path.parent.mkdir(parents=True)
    make_index(path, samples)
    with measured(url, True) as (found, _):
        path.unlink()
        return found


def start_full(samples: int, folder: Path) -> dict[str, Any]:
    """Return what the first process of a node needs in the full order, of tars on its disk."""
    path = folder / f"{samples}.index"
    make_index(path, samples, with_members=True)
    with measured(path, True) as (found, _):
        path.unlink()
        return found


def print_start() -> None:
    """Measure and print the table of `start`; the full order has 1,300 million samples by extrapolation."""
    print(
        f"{'':40}{'seconds':>8}{'index':>8}{'MB':>8}{'with Python':>12}{'ms, step 0':>12}{'1,000,000':>12}{'dealt':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for samples in (10**6, 10**7, 1_300_000_000):
            rows = dict(zip(("first process", "further process"), start(samples, Path(folder)), strict=True))
            for name, found in rows.items():
                print_row(f"{samples:,} windowed, {name}", found)
        print_row(f"{samples:,} windowed, at URLs", start_at_urls(samples, Path(folder)))
        for samples in (10**6, 10**7):
            print_row(f"{samples:,} full, first process", found := start_full(samples, Path(folder)))
        found["seconds"] *= 130
        found["since_start"] += found["seconds"] * 129 / 130
        for kind in ("pss", "uss"):
            found["after"][kind] = found["before"][kind] + 130 * (found["after"][kind] - found["before"][kind])
        print_row("1,300,000,000 full, extrapolated", found)


def print_row(name: str, found: dict[str, Any]) -> None:
    """Print a line of the table of `start`."""
    before, after, ms = found["before"]["pss"], found["after"]["pss"], found["whole"]
    print(
        f"{name:40}{found['since_start']:8.1f}{found['seconds']:8.2f}{after - before:8,.0f}{after:12,.0f}"
        f"{ms[0]:12.1f}{ms[1]:12.1f}{found['dealt']:8.1f}"
    )


def main() -> None:
    """Print a table."""
    if sys.argv[1:2] == ["measure"]:
        return measure(sys.argv[2], sys.argv[3] == "True", float(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("start", help="time and memory to the first positions")
    chosen = commands.add_parser("mixing", help="topics in a batch")
    chosen.add_argument("--samples", type=float, default=1.3e9)
    chosen.add_argument("--shards", type=int, default=130_000)
    chosen.add_argument("--batch", type=int, default=BATCH)
    chosen.add_argument("--scale", type=int, default=1, help="divides the batch, windows, blocks and buffers")
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    if options.command == "start":
        return print_start()
    rows = mixing(int(options.samples), options.shards, options.batch, options.scale)
    print(f"{'order':42}{'a batch':>10}{'16 batches':>12}")
    for name, one, many in rows:
        print(f"{name:42}{one:10.2f}{many:12.2f}")
    return None


if __name__ == "__main__":
    main()
