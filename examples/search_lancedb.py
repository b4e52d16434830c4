"""Search images with words in LanceDB, in a table of the embeddings of an index of codes.

    vqclip search build --tokenizer emoji --data data/captions_noto_emoji/val --out emoji.index
    python examples/search_lancedb.py emoji emoji.index "hamster" "family" --where "item < 200"

The database is a folder, `--out`. Queries are texts, embedded through their codes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import vqclip
from vqclip.data.lookup import name_errors
from vqclip.errors import VqclipError, encodable
from vqclip.search import CodeIndex, embeddings


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Make the table, and search it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder or hub name of a tokenizer of images and texts")
    parser.add_argument("index", help="folder of `vqclip search build`")
    parser.add_argument("queries", nargs="+", help="what to look for")
    parser.add_argument("-k", type=int, default=5, help="results of a query")
    parser.add_argument("--where", help="condition on the columns, in SQL")
    parser.add_argument("--out", type=Path, default=Path("lancedb"), help="folder of the database")
    options = parser.parse_args(arguments)
    import lancedb  # pip install 'vqclip[lancedb]'
    import pyarrow

    images = vqclip.load_tokenizer(options.tokenizer, modality="image")
    text = vqclip.load_tokenizer(options.tokenizer, modality="text")
    index = CodeIndex.load(options.index)
    vectors = pyarrow.FixedSizeListArray.from_arrays(embeddings(index, images).numpy().ravel(), images.embed_dim)
    rows = pyarrow.table(
        {"item": range(len(index)), "name": [encodable(name) for name in index.names], "vector": vectors}
    )
    table = lancedb.connect(options.out).create_table("images", rows, mode="overwrite")
    print(f"{table.count_rows()} rows of {', '.join(table.schema.names)}")

    for query, vector in zip(options.queries, text.embed(text.encode(options.queries)), strict=True):
        search = table.search(vector.numpy()).distance_type("cosine").limit(options.k)
        search = search.where(options.where) if options.where else search
        with name_errors(f"--where: got {options.where!r}; expected a condition in SQL"):
            rows = search.select(["name", "_distance"]).to_list()
        for row in rows:
            print(f"{query!r}: {1 - row['_distance']:.4f} {row['name']}")


if __name__ == "__main__":
    try:
        main()
    except VqclipError as error:
        sys.exit(f"error: {error}")
