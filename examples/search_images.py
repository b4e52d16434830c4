"""Search a folder of images with words, in an index that holds the images' ids and nothing else.

Writes a page for each query, after about 10 seconds on two CPU cores for 400 images.

    python examples/search_images.py emoji data/captions_noto_emoji/val "hamster" "family"
    python examples/search_images.py emoji ~/images "a boat" --out boats

The images are a folder of files (in subfolders too), or shards. Every query gets a page of HTML in the folder
`--out`, best image first, and `index/` beside the pages can be loaded again. `vqclip search` is the same as
a command; here is what it does. Nothing is drawn at random.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

import vqclip
from vqclip.data import EvalSet, ShardedSource, decode_image
from vqclip.data.prepare import open_images
from vqclip.errors import VqclipError
from vqclip.report.page import search_page
from vqclip.search import CodeIndex, CodeSearch, SearchResult
from vqclip.search.scan import Hit
from vqclip.tokenizer import ImageTokenizer


def make_index(tokenizer: ImageTokenizer, source: ShardedSource) -> CodeIndex:
    """Build an index of the ids of images; the name of an item is its place and its caption."""
    batches = list(EvalSet(source, tokenizer.transform, batch_size=64))
    ids = torch.cat([tokenizer.encode(batch.images) for batch in tqdm(batches, desc="encode", disable=None)])
    captions = [captions[0] for batch in batches for captions in batch.captions]
    names = [f"{source.place(number)}: {caption}" for number, caption in enumerate(captions)]
    return CodeIndex.build(tokenizer, ids, names)


def hits(index: CodeIndex, found: SearchResult, query: int, source: ShardedSource) -> list[Hit]:
    """Return the results of one query with their images."""
    best = zip(found.items[query].tolist(), found.scores[query].tolist(), strict=True)
    return [Hit(index.names[item], score, decode_image(source.read(item).image)) for item, score in best]


def main(arguments: Sequence[str] | None = None) -> None:
    """Index, search, write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder or hub name of a tokenizer of images and texts")
    parser.add_argument("images", help="folder of images, or of shards")
    parser.add_argument("queries", nargs="+", help="what to look for")
    parser.add_argument("-k", type=int, default=12, help="images a page")
    parser.add_argument("--out", type=Path, default=Path("search"), help="folder of the index and the pages")
    options = parser.parse_args(arguments)
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)

    image = vqclip.load_tokenizer(options.tokenizer, modality="image")
    text = vqclip.load_tokenizer(options.tokenizer, modality="text")
    source = open_images(options.images)

    make_index(image, source).save(options.out / "index")
    index = CodeIndex.load(options.out / "index")
    floats = 4 * image.embed_dim
    print(f"{len(index)} images, {index.nbytes / len(index):.0f} bytes each ({floats} as a float32 embedding)")

    queries = text.embed(text.encode(options.queries))
    found = CodeSearch(index, image).search(queries, options.k)
    for number, query in enumerate(options.queries):
        best = hits(index, found, number, source)
        path = options.out / f"{number}.html"
        path.write_text(search_page(query, best, f"{len(index)} images, searched by their ids alone"), encoding="utf-8")
        print(f"{path}: {query!r}: {best[0].name} ({best[0].score:.2f}), {best[-1].name} ({best[-1].score:.2f}) last")


if __name__ == "__main__":
    try:
        main()
    except VqclipError as error:
        sys.exit(f"error: {error}")
