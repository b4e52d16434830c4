"""Orders of samples beside those of other loaders: how well a batch mixes data that are sorted by topic.

    python benchmarks/order.py mixing                       # 1.3e9 samples in 130,000 shards, batches of 32,768
    python benchmarks/order.py mixing --samples 1e6 --shards 100 --scale 16

Every shard has one topic. The figure is the variance of the topic shares of a batch, over that of independent draws;
in the second column that of 16 successive batches together. MosaicML's py1br and a shuffle buffer are simulated from
their documentation: blocks of 0.75 to 1.25 times 4,000,000 / canonical nodes samples, of consecutive shards in a random
order; a buffer of samples in each of 64 workers, which read one shard after another.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from vqclip.data.order import FullOrder, GlobalOrder, WindowedOrder
from vqclip.data_tools.mixing import simulate_mixing, topic_variance

DRAWS, TOGETHER = 8, 16


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


def mixing(samples: int, shards: int, batch: int = 32_768, scale: int = 1) -> list[tuple[str, float, float]]:
    """Return for each order its name, the figure of one batch, and that of the batches of a window together."""
    batch //= scale
    rows = []
    for chunk, window in ((0, 0), (128, 32_768 // scale), (512, 8192 // scale), (128, 2048 // scale)):
        kind = WindowedOrder(chunk=chunk, window=window) if chunk else FullOrder()
        order = GlobalOrder([samples], [1.0], 1, kind)
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = commands.add_parser("mixing", help="topics in a batch")
    chosen.add_argument("--samples", type=float, default=1.3e9)
    chosen.add_argument("--shards", type=int, default=130_000)
    chosen.add_argument("--batch", type=int, default=32_768)
    chosen.add_argument("--scale", type=int, default=1, help="divides the batch, windows, blocks and buffers")
    options = parser.parse_args()
    rows = mixing(int(options.samples), options.shards, options.batch, options.scale)
    print(f"{'order':42}{'a batch':>10}{'16 batches':>12}")
    for name, one, many in rows:
        print(f"{name:42}{one:10.2f}{many:12.2f}")


if __name__ == "__main__":
    main()
