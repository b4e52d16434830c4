"""``vqclip search``: index the codes of images or captions, and search them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from vqclip.cli.options import (
    BadFraction,
    BatchSize,
    Command,
    Data,
    Device,
    LocalPath,
    Page,
    Text,
    Tokenizer,
    local_path,
    paths_and_overrides,
)
from vqclip.errors import ConfigError, DataError, printable
from vqclip.io.files import format_bytes
from vqclip.runlog.console import print_output

if TYPE_CHECKING:
    from vqclip.tokenizer import ImageTokenizer, TextTokenizer


class Build(Command):
    """Make an index of the codes of images or captions.

    Examples:
      vqclip search build --tokenizer runs/photos --data photos/ --out images.index
      vqclip search build --tokenizer runs/photos --data photos.csv --modality text --out texts
    """

    tokenizer: Tokenizer
    data: Data
    modality: Literal["image", "text"] = "image"
    """image: index the images; text: their captions."""
    out: LocalPath
    """Folder of the index."""
    batch_size: BatchSize = 64
    """Images or captions at once."""
    bad_fraction: BadFraction = 0.01
    """Largest share of unusable images; they are left out."""
    device: Device = "auto"

    def run(self) -> None:
        """Make the index."""
        from vqclip import dist
        from vqclip.data.prepare import open_images
        from vqclip.search.index import Origin, build_index
        from vqclip.tokenizer.folder import PACKAGED, find_folder
        from vqclip.tokenizer.loading import load_tokenizer

        loaded: Any = load_tokenizer(self.tokenizer, self.modality)
        tokenizer = loaded.to(dist.choose_device(self.device, "--device"))
        paths, keys = paths_and_overrides(self.data)
        source = open_images(paths, keys)
        pictures = local_path(paths[0]) if len(paths) == 1 else None
        home = local_path(self.tokenizer)
        if home is None and self.tokenizer in PACKAGED:
            home = str(find_folder(self.tokenizer))
        origin = Origin(tokenizer=home, pictures=pictures, fingerprint=source.fingerprint)
        index = build_index(tokenizer, source, self.batch_size, self.bad_fraction, origin)
        index.save(self.out)
        floats = 4 * tokenizer.embed_dim
        print_output(
            f"{self.out}: {len(index):,} items of {index.packing.bits} bits, {len(index.codes):,} of them distinct; "
            f"{format_bytes(index.nbytes)}, {index.nbytes / max(1, len(index)):.1f} bytes an item; float32 embeddings: "
            f"{floats} an item ({floats * len(index) / max(1, index.nbytes):.2f} times as many)"
        )


class Query(Command, words=("text",)):
    """Search an index by words or an image.

    Examples:
      vqclip search query --index images.index "a red apple" --data photos/ --out page.html
      vqclip search query --index images.index --image apple.png
    """

    text: Text | None = None
    """Text to search for."""
    index: LocalPath
    """Folder of the index."""
    tokenizer: Text | None = None
    """Tokenizer that the index was built with; its folder at that time without it."""
    data: tuple[Text, ...] = ()
    """The data that the index was built from, with the same keys; for --out."""
    image: LocalPath | None = None
    """Image to search for instead of a text."""
    k: Annotated[int, Field(ge=1, lt=2**63)] = 24
    """Number of results."""
    out: Page | None = None
    """Write a page with the images of --data to this file."""

    def run(self) -> None:
        """Print the results, and write the page."""
        import torch

        from vqclip.data import decode_image, mask_credentials
        from vqclip.data.sources.base import read_image
        from vqclip.io.atomic import write_text
        from vqclip.report.page import search_page
        from vqclip.search.index import CodeIndex
        from vqclip.search.scan import CodeSearch, find_hits, open_indexed
        from vqclip.tokenizer import ImageTokenizer
        from vqclip.tokenizer.loading import load_tokenizer

        if (self.text is None) == (self.image is None):
            raise ConfigError("query: got a text and --image, or neither; expected one of them")
        index = CodeIndex.load(self.index)
        if self.out is not None and not self.data:
            # An index from somebody else could name any local folder, whose images would get into a shared page.
            former = index.origin.pictures or "images that are not on this machine"
            raise ConfigError(f"--data: missing, expected the images for --out; the index was built from {former}")
        folder = self.tokenizer or index.origin.tokenizer
        if folder is None:
            raise ConfigError(
                "--tokenizer: missing, and the index names no local folder; expected the tokenizer it was built with"
            )
        search = CodeSearch(index, load_tokenizer(folder, index.modality))  # type: ignore[call-overload]
        own: ImageTokenizer | TextTokenizer = load_tokenizer(folder, "image" if self.text is None else "text")
        asked = self.text or str(self.image)
        if isinstance(own, ImageTokenizer):
            try:
                inputs = own.transform(decode_image(read_image(Path(asked), asked)))[None]
            except DataError as error:
                raise DataError(f"{asked}: {error}", error.kind) from error
        else:
            inputs = own.preprocess([asked])
        with torch.no_grad():
            query = own.embed(own.encode(inputs))
        found = search.search(query, self.k)
        for rank, (score, item) in enumerate(zip(found.scores[0].tolist(), found.items[0].tolist(), strict=True), 1):
            print_output(f"{rank:3d}  {score:.4f}  {printable(index.names[item], one_line=True)}")
        if self.out is not None:

            def report_bad(error: DataError) -> None:
                shown = printable(mask_credentials(str(error)))
                print(f"vqclip search: left out of the page: {shown}", file=sys.stderr)

            notes = f"{len(index):,} items of {index.packing.bits} bits in {self.index.name}, searched by their codes"
            hits = find_hits(index, found, open_indexed(index, *paths_and_overrides(self.data)), report_bad)
            write_text(self.out, search_page(self.text or Path(asked).name, hits, notes))
