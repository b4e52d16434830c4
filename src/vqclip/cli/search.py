"""``vqclip search``: index the codes of images or captions, and search them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from vqclip.data import EvalSet, decode_image, mask_credentials
from vqclip.data.prepare import ImageSource, open_images
from vqclip.data.sources.base import read_image
from vqclip.errors import ConfigError, DataError, printable
from vqclip.io.atomic import write_text
from vqclip.report.page import search_page
from vqclip.runlog.console import print_output
from vqclip.search.hits import find_hits, open_indexed
from vqclip.search.index import CodeIndex, Origin
from vqclip.search.scan import CodeSearch
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.tokenizer.loading import load_tokenizer

__all__ = ["build", "run"]


def run(options: argparse.Namespace) -> None:
    """Make an index, or search one."""
    (_build if options.task == "build" else _query)(options)


def build(
    tokenizer: ImageTokenizer | TextTokenizer,
    source: ImageSource,
    batch_size: int = 64,
    bad_fraction: float = 0.0,
    origin: Origin | None = None,
) -> CodeIndex:
    """Build an index of the images of a source, or of its captions if the tokenizer is one of texts.

    The name of an item is its image's place in the source, followed by the caption or class if the data has one:
    ``pets/cat.png``, ``00003.tar/000031415: a red apple``.

    Raises:
        DataError: more than ``bad_fraction`` of the images cannot be used.
    """
    ids, items = list[Tensor](), list[tuple[int, str]]()  # number of the image, and its text
    if isinstance(tokenizer, ImageTokenizer):
        for batch in EvalSet(source, tokenizer.transform, batch_size, max_bad_fraction=bad_fraction):
            if len(batch):
                ids.append(tokenizer.encode(batch.images).cpu())
                texts = [captions[0] for captions in batch.captions]
                if source.classnames:
                    texts = [source.classnames[label] for label in batch.labels.tolist()]
                items += zip(batch.sample_ids.tolist(), texts, strict=True)
    else:
        items = [(index, caption) for index in range(len(source)) for caption in source.read(index).captions]
        for start in range(0, len(items), batch_size):
            ids.append(tokenizer.encode([caption for _, caption in items[start : start + batch_size]]).cpu())
    if not ids:
        raise DataError("got no items, expected at least one")
    named = getattr(source.config, "captions", None) == "names"  # the caption says nothing that the place does not
    names = [source.place(index) + ("" if named else f": {text}") for index, text in items]
    places = torch.tensor([index for index, _ in items])
    same = torch.equal(places, torch.arange(len(names)))
    return CodeIndex.build(tokenizer, torch.cat(ids), names, None if same else places, origin)


def _build(options: argparse.Namespace) -> None:
    path = options.images or options.captions
    tokenizer = load_tokenizer(options.tokenizer, "image" if options.images else "text")
    source = open_images(path, options.split)
    split = getattr(source.config, "split", None)
    origin = Origin(
        tokenizer=_local(options.tokenizer), pictures=_local(path), split=split, fingerprint=source.fingerprint
    )
    index = build(tokenizer, source, options.batch_size, options.bad_fraction, origin)
    index.save(options.out)
    floats = 4 * tokenizer.embed_dim
    print(
        f"{options.out}: {len(index):,} items of {index.packing.bits} bits, {len(index.codes):,} of them distinct; "
        f"{index.nbytes:,} bytes, {index.nbytes / max(1, len(index)):.1f} an item; float32 embeddings: {floats} an "
        f"item ({floats * len(index) / max(1, index.nbytes):.2f} times as many)"
    )


def _local(path: str) -> str | None:
    """Return an absolute path for local files or patterns; None for a URL or a hub name."""
    found = Path(path).expanduser().absolute()
    return str(found) if found.exists() or (any(mark in path for mark in "{*") and "://" not in path) else None


@torch.no_grad()
def _query(options: argparse.Namespace) -> None:
    if (options.text is None) == (options.image is None):
        raise ConfigError("query: got a text and --image, or neither; expected one of them")
    index = CodeIndex.load(options.index)
    if options.html is not None and options.images is None:
        # An index from somebody else could name any local folder, whose images would get into a shared page.
        former = index.origin.pictures or "images that are not on this machine"
        raise ConfigError(f"--images: missing, expected the images for --html; the index was built from {former}")
    folder = options.tokenizer or index.origin.tokenizer
    if folder is None:
        raise ConfigError(
            "--tokenizer: missing, and the index names no local folder; expected the tokenizer it was built with"
        )
    search = CodeSearch(index, load_tokenizer(folder, index.modality))  # type: ignore[call-overload]
    own: ImageTokenizer | TextTokenizer = load_tokenizer(folder, "image" if options.text is None else "text")
    asked = options.image.name if options.text is None else options.text
    if isinstance(own, ImageTokenizer):
        inputs = own.transform(_read_image(options.image))[None]
    else:
        inputs = own.preprocess([asked])
    found = search.search(own.continuous(inputs) if options.continuous else own.embed(own.encode(inputs)), options.k)
    hits = enumerate(zip(found.scores[0].tolist(), found.items[0].tolist(), strict=True), start=1)
    lines = [f"{rank:3d}  {score:.4f}  {printable(index.names[item], one_line=True)}" for rank, (score, item) in hits]
    print_output("\n".join(lines))
    if options.html is not None:
        notes = f"{len(index):,} items of {index.packing.bits} bits in {options.index.name}, searched by their codes"
        source = open_indexed(index, options.images)
        page = search_page(str(asked), find_hits(index, found, source, _print_left_out), notes)
        try:
            write_text(options.html, page)
        except OSError as error:
            raise ConfigError(f"--html: {options.html}: cannot be written ({error.strerror})") from None


def _read_image(path: Path) -> Tensor:
    try:
        return decode_image(read_image(path, str(path)))
    except DataError as error:
        raise DataError(f"{path}: {error}", error.kind) from error


def _print_left_out(error: DataError) -> None:
    print(f"vqclip search: left out of the page: {printable(mask_credentials(str(error)))}", file=sys.stderr)
