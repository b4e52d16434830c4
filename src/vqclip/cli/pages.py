"""Commands that show something: ``vqclip report``, ``reconstruct``, ``demo`` and ``search``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from vqclip.cli.options import (
    MODEL,
    BadFraction,
    BatchSize,
    Command,
    Data,
    Device,
    LocalPath,
    Page,
    Text,
    Tokenizer,
    Workers,
    local_path,
    paths_and_overrides,
    require_page,
)
from vqclip.errors import ConfigError, DataError, printable
from vqclip.io.files import format_bytes
from vqclip.runlog.console import print_output

if TYPE_CHECKING:
    from vqclip.tokenizer import ImageTokenizer, TextTokenizer


class Report(Command, words=("runs",)):
    """Write the page of a run: figures, curves, codes on images, and a verdict; or one page that compares several.

    The page is one file that needs no network and runs no script. Neither the model nor the data is read.

    Examples:
      vqclip report runs/base
      vqclip report runs/small runs/large --out comparison.html
    """

    runs: tuple[LocalPath, ...] = Field(min_length=1)
    """Folder of a run, such as runs/base; several are compared."""
    out: Page | None = None
    """The page; for one run report.html in its folder."""

    def run(self) -> None:
        """Write the page."""
        from vqclip.report import write_comparison, write_report

        if len(self.runs) == 1:
            path = write_report(self.runs[0], self.out)
        elif self.out is not None:
            path = write_comparison(self.runs, self.out)
        else:
            raise ConfigError(f"--out: missing; expected a page for {len(self.runs)} runs, such as comparison.html")
        print_output(f"{path}: {format_bytes(path.stat().st_size)}; open it in a browser")


class Reconstruct(Command, words=("tokenizer",)):
    """Write what the ids of images decode to: image files for other programs, or a page to look at.

    The tokenizer needs a pixel decoder. With --images, every image of the folder is written under its relative name and
    at its own size, as TokBench, VTBench and torch-fidelity read them; run the same command again to continue after a
    stop. On several processes, which share the images: torchrun --standalone --nproc-per-node 8 -m vqclip reconstruct

    With --data, a page shows the worst, median and best by PSNR of --limit images, each decoded from its first residual
    stages and codebooks, and from all ids. It is one file that needs no network and runs no script.

    Examples:
      vqclip reconstruct runs/pixels --images TokBench/images --out reconstructed
      vqclip reconstruct runs/pixels --data path/to/images --out page.html
      vqclip reconstruct runs/pixels --data "val/{0..3}.tar" captions=text --out page.html
      vqclip reconstruct runs/pixels --data kind=scenes split=val --out page.html
    """

    tokenizer: Tokenizer
    images: LocalPath | None = None
    """Folder of image files, all of which are written."""
    data: Data = ()
    out: LocalPath
    """Folder of the image files, or the page."""
    batch_size: BatchSize = 256
    """Images in a batch."""
    bad_fraction: BadFraction = 0.01
    """Largest share of unusable images; they are left out."""
    device: Device = "auto"
    limit: Annotated[int, Field(ge=1, le=10_000)] = 256
    """Images of --data that are decoded, evenly spread over them."""
    show: Annotated[int, Field(ge=1, le=32)] = 4
    """Images of each of worst, median and best on the page."""
    side: Annotated[int, Field(ge=16, le=512)] = 256
    """Largest side of an image on the page, in pixels; PSNR is always of the full size."""
    workers: Workers = 0
    """Worker processes that decode the images of --data; 0: this process."""

    @field_validator("out")
    @classmethod
    def _can_be_written(cls, out: Path, info: ValidationInfo) -> Path:
        return require_page(out) if info.data.get("data") and not info.data.get("images") else out

    def run(self) -> None:
        """Write the image files, or the page."""
        from vqclip import dist
        from vqclip.evaluation.reconstructions import write_reconstructions
        from vqclip.tokenizer.loading import load_tokenizer

        if (self.images is None) == (not self.data):
            raise ConfigError("expected one of --images FOLDER, for image files, and --data, for a page")
        device = dist.choose_device(self.device, "--device")
        tokenizer = load_tokenizer(self.tokenizer, "image").to(device)
        tokenizer.require_pixels()
        tokenizer.require_codes(f"{self.tokenizer}:")
        if self.images is None:
            self._write_page(tokenizer)
            return
        images, out = self.images.expanduser(), self.out.expanduser()
        try:
            dist.init(device)
            made, there, bad = write_reconstructions(tokenizer, images, out, self.batch_size, self.bad_fraction)
            if dist.is_main():
                left_out = f"; {bad:,} cannot be used and are left out" if bad else ""
                print_output(f"{out}: {made:,} images written, {there:,} were there before{left_out}")
        finally:
            dist.shutdown()

    def _write_page(self, tokenizer: ImageTokenizer) -> None:
        import contextlib
        import shlex

        from vqclip.data import mask_credentials
        from vqclip.data.prepare import open_images
        from vqclip.data.workers import explain_worker_deaths
        from vqclip.evaluation.reconstructions import reconstruct
        from vqclip.io.atomic import write_text
        from vqclip.report.page import reconstructions_page

        source, names = open_images(*paths_and_overrides(self.data)), ("batch_size", "workers", "limit")
        reading = {name: getattr(self, name) for name in names} | {"max_bad_fraction": self.bad_fraction}
        with explain_worker_deaths("reconstruct") if self.workers else contextlib.nullcontext():
            found = reconstruct(tokenizer, source, self.show, self.side, **reading)
        place, shown = (mask_credentials(each) for each in (self.tokenizer, " ".join(self.data)))
        facts = [f"{found.images:,} of {len(source):,} images of {shown}", f"tokenizer {place}"]
        if found.bad:
            facts.append(f"{found.bad:,} images cannot be used and are left out")
        side = min(self.side, tokenizer.require_pixels().image_size)
        repeat = mask_credentials(shlex.join(["vqclip", "reconstruct", *self.given]))
        write_text(self.out, reconstructions_page(f"Reconstructions of {shown}", found, facts, repeat, side=side))
        _, bits, figures = found.decodings[-1]
        print_output(
            f"{self.out}: {found.images:,} images, {bits:,.0f} bits an image, PSNR {figures['psnr']:.2f} dB; "
            f"{format_bytes(self.out.stat().st_size)}; open it in a browser"
        )


class Demo(Command, words=("folder",)):
    """Show in the browser what a tokenizer makes of an image or a caption.

    Ids, bits, the probabilities of classes, and the nearest items of an index. Needs pip install 'vqclip[demo]'.
    """

    folder: Text = Field(description=f"{MODEL}; one modality is enough")
    index: LocalPath | None = None
    """Index of vqclip search build, whose nearest items are shown."""
    data: tuple[Text, ...] = ()
    """The data that the index was built from, with the same keys, to show its images."""
    host: Text = "127.0.0.1"
    """Address to listen on; others open the page to a network."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7860
    """Port; 0: any that is free."""
    device: Device = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads of the CPU; all cores without it."""

    def run(self) -> None:
        """Serve the page until Ctrl-C."""
        import torch

        from vqclip import dist
        from vqclip.demo.answers import Answers
        from vqclip.demo.page import serve

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device = dist.choose_device(self.device, "--device")
        answers = Answers.load(self.folder, self.index, *paths_and_overrides(self.data), device)
        if self.host not in ("127.0.0.1", "localhost", "::1"):
            who = "everyone who can reach this machine can use the page, and see what --index and --data show"
            print(f"vqclip demo: warning: --host {self.host}: {who}; there is no password", file=sys.stderr)

        def ready(address: str) -> None:
            print_output(f"Open {address} in a browser. Ctrl-C stops the demo.")

        serve(self.folder, answers, self.host, self.port, ready)


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
    """Largest share of unusable images or captions; they are left out."""
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
        images = local_path(paths[0]) if len(paths) == 1 else None
        home = local_path(self.tokenizer)
        if home is None and self.tokenizer in PACKAGED:
            home = str(find_folder(self.tokenizer))
        origin = Origin(tokenizer=home, images=images, fingerprint=source.fingerprint)
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
            former = index.origin.images or "images that are not on this machine"
            raise ConfigError(f"--data: missing, expected the images for --out; the index was built from {former}")
        folder = self.tokenizer or index.origin.tokenizer
        if folder is None or (self.tokenizer is None and not Path(folder).exists()):
            named = "no local folder" if folder is None else f"{folder}, which is not there"
            raise ConfigError(f"--tokenizer: missing, and the index names {named}; expected that it was built with")
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
