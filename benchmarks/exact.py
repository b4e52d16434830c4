"""What exact ids cost and change: a tokenizer's ids with and without them, on pictures or captions.

    python benchmarks/exact.py --tokenizer runs/eurosat/tokenizer --modality image --data data/cls_eurosat

Prints how far features in float32 lie from those in float64, the share of samples in doubt, the CPU time of exact ids
over that of plain ones (one thread, rounds alternate), and how many ids of either are not those of float64, and are
others in batches of another size with torch's other kernels (without oneDNN).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vqclip import load_tokenizer
from vqclip.data.pictures import open_pictures
from vqclip.exact import Doubting, in_float64
from vqclip.export.command import batches
from vqclip.tokenizer import Tokenizer

EPSILON = torch.finfo(torch.float32).eps


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--modality", choices=("image", "text"), required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default=None)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(options.tokenizer, options.modality)
    wide, doubting = in_float64(tokenizer), Doubting(tokenizer)
    inputs = list(batches(tokenizer, open_pictures(options.data, options.split), options.batch_size))

    errors = torch.cat([relative_errors(tokenizer, wide, batch) for batch in inputs])
    mean, most = (float(each) / EPSILON for each in (errors.square().mean().sqrt(), errors.max()))
    print(
        f"features in float32: off by {mean:.1f} in the mean (root of squares) and {most:.1f} at most, in units of "
        f"{EPSILON:.1e} of the sample's largest feature; tolerance {doubting.tolerance / EPSILON:.0f}"
    )
    doubtful = torch.cat([doubting(batch)[1] for batch in inputs])
    print(f"in doubt: {int(doubtful.sum())} of {len(doubtful)} samples ({100 * float(doubtful.float().mean()):.1f} %)")

    def encode(exact: bool) -> Callable[[Tensor], Tensor]:
        tokenizer.exact = exact
        return tokenizer.encode

    rounds = options.rounds + 1  # one to warm up
    ratios = [seconds(encode(True), inputs) / seconds(encode(False), inputs) for _ in range(rounds)][1:]
    print(f"CPU time, exact / plain: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")

    reference = ids(wide.encode, inputs)
    count = int((reference >= 0).sum())
    for name, exact in (("plain", False), ("exact", True)):
        own = ids(encode(exact), inputs)
        with torch.backends.mkldnn.flags(enabled=False):
            others = ids(encode(exact), [part for batch in inputs for part in batch.split(7)])
        print(
            f"{name}: {int((own != reference).sum())} of {count:,} ids are not those of float64, "
            f"{int((own != others).sum())} are others in batches of 7 without oneDNN"
        )


def relative_errors(tokenizer: Tokenizer, wide: Tokenizer, batch: Tensor) -> Tensor:
    """Of every feature of real tokens, of the largest of its sample."""
    (narrow, mask), (exact, _) = tokenizer.features(batch), wide.features(batch)
    real = torch.ones(narrow.shape[:2], dtype=torch.bool) if mask is None else mask
    largest = (exact * real.unsqueeze(-1)).abs().amax(dim=(1, 2), keepdim=True)
    return ((narrow - exact).abs() / largest)[real].flatten()


def seconds(encode: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> float:
    start = time.process_time()
    ids(encode, inputs)
    return time.process_time() - start


def ids(encode: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> Tensor:
    return torch.cat([encode(batch) for batch in inputs])


if __name__ == "__main__":
    main()
