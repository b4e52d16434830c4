"""Search by codes beside search by float vectors: what is found, how many bytes it takes, how long.

Prints two tables, after about 10 seconds on two CPU cores for 400 pairs.

    python benchmarks/search.py --tokenizer runs/captions/tokenizer --data data/captions_noto_emoji/val
    python benchmarks/search.py --tokenizer runs/captions/tokenizer --data data/captions_noto_emoji/{train,val}

Both directions: captions look for images, images for captions. A query is embedded in two ways, continuous and from
its own codes. The first table has R@10 (share of queries whose own partner is among the ten found) of the float search,
where nothing is quantized, and of the search by codes; and how many of the ten items of the float search the search by
codes finds, too. The second has bytes an item and CPU time a query, one thread, median of the rounds. faiss is measured
where it is installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vqclip.data import CaptionShardsConfig, EvalSet
from vqclip.errors import ConfigError
from vqclip.model import CLIP
from vqclip.search import CodeIndex, CodeSearch, FaissSearch
from vqclip.tokenizer import Tokenizer

K = 10


class ItemSet:
    """One modality of the set: ids and embeddings of every item."""

    def __init__(self, tokenizer: Tokenizer, batches: list[Tensor]):
        self.tokenizer = tokenizer
        with torch.no_grad():
            self.ids = torch.cat([tokenizer.encode(batch) for batch in batches])
            self.continuous = torch.cat([tokenizer.continuous(batch) for batch in batches])
            self.coded = torch.cat([tokenizer.embed(ids) for ids in self.ids.split(len(batches[0]))])


def read(model: CLIP, data: list[str]) -> tuple[ItemSet, ItemSet]:
    """Images and their first captions."""
    source = CaptionShardsConfig(path=tuple(data)).build()
    batches = list(EvalSet(source, model.image.transform, batch_size=64))
    captions = [model.text.preprocess([each[0] for each in batch.captions]) for batch in batches]
    return ItemSet(model.image, [batch.images for batch in batches]), ItemSet(model.text, captions)


def recall(found: Tensor) -> float:
    """R@10: query i looks for item i."""
    return float((found == torch.arange(len(found))[:, None]).any(dim=1).float().mean())


def overlap(found: Tensor, wanted: Tensor) -> float:
    """Return the share of the wanted items that were found."""
    return float((found[:, :, None] == wanted[:, None, :]).any(dim=1).float().mean())


def float_search(queries: Tensor, items: Tensor) -> Tensor:
    """Return the ten best items."""
    return (queries @ items.T).topk(K, dim=1).indices


def found_rows(title: str, queries: ItemSet, items: ItemSet, search: CodeSearch) -> None:
    """Return the lines of the first table."""
    wanted = float_search(queries.continuous, items.continuous)
    for name, asked in (("continuous", queries.continuous), ("codes", queries.coded)):
        found = search.search(asked, K).items
        same = overlap(found, float_search(asked, items.coded))
        before, after = recall(wanted), recall(found)
        print(
            f"| {title} | {name} | {100 * before:.1f} | {100 * after:.1f} | {after / before:.3f} | "
            f"{overlap(found, wanted):.3f} | {same:.4f} |"
        )


def seconds(search: Callable[[Tensor, int], object], queries: Tensor, rounds: int, together: int) -> float:
    """Median CPU time of a query, of so many asked together."""
    taken = []
    for part in (queries.split(together) * rounds)[: max(rounds, 10)]:
        start = time.process_time()
        search(part, K)
        taken.append((time.process_time() - start) / len(part))
    return statistics.median(taken)


def cost_rows(side: ItemSet, index: CodeIndex, queries: Tensor, rounds: int) -> None:
    """Lines of the second table."""
    searches: dict[str, CodeSearch | FaissSearch] = {
        name: CodeSearch(index, side.tokenizer, keep)
        for name, keep in (("ids alone", False), ("ids, embeddings kept", True))
    }
    try:
        searches["faiss Flat"] = FaissSearch(index, side.tokenizer, "Flat")
        searches["faiss HNSW32"] = FaissSearch(index, side.tokenizer, "HNSW32")
    except ConfigError as error:
        print(f"(no faiss: {error})")
    exact = searches["ids alone"].search(queries, K).items
    floats = 4 * side.tokenizer.embed_dim
    counts = (1, len(queries))
    times = {name: [seconds(each.search, queries, rounds, n) for n in counts] for name, each in searches.items()}
    base = times.get("faiss Flat")
    for name, each in searches.items():
        size = each.nbytes / len(index)
        beside = [f" ({mine / flat:.1f})" for mine, flat in zip(times[name], base, strict=True)] if base else ["", ""]
        shown = " | ".join(f"{1e6 * taken:.0f}{ratio}" for taken, ratio in zip(times[name], beside, strict=True))
        same = overlap(each.search(queries, K).items, exact)
        print(f"| {name} | {size:.0f} | {floats / size:.2f} | {shown} | {same:.4f} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with both tokenizers")
    parser.add_argument("--data", nargs="+", required=True, help="caption shards")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    torch.set_num_threads(1)
    model = CLIP.from_pretrained(options.tokenizer)
    image, text = read(model, options.data)
    indexes = {side: CodeIndex.build(side.tokenizer, side.ids) for side in (image, text)}
    for name, side in (("images", image), ("captions", text)):
        index, floats = indexes[side], 4 * side.tokenizer.embed_dim
        print(
            f"{len(index):,} {name} of {index.packing.bits} bits, {index.nbytes / len(index):.0f} bytes; float32: "
            f"{floats} bytes, {floats * len(index) / index.nbytes:.2f} times as many"
        )
    print(
        "\n| direction | query | R@10 float | R@10 codes | codes / float | of the float search's ten | of embed's ten |"
    )
    print("|---|---|---|---|---|---|---|")
    for title, queries, items in (("captions → images", text, image), ("images → captions", image, text)):
        found_rows(title, queries, items, CodeSearch(indexes[items], items.tokenizer, keep=True))
    print(
        "\n| images as | bytes an item | float32 / it | µs a query, alone (× faiss Flat) | of 100 together | "
        "of the exact ten |\n|---|---|---|---|---|---|"
    )
    cost_rows(image, indexes[image], text.coded[:100], options.rounds)


if __name__ == "__main__":
    main()
