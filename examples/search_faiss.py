"""Search images with words in faiss, in vectors that `vqclip search export` has written.

    vqclip search build --tokenizer runs/captions/tokenizer --images data/captions_noto_emoji/val --out emoji.index
    vqclip search export --index emoji.index --out emoji.arrow
    python examples/search_faiss.py runs/captions/tokenizer emoji.arrow "hamster" "family" --factory "IVF16,PQ32"

The file is mapped into memory, and faiss reads the vectors where they are. Queries are texts, embedded through their
codes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import torch

import vqclip
from vqclip.cli.arguments import count
from vqclip.data.lookup import name_errors
from vqclip.errors import VqclipError
from vqclip.search import vectors_of


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Make the index, and search it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder or hub name of a tokenizer of images and texts")
    parser.add_argument("vectors", help="Arrow file of `vqclip search export`, your own: it is not checked for damage")
    parser.add_argument("queries", nargs="+", help="what to look for")
    parser.add_argument("-k", type=count, default=5, help="results of a query")
    parser.add_argument("--factory", default="Flat", help="index of faiss: Flat, HNSW32, IVF16,Flat, IVF16,PQ32, ...")
    parser.add_argument("--probe", type=count, default=4, help="cells of an IVF index that a query visits")
    options = parser.parse_args(arguments)
    import faiss  # pip install 'vqclip[search,parquet]'
    import pyarrow

    images = vqclip.load_tokenizer(options.tokenizer, modality="image")
    text = vqclip.load_tokenizer(options.tokenizer, modality="text")
    with name_errors(f"{options.vectors}: cannot be mapped; expected an .arrow file of `vqclip search export`"):
        table = pyarrow.ipc.open_file(pyarrow.memory_map(options.vectors)).read_all()
    vectors = vectors_of(table, images, options.vectors).astype(np.float32, copy=False)  # copies float16 only
    fits = f"{len(vectors)} vectors of {images.embed_dim} numbers, such as Flat or HNSW32"
    with name_errors(f"--factory: got {options.factory!r}; expected one that faiss can make of {fits}"):
        index = faiss.index_factory(images.embed_dim, options.factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
    names = table.column("name").to_pylist()
    if "IVF" in options.factory:
        index.nprobe = options.probe

    scores, items = index.search(text.embed(text.encode(options.queries)).numpy(), options.k)
    for row, query in enumerate(options.queries):
        for score, item in zip(scores[row], items[row], strict=True):
            if item >= 0:  # -1: fewer than k in the visited cells
                print(f"{query!r}: {score:.4f} {names[item]}")


if __name__ == "__main__":
    try:
        main()
    except VqclipError as error:
        sys.exit(f"error: {error}")
